"""A worker that emits one chunk per token, as upstream does, over trtx's paced engine; the baseline of a comparison.

``python benchmarks/one_token_a_chunk.py --model DIR --served-model-name NAME --itl-ms 4``: ``streaming.py`` starts it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

from trtx.engine.paced import PacedLLM, SamplingParams


class OneTokenAChunk(LLMEngine):  # type: ignore[misc]  # dynamo ships no types for it
    def __init__(self, model: str, itl_ms: float) -> None:
        self._model = model
        self._itl_ms = itl_ms
        self._llm: PacedLLM | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[OneTokenAChunk, WorkerConfig]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", required=True)
        parser.add_argument("--served-model-name", required=True)
        parser.add_argument("--itl-ms", type=float, required=True)
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
            model_name=args.model,
            served_model_name=args.served_model_name,
            discovery_backend=os.environ["DYN_DISCOVERY_BACKEND"],
            request_plane=os.environ["DYN_REQUEST_PLANE"],
            event_plane=os.environ["DYN_EVENT_PLANE"],
        )
        return cls(args.model, args.itl_ms), config

    async def start(self, worker_id: int) -> EngineConfig:
        self._llm = PacedLLM(self._model, paced_itl_ms=self._itl_ms)
        context_length = self._llm.args.max_seq_len
        return EngineConfig(model=self._model, llm=LlmRegistration(context_length=context_length))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        assert self._llm is not None
        wanted: int = request["stop_conditions"]["max_tokens"]
        prompt_tokens = len(request["token_ids"])
        sent = 0
        result: Any = self._llm.generate_async(request["token_ids"], SamplingParams(max_tokens=wanted), streaming=True)
        async for step in result:
            for token_id in step.outputs[0].token_ids[sent:]:
                sent += 1
                chunk: GenerateChunk = {"token_ids": [token_id], "index": 0}
                if sent == wanted:
                    chunk["finish_reason"] = "length"
                    chunk["completion_usage"] = {
                        "prompt_tokens": prompt_tokens,
                        "completion_tokens": sent,
                        "total_tokens": prompt_tokens + sent,
                    }
                yield chunk

    async def cleanup(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()


if __name__ == "__main__":
    run(OneTokenAChunk, sys.argv[1:])
