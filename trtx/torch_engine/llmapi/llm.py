"""``LLM``: TensorRT-LLM's LLM API in front of the torch engine's own process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from trtx.checkpoint import read_end_ids, read_model_config
from trtx.checkpoint.tensor_parallel import check_expert_sizes
from trtx.checkpoint.vision import read_vision_config
from trtx.ipc.shared_tensor import SharedTensor
from trtx.text import TextStream, Tokenizer, fast_tokenizer, load_hf_tokenizer, load_tokenizer
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.llmapi.arguments import resolve_llm_args, resolve_weight_group
from trtx.torch_engine.llmapi.choices import Choice, find_stops
from trtx.torch_engine.llmapi.client import EngineClient
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.guided_decoding import grammar_tokenizer
from trtx.torch_engine.llmapi.media import EmbeddingUses
from trtx.torch_engine.llmapi.memory_controls import MemoryControls
from trtx.torch_engine.llmapi.processors import pickled, pickled_batched
from trtx.torch_engine.llmapi.prompts import Prompt, PromptReader
from trtx.torch_engine.llmapi.request_errors import RequestError, typed
from trtx.torch_engine.llmapi.results import RequestOutput
from trtx.torch_engine.llmapi.retention import read_retention
from trtx.torch_engine.llmapi.sampling import SamplingParams, checked_sampling, resolve_sampling
from trtx.torch_engine.llmapi.values import is_text, shown
from trtx.torch_engine.messages import Handoff, HandoffStats, MediaSpan, Submit
from trtx.torch_engine.sampling_plan import SamplingPlan

DEFAULT_PRIORITY = 0.5


class LLM(MemoryControls):
    """Loads a model directory into a separate process, and serves requests from it.

    The constructor returns once the engine is ready. It raises ValueError for arguments that TensorRT-LLM would refuse
    or that the torch engine can't honour, ``trtx.errors.UsageError`` for an unsuitable checkpoint or device, and
    RuntimeError if the process dies while loading. ``unsupported_fields`` names the accepted arguments that have no
    effect.

    ``batched_logits_processor`` edits the logits of requests that set ``apply_batched_logits_processor``. It runs in
    the engine's process, as a request's own processors do: see
    :class:`trtx.torch_engine.logits_processor.LogitsProcessor`.

    ``deterministic`` is trtx's own argument: a request's tokens and log-probabilities are then bit-identical whatever
    else runs, and however its prompt's KV arrived: computed, cached or handed off.

    ``weight_group`` is trtx's own too: ``{"directory": …, "name": …, "engines": 2}``, the fields of
    :class:`trtx.torch_engine.llm_args.WeightGroup`, shares the weights with other engines of this host.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        batched_logits_processor: Any = None,
        deterministic: bool = False,
        weight_group: Mapping[str, Any] | None = None,
        **llm_args: Any,
    ) -> None:
        given = {
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "tokenizer_mode": None if tokenizer_mode == "auto" else tokenizer_mode,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
        }
        given = {name: value for name, value in given.items() if value is not None} | llm_args
        path = model_directory(model)
        self.args: LlmArgs
        self.unsupported_fields: dict[str, str]
        self.args, self.unsupported_fields = resolve_llm_args(str(path), given)
        check_expert_sizes(
            read_model_config(path), self.args.moe_tensor_parallel_size, self.args.moe_expert_parallel_size
        )
        self._end_ids = read_end_ids(path)
        self.args = replace(
            self.args,
            deterministic=typed(bool, deterministic, "deterministic"),
            weight_group=resolve_weight_group(weight_group, given),
            grammar_tokenizer=grammar_tokenizer(path, tokenizer),
            grammar_end_ids=self._end_ids,
        )
        self.llm_id = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        self._tokenizer_source = tokenizer
        self._hf_tokenizer: Any = None if isinstance(tokenizer, (str, Path)) else tokenizer
        self._vision = read_vision_config(path)
        self._has_batched = batched_logits_processor is not None
        self._client = EngineClient(self.args, pickled_batched(batched_logits_processor))
        self._embeddings = EmbeddingUses(self._client)
        try:
            self._tokenizer = self._load_tokenizer()
            self._prompts = PromptReader(self._tokenizer, self._vision)
            self._ready = self._client.ready.result()
        except BaseException:
            self._client.shutdown()
            raise
        self.args = replace(self.args, max_seq_len=self._ready.max_seq_len, max_batch_size=self._ready.max_batch_size)

    # --- requests ---

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | Sequence[DisaggregatedParams] | None = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | Sequence[str | None] | None = None,
        priority: float | Sequence[float] = DEFAULT_PRIORITY,
    ) -> RequestOutput | list[RequestOutput]:
        """Blocks; returns one result, or a list of results in the order of ``inputs``. ``use_tqdm`` has no effect.

        A list for any argument must have one entry for each prompt; otherwise ValueError is raised before anything is
        submitted.
        """
        is_one = not isinstance(inputs, list) or not inputs or isinstance(inputs[0], int)
        prompts: list[Any] = [inputs] if is_one else list(inputs)
        each = {
            "sampling_params": sampling_params,
            "lora_request": lora_request,
            "prompt_adapter_request": prompt_adapter_request,
            "kv_cache_retention_config": kv_cache_retention_config,
            "disaggregated_params": disaggregated_params,
            "scheduling_params": scheduling_params,
            "conversation_params": conversation_params,
            "cache_salt": cache_salt,
            "priority": priority,
        }
        lists = {name: _one_each(name, given, len(prompts)) for name, given in each.items()}
        outputs = [
            self.generate_async(prompt, **{name: values[index] for name, values in lists.items()})
            for index, prompt in enumerate(prompts)
        ]
        results = [output.result() for output in outputs]
        return results[0] if is_one else results

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_PRIORITY,
        *,
        media: Sequence[MediaSpan] = (),
        routing_token_ids: Sequence[int] | None = None,
    ) -> RequestOutput:
        """Starts a request and returns at once. Thread-safe; no event loop needs to run yet.

        ``inputs`` may have ``multi_modal_embeddings {"image": [tensor [rows, hidden], …]}``; their placeholders in the
        prompt are then expanded. ``media`` and ``routing_token_ids`` are trtx's own arguments: the placeholder ranges
        of an already expanded prompt, whose embeddings were put by :meth:`put_embedding`, and the token ids that KV
        events report in place of the prompt's ids.

        Hints that can't change the answer (scheduling, conversation, tracing) are accepted without effect.
        Raises RequestError for unsupported arguments that would change it, ValueError for bad values, RuntimeError if
        the engine is gone. Errors that only the engine can detect raise RequestError when the result is read.
        """
        if lora_request is not None or prompt_adapter_request is not None:
            raise RequestError(
                "the torch engine supports no lora_request and no prompt_adapter_request; leave them out"
            )
        sampling = checked_sampling(sampling_params)
        text, prompt, found = self._prompts.read(inputs, sampling)
        if disaggregated_params is not None and not isinstance(disaggregated_params, DisaggregatedParams):
            raise RequestError(
                f"disaggregated_params is {shown(disaggregated_params)}; expected DisaggregatedParams or None"
            )
        handoff = disaggregated_params.handoff() if disaggregated_params is not None else None
        spans = self._prompts.spans(media, found, handoff)
        if spans and sampling.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens is set for a prompt with media; expected text alone to be cut")
        self._check_choices(sampling, handoff, streaming=streaming)
        if disaggregated_params is not None and disaggregated_params.multimodal_embedding_handles:
            raise RequestError("multimodal_embedding_handles are not supported by the torch engine; send text alone")
        cache_salt = typed(str | None, cache_salt, "cache_salt")
        if cache_salt is not None and not is_text(cache_salt):
            raise RequestError(f"cache_salt is {shown(cache_salt)}, with surrogates; expected Unicode text")
        priority = typed(float, priority, "priority")
        if not 0.0 <= priority <= 1.0:
            raise RequestError(f"priority is {priority}; expected a number from 0 to 1")
        retention = read_retention(kv_cache_retention_config)
        is_context_only = handoff is not None and handoff.request_type == "context_only"
        count = sampling.num_sequences
        stops = [None if is_context_only else find_stops(sampling, self._tokenizer) for _ in range(count)]
        plans = [self._plan(sampling, choice) for choice in range(count)]
        processors = pickled("logits_processor", sampling.processors) if sampling.processors else None
        sequence_ids = [self._client.next_id() for _ in plans]
        output = RequestOutput(
            sequence_ids[0],
            prompt=text,
            prompt_token_ids=prompt,
            num_choices=count,
            num_returned=sampling.n,
            keeps_logprobs=sampling.logprobs is not None,
            streaming=streaming,
            on_abort=lambda: self._client.abort(sequence_ids),
            text_streams=self._text_streams(sampling) if sampling.detokenize and stops[0] is None else None,
        )
        routing = typed(list[int] | None, routing_token_ids, "routing_token_ids")
        keys = list(found.embeddings)
        on_end = partial(self._embeddings.release, keys) if keys else None
        for index, (sequence_id, plan) in enumerate(zip(sequence_ids, plans, strict=True)):
            if keys:
                self._embeddings.acquire(found.embeddings)
            follows = sequence_ids[0] if index else None
            submit = Submit(
                sequence_id, prompt, plan, cache_salt, priority, handoff, spans, routing, processors, follows, retention
            )  # fmt: skip
            self._client.submit(Choice(index, output, sequence_ids, stops[index], on_end, _is_document(plan)), submit)
        return output

    def _check_choices(self, sampling: SamplingParams, handoff: Handoff | None, *, streaming: bool) -> None:
        """Raises RequestError for choices and processors that this request, or this engine, can't have."""
        if handoff is not None and sampling.num_sequences > 1:
            name = "n" if sampling.n > 1 else "best_of"
            raise RequestError(f"{name} is {sampling.num_sequences}; expected 1 for a {handoff.request_type} request")
        if streaming and sampling.selects:
            raise RequestError(
                f"best_of is {sampling.best_of} and n is {sampling.n} in a streamed request, and the likeliest choices "
                "are known only at its end; leave best_of out, or do not stream"
            )
        if sampling.apply_batched_logits_processor and not self._has_batched:
            raise RequestError(
                "apply_batched_logits_processor is set, and this LLM has no batched_logits_processor; pass it to LLM"
            )

    def put_embedding(self, key: bytes, tensor: SharedTensor) -> Future[None]:
        """Sends an embedding for prompts submitted later, until it is dropped.

        The future is done once the file was read. The caller may remove the file then. The future fails with ValueError
        if the model can't use the embedding, RuntimeError if the engine failed to read it or died, EmbeddingGone or
        EmbeddingUnreachable if it stayed on an encoder's device and can't be read from there. Raises RequestError for
        arguments of other types.
        """
        return self._client.put_embedding(typed(bytes, key, "key"), typed(SharedTensor, tensor, "tensor"))

    def drop_embeddings(self, keys: Sequence[bytes]) -> None:
        """Drops embeddings. Requests submitted earlier keep the ones that they need."""
        self._client.drop_embeddings(typed(list[bytes], keys, "keys"))

    def _plan(self, sampling: SamplingParams, choice: int) -> SamplingPlan:
        plan = resolve_sampling(sampling, choice, self._end_ids)
        if self.args.skip_tokenizer_init and not (plan.end_ids or sampling.ignore_eos or sampling.end_id == -1):
            raise ValueError("SamplingParams.end_id is None; expected an id, as skip_tokenizer_init is set")
        return plan

    def _text_streams(self, sampling: SamplingParams) -> list[TextStream] | None:
        if self._tokenizer is None:
            return None
        skip = sampling.skip_special_tokens
        return [TextStream(self._tokenizer, skip_special_tokens=skip) for _ in range(sampling.num_sequences)]

    # --- tokenizer ---

    def _load_tokenizer(self) -> Tokenizer | None:
        if self.args.skip_tokenizer_init:
            return None
        if self._hf_tokenizer is not None:
            return fast_tokenizer(self._hf_tokenizer)
        return load_tokenizer(Path(self._tokenizer_source or self.args.model))

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded on first use (a slow import); None with ``skip_tokenizer_init``."""
        if self._hf_tokenizer is None and not self.args.skip_tokenizer_init:
            source = Path(self._tokenizer_source or self.args.model)
            self._hf_tokenizer = load_hf_tokenizer(source, trust_remote_code=self.args.trust_remote_code)
        return self._hf_tokenizer

    # --- state of the engine ---

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Returns the rows since the last call, waiting up to ``timeout`` seconds for one.

        Needs ``enable_iter_perf_stats``.
        """
        return self._client.stats.take(timeout)

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Yields rows as they arrive, until none has arrived for ``timeout`` seconds."""
        return self._client.stats.rows(timeout)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Returns the events since the last call. Needs ``event_buffer_max_size`` and ``enable_block_reuse``."""
        return self._client.kv_events.take(timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        """Yields events as they arrive, until none has arrived for ``timeout`` seconds."""
        return self._client.kv_events.rows(timeout)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        blocks, size = self._ready.num_blocks, self._ready.tokens_per_block
        return {"maxNumBlocks": blocks, "tokensPerBlock": size, "maxNumTokens": blocks * size}

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output: the limit from arguments, model and KV pool."""
        return self._ready.max_seq_len

    @property
    def max_batch_size(self) -> int:
        """Maximum number of sequences that run at a time."""
        return self._ready.max_batch_size

    @property
    def engine_pid(self) -> int:
        return self._client.pid

    def device_memory_bytes(self) -> int:
        """Device memory of the engine's process, as last reported (every 2 s while it works); 0 on a CPU."""
        return self._client.device_memory_bytes

    def handoff_stats(self) -> HandoffStats:
        """Totals of KV handoff since the start, and the current leases, as last reported by the engine."""
        return self._client.handoff_stats

    def _check_health(self) -> bool:
        """False once the engine's process has died, reported a fatal error, or been shut down."""
        return self._client.is_healthy

    # --- abort and shutdown ---

    def abort(self, request: RequestOutput | int) -> None:
        """Ends a request, given its output or, for n = 1, its ``request_id``. Its finish reason is ``cancelled``."""
        if isinstance(request, RequestOutput):
            request.abort()
        else:
            self._client.abort((request,))

    def shutdown(self) -> None:
        """Ends the engine's process within 10 s; open requests end with RuntimeError. Idempotent."""
        self._client.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _is_document(plan: SamplingPlan) -> bool:
    return plan.grammar is not None and plan.grammar.kind in ("json", "structural_tag")


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """Returns one value for each of ``count`` inputs: a list unchanged, any other value repeated."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} has length {len(given)} and inputs {count}; expected one for each, or one for all")
    return list(given)


def model_directory(model: str | Path) -> Path:
    """Returns a local directory unchanged; resolves any other name through ``checkpoint``."""
    path = Path(model)
    if path.is_dir():
        return path
    from trtx.checkpoint import resolve_checkpoint

    return resolve_checkpoint(str(model)).path
