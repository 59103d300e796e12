"""Starts the engine from a worker's options, and collects the facts that the worker registers with Dynamo."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from trtx import engine
from trtx.checkpoint import read_end_ids
from trtx.checkpoint.facts import read_config
from trtx.engine import Engine
from trtx.engine.api import EngineApi, EngineFacts
from trtx.engine.worker_facts import WorkerFacts
from trtx.errors import UsageError
from trtx.stop_strings import PlainText, StopStrings
from trtx.text import ByteTokens, TextStream, Tokenizer, byte_tokens, load_decoder, load_tokenizer
from trtx.worker.devices import WorkerGpu, given_gpus
from trtx.worker.options import WorkerOptions
from trtx.worker.requests import dynamo_test_hook
from trtx.worker.requests.dynamo_test_hook import ForcedText
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import WorkerRequest
from trtx.worker.requests.thinking import Thinking

logger = logging.getLogger(__name__)

EVENT_BUFFER = 100_000
"""Number of KV events that the engine keeps until they are polled; the value of Dynamo's own TensorRT-LLM backend."""
_TEXT_BEFORE = 5
"""Number of prompt tokens that detokenization of the answer starts from, as in Dynamo's frontend."""


@dataclass(frozen=True)
class LoadedEngine:
    """A running engine and the worker's view of it."""

    api: EngineApi
    engine: Engine
    tokenizer: Tokenizer | None  # for stop strings; None: the model has no fast one
    kv_event_buffer: int  # events that the engine keeps for the worker; 0: none are published
    load_seconds: float
    shutdown_seconds: float  # longest wait for Engine.shutdown
    thinking: Thinking | None = None  # None: a grammar holds from the first token on
    forced_text: ForcedText | None = None  # Dynamo's test hook; None: it is off

    @cached_property
    def byte_tokens(self) -> ByteTokens | None:
        """The byte-fallback tokens of the tokenizer; None if it has none.

        A worker with such a tokenizer makes the text of an answer with log-probabilities itself: Dynamo's frontend
        decodes each token alone there, so the tokens' texts don't join to the answer's (seen with 1.6.1).
        """
        return byte_tokens(self.tokenizer)

    def text_of(self, request: WorkerRequest) -> StopStrings | PlainText | None:
        """The detokenizer for the answer; None if the frontend makes the text from token ids.

        Raises InvalidRequest if the request has stop strings and the model has no fast tokenizer.

        Many tokenizers (Llama 2, Mistral, LLaVA) drop the space at the beginning of a text. So the answer is decoded as
        a continuation of the prompt's last tokens; after a migration, these include what was answered before.
        """
        if not request.stop_strings and not (request.wants_logprobs and self.byte_tokens is not None):
            return None
        if self.tokenizer is None:
            raise InvalidRequest("stop strings need a fast tokenizer, which this model lacks; use stop_token_ids")
        text = TextStream(self.tokenizer, skip_special_tokens=request.skip_special_tokens)
        before = request.token_ids[-_TEXT_BEFORE:]
        if text.feed(before) != self.tokenizer.decode(before, request.skip_special_tokens):
            text.finish()  # an incomplete character at the prompt's end does not belong to the answer
        if not request.stop_strings:
            return PlainText(text)
        return StopStrings(
            request.stop_strings,
            text,
            include=request.includes_stop_string,
            min_tokens=request.sampling.get("min_tokens", 0),
        )

    @property
    def encode_text(self) -> Callable[[str], list[int]] | None:
        """A function from text to token ids that adds no special tokens; None if the model has no fast tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return None
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)

    def shutdown(self) -> bool:
        """Shuts the engine down. Returns False on timeout; the caller must then not wait for the engine's threads."""
        done = threading.Thread(target=self.engine.shutdown, name="engine-shutdown", daemon=True)
        done.start()
        done.join(self.shutdown_seconds)
        return not done.is_alive()


def probe_token_id(model: Path) -> int:
    """Token of a health probe: the checkpoint's ``bos_token_id``, else 1, as in Dynamo's own backends.

    It is read from config.json, because the LLM's tokenizer would import transformers in the worker's event loop: for
    seconds, the model would be registered without an endpoint.
    """
    token_id = read_config(model).get("bos_token_id")
    return token_id if isinstance(token_id, int) else 1


