"""A checkpoint on the embedded engine without a server: greedy continuations, and log-probabilities of given tokens.

What ``trtx build`` proves its builds with, and what ``trtx eval fidelity`` holds served engines against.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtx.errors import LaunchError, UsageError
from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.results import RequestError, RequestFailed, RequestOutput
from trtx.torch_engine.llmapi.sampling import SamplingParams

_KV_TOKENS = 32_768
_STEP_TOKENS = 8192  # of the engine's longest step, TensorRT-LLM's own default
_POLL_S = 0.2
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class OfflineEngine:
    """A context manager; the engine's process, and what it holds of a GPU, is gone when it is left.

    ``purpose``: ends the sentence "the engine that … failed". ``gpus``: what ``CUDA_VISIBLE_DEVICES`` is for the
    engine's process; None: as here. ``longest``: tokens of the longest request, its output too, if it is long.
    ``check``: is called while it waits, and may raise. Raises UsageError for a checkpoint that the engine can't load
    and for a request that it refuses, LaunchError for an engine that dies.
    """

    def __init__(
        self,
        model: Path,
        *,
        purpose: str,
        kv_dtype: str = "auto",
        longest: int = 0,
        gpus: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._purpose, self._check = model, purpose, check
        self._kv_cache = {"dtype": kv_dtype, "max_tokens": max(_KV_TOKENS, 2 * longest)}
        self._is_long = longest > _STEP_TOKENS
        self._gpus = gpus

    def __enter__(self) -> Self:
        with self._told(), _environment(self._gpus):
            self._llm = LLM(
                self._model,
                max_batch_size=64,
                max_num_tokens=_STEP_TOKENS,
                enable_chunked_prefill=self._is_long,
                kv_cache_config=self._kv_cache,
                cuda_graph_config=None,  # seconds to record, and nothing here is timed
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.shutdown()

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._llm.max_seq_len

    def continuations(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Iterator[list[int]]:
        """Greedy tokens after each prompt, in order, up to the model's end token, which is among them. All are
        submitted before this returns."""
        return self._outputs(
            prompts, SamplingParams(max_tokens=max_new_tokens, detokenize=False), lambda one: list(one.token_ids)
        )

    def prompt_logprobs(self, texts: Sequence[list[int]], count: int) -> Iterator[list[dict[int, float]]]:
        """Of each text, natural log-probabilities by token at each position but the first: of the text's own token,
        and of the ``count`` likeliest. All are submitted before this returns."""
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=count, detokenize=False, ignore_eos=True)
        return self._outputs(
            texts,
            scoring,
            lambda one: [{token: entry.logprob for token, entry in row.items()} for row in one.prompt_logprobs],
        )

    def _outputs(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, read: Callable[[Any], Any]
    ) -> Iterator[Any]:
        with self._told():
            running = [self._llm.generate_async(ids, sampling) for ids in prompts]
        running.reverse()

        def outputs() -> Iterator[Any]:
            while running:  # each is let go of once it is read: log-probabilities of all would take gigabytes
                with self._told():
                    output = self._wait(running.pop())
                yield read(output.outputs[0])

        return outputs()

    def _wait(self, request: RequestOutput) -> RequestOutput:
        while True:
            try:
                return request.result(_POLL_S)
            except TimeoutError:
                self._check()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RequestError) and not isinstance(error, RequestFailed):
                raise UsageError(f"{self._model}: {error}") from error
            raise LaunchError(f"the engine that {self._purpose} failed on {self._model}: {error}") from error


@contextlib.contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """Of the process that is started inside."""
    before = os.environ.get(_VISIBLE)
    if gpus is not None:
        os.environ[_VISIBLE] = gpus
    try:
        yield
    finally:
        if gpus is not None:
            os.environ.pop(_VISIBLE)
            if before is not None:
                os.environ[_VISIBLE] = before
