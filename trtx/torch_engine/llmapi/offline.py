"""Runs a checkpoint on the embedded engine without a server: greedy continuations, and logprobs of given tokens.

``trtx build`` uses it to verify its builds, ``trtx eval fidelity`` as the reference for served engines.
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
from trtx.torch_engine.llmapi.request_errors import RequestError, RequestFailed
from trtx.torch_engine.llmapi.results import RequestOutput
from trtx.torch_engine.llmapi.sampling import SamplingParams

_KV_TOKENS = 32_768
_STEP_TOKENS = 8192  # tokens of the longest step; TensorRT-LLM's own default
_POLL_S = 0.2
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class OfflineEngine:
    """Context manager for an engine; on exit, the engine's process and its GPU memory are gone.

    ``purpose`` completes the sentence "the engine that … failed". ``gpus``: ``CUDA_VISIBLE_DEVICES`` of the engine's
    process; None: inherited. ``longest``: tokens of the longest request, output included. ``check``: called while the
    engine waits; it may raise. Raises UsageError for a checkpoint that the engine can't load and for a refused request,
    LaunchError if the engine dies.
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
                cuda_graph_config=None,  # capture takes seconds, and nothing here is timed
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.shutdown()

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output."""
        return self._llm.max_seq_len

    def continuations(self, prompts: Sequence[list[int]], max_new_tokens: int) -> Iterator[list[int]]:
        """Yields the greedy tokens after each prompt, in order, up to and including the model's end token.

        All prompts are submitted before this returns.
        """
        return self._outputs(
            prompts, SamplingParams(max_tokens=max_new_tokens, detokenize=False), lambda one: list(one.token_ids)
        )

    def prompt_logprobs(self, texts: Sequence[list[int]], count: int) -> Iterator[list[dict[int, float]]]:
        """Yields for each text its natural log-probabilities by token, at each position except the first.

        They cover the text's own token and the ``count`` likeliest. All texts are submitted before this returns.
        """
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
            while running:  # frees each output once it is read: all logprobs would take gigabytes
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
    """Sets ``CUDA_VISIBLE_DEVICES`` for processes that start inside."""
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
