"""``GenerationExecutor``: one torch engine with what an executor does around it: faults, health, gates, shutdown."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tensorrt_llm._facts import public
from tensorrt_llm._impl import effects
from tensorrt_llm._impl.events import IterationResult, KvEvents, Rows
from tensorrt_llm._impl.ranks import Ranks, ranks_per_node, world_size
from tensorrt_llm._standin import FAULTS, NEVER_RETURNS_SECONDS, VERSION, absent

DEFAULT_REQUEST_PRIORITY = 0.5
# Fields of a row of statistics that the torch engine has and TensorRT-LLM has not
OWN_STATS = frozenset(("numPreemptions", "deviceWaitMS", "numGraphMisses", "guidedDecodingStats"))


class RequestError(RuntimeError):
    """One request can't be served; the engine goes on."""


RequestError.__module__ = "tensorrt_llm.executor.utils"


class LoRARequest:
    """Named here so that an import works; the torch engine has no LoRA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise absent("LoRA")


LoRARequest.__module__ = "tensorrt_llm.executor.request"


@public
class GenerationExecutor:
    """Owns the engine's process and its ranks. Its public names are the ones Dynamo and trtx probe."""

    def __init__(self, model: str, tokenizer: Any, args: Any) -> None:
        from trtx.torch_engine.llmapi import LLM as TorchLLM

        self._fatal_error: BaseException | None = None
        self._is_shutdown = False
        self._has_request = self._has_token = False
        self._requests = itertools.count(1)
        self._attention_dp_size = args.tensor_parallel_size if args.enable_attention_dp else 1
        self._ranks = Ranks(world_size(args), ranks_per_node(args))
        try:
            self._engine = TorchLLM(model, tokenizer, **effects.for_torch_engine(args))
        except BaseException:
            self._ranks.shutdown()
            raise
        self._stats = Rows(self._new_stats, max(1, args.max_stats_len))
        self._has_stats = args.enable_iter_perf_stats
        buffer = args.kv_cache_config.event_buffer_max_size
        self._events = KvEvents(self._new_events, args)
        self._event_rows = Rows(self._events.new, max(1, buffer))
        self._has_events = buffer > 0 and args.kv_cache_config.enable_block_reuse

    def check_health(self) -> bool:
        return not self._is_shutdown and self._fatal_error is None and self._engine._check_health()

    def is_shutdown(self) -> bool:
        return self._is_shutdown or self._fatal_error is not None

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return self._engine.get_kv_cache_capacity()

    def get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        return self.aget_stats(timeout).get_results()

    def aget_stats(self, timeout: float | None) -> IterationResult:
        return IterationResult(self._stats, timeout if self._has_stats else 0)

    def get_kv_events(self, timeout: float | None) -> list[dict[str, Any]]:
        return self.aget_kv_events(timeout).get_results()

    def aget_kv_events(self, timeout: float | None) -> IterationResult:
        # 1.2.1 makes the stream with the first request; later versions fetch it over RPC and just find it empty.
        assert self._has_request or VERSION != "1.2.1", "KV Event IterationResult is not properly instantiated."
        return IterationResult(self._event_rows, timeout if self._has_events else 0)

    def shutdown(self) -> None:
        if self._is_shutdown:
            return
        if "hang-on-shutdown" in FAULTS:
            time.sleep(NEVER_RETURNS_SECONDS)
        self._is_shutdown = True
        self._engine.shutdown()
        self._ranks.shutdown()

    # --- what the LLM beside it asks ---

    def _submit(self, prompt_token_ids: list[int], sampling: Any, **options: Any) -> Any:
        """A request of the torch engine; RequestError where it refuses. Counts it, for the faults."""
        number = next(self._requests)
        self._has_request = True
        if number >= FAULTS.get("request-error-after", number + 1):
            raise RequestError(f"request {number} is refused: STANDIN_TRTLLM_FAULT asks for it")
        try:
            submitted = self._engine.generate_async(prompt_token_ids, sampling, **options)
        except (RuntimeError, ValueError) as error:
            raise self._error(error) from error
        if number >= FAULTS.get("fatal-after", number + 1):
            self._fail(RuntimeError(f"CUDA error: an illegal memory access was encountered (request {number})"))
        return submitted

    def _fail(self, error: BaseException) -> None:
        """The engine is dead for everybody."""
        if self._fatal_error is None:
            self._fatal_error = error
            self._engine.shutdown()

    def _error(self, error: BaseException) -> BaseException:
        """An error of the torch engine as the real one's: a refused request, or the end of the engine."""
        from trtx.torch_engine.llmapi import RequestError as TorchRequestError

        if isinstance(error, (TorchRequestError, ValueError)):
            return RequestError(str(error))
        if self._fatal_error is not None:
            return RuntimeError(str(self._fatal_error))
        if not self._is_shutdown and not self._engine._check_health():
            self._fatal_error = error
        return RuntimeError(str(error))

    def _step_was_seen(self) -> None:
        self._has_token = True

    def _new_stats(self) -> list[dict[str, Any]]:
        """Nothing before the first generated token: the real executor opens the stream then."""
        if not self._has_stats or not self._has_token:
            return []
        rows = [
            {name: value for name, value in own.items() if name not in OWN_STATS} for own in self._engine.get_stats(0)
        ]
        return [row for own in rows for row in self._by_rank(own)]

    def _by_rank(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Under attention DP one row a rank; all but rank 0 are idle here, and queues are counted on rank 0 alone."""
        idle = {name: 0 for name in row if name.startswith("num")}
        return [row, *({**row, **idle, "attentionDpRank": rank} for rank in range(1, self._attention_dp_size))]

    def _new_events(self) -> list[dict[str, Any]]:
        return self._engine.get_kv_cache_events(0) if self._has_events and self._has_token else []