def load(options: WorkerOptions) -> LoadedEngine:
    """Starts the engine and returns once it is ready to serve, which takes minutes for a large model.

    Raises LaunchError or UsageError.
    """
    started = time.monotonic()
    api = engine.load(options.engine)
    serves_tokens = options.role != "encode"
    start = api.start if serves_tokens else api.start_encoder
    if start is None:
        raise UsageError(f"engine {options.engine} has no vision encoder; use --engine torch for encode")
    if options.deterministic and not api.can_be_deterministic:
        raise UsageError(
            f"--deterministic has no effect with engine {options.engine}, which can't promise it; leave it out"
        )
    arguments = engine_arguments(options) if serves_tokens else options.llm_args
    loaded = start(options.model, arguments)
    seconds = time.monotonic() - started
    logger.info("%s loaded %s in %.1f s", options.name, options.model, seconds)
    facts = loaded.facts
    if facts.left_out:
        logger.warning("%s does not act on %s, which change no answer", options.name, ", ".join(facts.left_out))
    tokenizer = _tokenizer(options.model) if serves_tokens else None
    forced = ForcedText.of(os.environ, tokenizer, read_end_ids(options.model)) if serves_tokens else None
    if forced is not None:
        logger.warning("%s is set: every answer is %r", dynamo_test_hook.VARIABLE, dynamo_test_hook.TEXT)
    return LoadedEngine(
        api=api,
        engine=loaded,
        tokenizer=tokenizer,
        kv_event_buffer=arguments["kv_cache_config"].get("event_buffer_max_size") or 0 if facts.has_kv_events else 0,
        load_seconds=seconds,
        shutdown_seconds=api.shutdown_seconds if options.shutdown_seconds is None else options.shutdown_seconds,
        thinking=Thinking.of(options.reasoning_parser, tokenizer) if api.guides_after_thinking else None,
        forced_text=forced,
    )


def worker_facts(options: WorkerOptions, api: EngineApi, facts: EngineFacts) -> WorkerFacts:
    """The facts about itself and its engine that this worker publishes."""
    gpus = _gpus(options, api)
    return WorkerFacts(
        name=options.name,
        role=options.role,
        engine=options.engine,
        versions={**_own_versions(), **api.versions},
        gpu_names=None if gpus is None else tuple(gpu.name for gpu in gpus),
        tensor_parallel_size=options.llm_args.get("tensor_parallel_size") or 1,
        context_length=facts.context_length,
        max_batch_size=facts.max_batch_size,
        max_num_tokens=facts.max_num_tokens,
        kv_block_size=facts.block_size,
        kv_blocks=facts.num_blocks,
        metrics_port=_metrics_port(os.environ.get("DYN_SYSTEM_PORT", "")),
        deterministic=options.deterministic,
        gpu_uuids=None if gpus is None else tuple(gpu.uuid for gpu in gpus),
    )


def _gpus(options: WorkerOptions, api: EngineApi) -> tuple[WorkerGpu, ...] | None:
    """The GPUs of this worker; None if unknown.

    Also None if the engine has ranks on other nodes: this worker can't see their GPUs, and publishing those of one node
    would make them look like all of the worker's GPUs.
    """
    gpus = given_gpus()
    if gpus and api.gpus_of(options.llm_args) > len(gpus):
        return None
    return gpus


def _metrics_port(variable: str) -> int | None:
    """Dynamo's system port.

    None if it is unset, 0 or -1: the metrics port is then unknown outside the process, if it exists.
    """
    return int(variable) if variable.isdigit() and int(variable) else None


def _own_versions() -> dict[str, str]:
    versions = {}
    for package in ("trtx", "ai-dynamo"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _tokenizer(model: Path) -> Tokenizer | None:
    """The model's fast tokenizer, or None if it can't be loaded.

    A failure only disables stop strings, because the frontend has a tokenizer of its own.
    """
    try:
        return load_decoder(model) if (model / "tokenizer.json").is_file() else load_tokenizer(model)
    except Exception as error:
        logger.warning("no fast tokenizer for %s (%s): requests with stop strings will be refused", model, error)
        return None


def engine_arguments(options: WorkerOptions) -> dict[str, Any]:
    """The engine config plus what a worker needs: iteration stats, KV event buffer, and NIXL for prefill and decode.

    Values in the config take precedence.
    """
    cache = dict(options.llm_args.get("kv_cache_config") or {})
    if cache.get("enable_block_reuse", True):
        cache.setdefault("event_buffer_max_size", EVENT_BUFFER)
    arguments = {"enable_iter_perf_stats": True, **options.llm_args, "kv_cache_config": cache}
    if options.role != "agg":
        # Without a cache transceiver, an engine refuses every request that arrives with KV from another engine or hands
        # its KV to one.
        arguments.setdefault("cache_transceiver_config", {"backend": "NIXL"})
    if options.deterministic:
        arguments["deterministic"] = True  # a field of the torch engine only; engine configs may not contain it
    if options.weight_group is not None:
        # In the topology's own directory, which is removed with it. No other user may enter that.
        directory = Path(tempfile.gettempdir()) / f"weights-{options.weight_group}"
        arguments["weight_group"] = {
            "directory": str(directory), "name": options.name, "engines": options.weight_engines,
        }  # fmt: skip
    return arguments
