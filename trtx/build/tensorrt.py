"""``--backend tensorrt``: builds a TensorRT engine in a child process, with the LLM class of TensorRT-LLM 1.2 or older.

It needs only the wheel: ``tensorrt_llm._tensorrt_engine.LLM(...).save(dir)`` (``_TrtLLM`` in 1.2), which quantizes with
ModelOpt itself. The names are those of TensorRT-LLM 1.2 (``llmapi/llm.py``, ``llmapi/llm_utils.py``,
``quantization/quantize_by_modelopt.py``). Later versions removed the backend (PR #15767).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from trtx.build.calibration import MAX_TOKENS, Entry
from trtx.build.formats import FORMATS, NO_FORMAT
from trtx.build.progress import Tell
from trtx.build.quantize import render
from trtx.build.source import Source
from trtx.config import Role
from trtx.engine import needs_gpu
from trtx.errors import UsageError
from trtx.memory import MemoryDevice

_LAST = (1, 2)
_SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len")


@dataclass(frozen=True, slots=True)
class EngineJob:
    """An engine build job.

    ``source``, ``output``: directories. ``values``: the resolved engine config, which is compiled into the engine.
    """

    source: str
    output: str
    form: str
    kv_dtype: str
    values: dict[str, Any]
    entries: tuple[Entry, ...]


def check_backend(version: str | None, *, gpu: MemoryDevice | None, source: Source, roles: tuple[Role, ...]) -> None:
    """Raises UsageError if TensorRT-LLM ``version`` (None: not installed) can't build this engine."""
    if version is None:
        raise UsageError(
            "--backend tensorrt needs TensorRT-LLM 1.2 or earlier, and none is installed; "
            "install tensorrt_llm==1.2.1, or leave --backend out"
        )
    try:
        has_it = Version(version).release[:2] <= _LAST
    except InvalidVersion:
        has_it = False
    if not has_it:
        raise UsageError(
            f"--backend tensorrt: TensorRT-LLM {version} has no TensorRT backend, it was removed after 1.2 "
            "(PR #15767); leave --backend out, as it loads the quantized checkpoint itself, or install "
            "tensorrt_llm==1.2.1"
        )
    if gpu is None and needs_gpu(version):
        raise UsageError("--backend tensorrt builds on the GPU that the engine runs on, and none is visible here")
    if not source.checkpoint.has_weights:
        raise UsageError(
            f"--backend tensorrt: model {source.name} has no stored weights; expected a checkpoint with some"
        )
    if len(roles) > 1:
        raise UsageError(f"--backend tensorrt builds one engine, for {' and '.join(roles)} give one --role at a time")


def build_engine(job: EngineJob, tell: Tell) -> None:
    """Builds and saves ``rank*.engine`` and config.json, in minutes, on the GPUs that the engine will run on."""
    from tensorrt_llm._tensorrt_engine import LLM
    from tensorrt_llm.llmapi import BuildConfig, CalibConfig, QuantAlgo, QuantConfig

    tell("loading", 0, 0)
    quantization: dict[str, Any] = {}
    kv_cache = QuantAlgo.FP8 if job.kv_dtype == "fp8" else None
    if job.form != NO_FORMAT:
        algo = QuantAlgo[FORMATS[job.form].algorithm]
        quantization["quant_config"] = QuantConfig(quant_algo=algo, kv_cache_quant_algo=kv_cache)
    elif kv_cache is not None:
        quantization["quant_config"] = QuantConfig(kv_cache_quant_algo=kv_cache)
    with tempfile.TemporaryDirectory(prefix="trtx-calibration-") as texts:
        if job.entries:
            _write_texts(job, Path(texts))
            quantization["calib_config"] = CalibConfig(
                calib_dataset=texts, calib_batches=len(job.entries), calib_max_seq_length=MAX_TOKENS
            )
        tell("building", 0, 0)
        llm = LLM(
            model=job.source,
            tensor_parallel_size=int(job.values.get("tensor_parallel_size") or 1),
            build_config=BuildConfig(**{name: job.values[name] for name in _SIZES if job.values.get(name)}),
            **quantization,
        )
    try:
        tell("exporting", 0, 0)
        llm.save(job.output)
    finally:
        llm.shutdown()


def _write_texts(job: EngineJob, directory: Path) -> None:
    """Writes a local data set in the form that the calibration loader reads: split train, column text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.source)
    rows = [json.dumps({"text": render(tokenizer, entry)}) for entry in job.entries]
    (directory / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
