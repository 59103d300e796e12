"""A worker that answers one token and writes down each request as it came: what a frontend makes of a body. It
registers the chat template that a worker of trtx does.

``python recording_worker.py MODEL FILE``; FILE gets one line of JSON a request. Addresses come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.worker import Worker, WorkerConfig
from dynamo.common.utils.namespace import get_worker_namespace

from trtx.worker.multimodal.audio_guard import registered_template


class RecordingEngine(LLMEngine):  # type: ignore[misc, unused-ignore]
    def __init__(self, model: str, file: Path) -> None:
        self._model = model
        self._file = file

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        facts = LlmRegistration(context_length=4096, kv_cache_block_size=32, total_kv_blocks=128)
        return EngineConfig(model=self._model, served_model_name="tiny", llm=facts)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(request)) + "\n")
        yield {"token_ids": [70], "index": 0, "finish_reason": "length"}

    async def cleanup(self) -> None:
        pass


if __name__ == "__main__":
    model, file = sys.argv[1:]
    template = registered_template(Path(model), os.environ, prompts_by="frontend")
    config = WorkerConfig(
        namespace=get_worker_namespace(),
        model_name=model,
        served_model_name="tiny",
        discovery_backend="file",
        request_plane="tcp",
        event_plane="zmq",
        custom_jinja_template=None if template is None else str(template),
    )
    uvloop.run(Worker(RecordingEngine(model, Path(file)), config).run())
