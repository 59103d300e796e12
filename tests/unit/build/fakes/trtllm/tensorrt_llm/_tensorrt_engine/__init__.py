"""The LLM of the TensorRT backend: the engine that it saves is a note of what it was asked for."""

import json
from dataclasses import asdict
from pathlib import Path

from tensorrt_llm.llmapi import BuildConfig, CalibConfig, QuantConfig


class LLM:
    def __init__(
        self,
        model: str,
        tensor_parallel_size: int = 1,
        *,
        build_config: BuildConfig | None = None,
        quant_config: QuantConfig | None = None,
        calib_config: CalibConfig | None = None,
    ) -> None:
        assert (Path(model) / "config.json").is_file()
        self._asked = {
            "tensor_parallel_size": tensor_parallel_size,
            "build_config": build_config and asdict(build_config),
            "quant_config": quant_config and asdict(quant_config),
            "calib_config": calib_config and asdict(calib_config),
        }
        if calib_config is not None:
            rows = (Path(calib_config.calib_dataset) / "train.jsonl").read_text(encoding="utf-8").splitlines()
            self._asked["texts"] = [json.loads(row)["text"] for row in rows]

    def save(self, engine_dir: str) -> None:
        (Path(engine_dir) / "config.json").write_text(json.dumps(self._asked), encoding="utf-8")
        (Path(engine_dir) / "rank0.engine").write_bytes(b"engine")

    def shutdown(self) -> None:
        pass
