"""The values of its arguments that the torch engine can't run with, on any model and any machine.

Planning and the engine share this table, so the engine never refuses a config that passed ``trtx serve --dry-run``
because of the config alone. :mod:`trtx.config.schema` checks types and TensorRT-LLM's own ranges first, in both places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from trtx.config.wording import quoted

DTYPES = ("float32", "bfloat16", "float16")
TRANSPORT_OF = {"DEFAULT": "nixl", "NIXL": "nixl", "UCX": "nixl"}
"""The KV transport for each of TensorRT-LLM's transceiver backends. In the torch engine all are NIXL over UCX."""
DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_MAX_NUM_TOKENS = 8192

DRAFTERS = ("NGram", "SA", "Draft_Target", "Eagle3")
"""The kinds of speculation that the torch engine has."""

_BLOCK = "kv_cache_config.tokens_per_block"
_POOL = "kv_cache_config.max_tokens"
_SPEC = "speculative_config"


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """A condition on a field. ``expected`` completes the error message. None, the field's default, always passes."""

    expected: str
    holds: Callable[[Any], bool]


def _at_least(least: int) -> FieldLimit:
    return FieldLimit(f"at least {least}", lambda value: value >= least)


def _one_of(*names: str) -> FieldLimit:
    return FieldLimit(f"one of {', '.join(names)}", lambda value: value in names)


LIMITS: Mapping[str, FieldLimit] = {
    "tensor_parallel_size": FieldLimit("from 1 to 8, the GPUs of one machine", lambda value: 1 <= value <= 8),
    "dtype": _one_of("auto", *DTYPES),
    "max_batch_size": _at_least(1),
    "max_num_tokens": _at_least(1),
    "max_seq_len": FieldLimit("at least 2, a token of the prompt and one of the answer", lambda value: value >= 2),
    "max_stats_len": _at_least(0),
    "kv_cache_config.dtype": _one_of("auto", *DTYPES, "fp8"),
    _BLOCK: FieldLimit("a power of two, such as 32", lambda value: value >= 1 and not value & (value - 1)),
    _POOL: _at_least(1),
    "kv_cache_config.free_gpu_memory_fraction": FieldLimit(
        "more than 0 and at most 1", lambda value: 0.0 < value <= 1.0
    ),
    "kv_cache_config.event_buffer_max_size": _at_least(0),
    "kv_cache_config.host_cache_size": _at_least(0),
    "kv_cache_config.secondary_offload_min_priority": FieldLimit("from 0 to 100", lambda value: 0 <= value <= 100),
    "cuda_graph_config.batch_sizes": FieldLimit("sizes of at least 1", lambda sizes: min(sizes, default=1) >= 1),
    "speculative_config.decoding_type": FieldLimit(
        f"one of {', '.join(DRAFTERS)}: the torch engine has no other drafters", lambda value: value in DRAFTERS
    ),
    "speculative_config.eagle3_one_model": FieldLimit(
        "true: the torch engine computes an EAGLE-3 head with its model", lambda value: value is True
    ),
    "speculative_config.max_draft_len": _at_least(1),
    "speculative_config.max_concurrency": _at_least(1),
    "speculative_config.draft_len_schedule": FieldLimit(
        "batch sizes of at least 1 with draft lengths of at least 0",
        lambda schedule: isinstance(schedule, Mapping) and min(schedule, default=0) > 0 <= min(schedule.values()),
    ),
    "speculative_config.max_matching_ngram_size": FieldLimit(
        "at least 1, or -1 for no limit with SA", lambda value: value >= 1 or value == -1
    ),
    "speculative_config.global_pool_size": _at_least(1),
    "cache_transceiver_config.backend": _one_of(*TRANSPORT_OF),
    "cache_transceiver_config.kv_transfer_timeout_ms": _at_least(1),
    "sleep_config.restore_modes": FieldLimit(
        "NONE or MEMSET for kv_cache, which comes back empty, and NONE, CPU or PINNED for model_weights",
        lambda modes: (
            isinstance(modes, Mapping)
            and modes.keys() <= {"kv_cache", "model_weights"}
            and modes.get("kv_cache", "NONE") in ("NONE", "MEMSET")
            and modes.get("model_weights", "NONE") in ("NONE", "CPU", "PINNED")
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class OutsideLimit:
    """A value that the torch engine can't run with."""

    path: str
    value: Any
    expected: str

    def __str__(self) -> str:
        """Returns, for example, ``kv_cache_config.tokens_per_block is 3; expected a power of two, such as 32``."""
        return f"{self.path} is {quoted(self.value)}; expected {self.expected}"


def outside_limits(values: Mapping[str, Any]) -> Iterator[OutsideLimit]:
    """Yields the arguments in ``values`` that violate a limit. A value of the wrong type violates its limit."""
    too_large = dict(_beyond_64_bits(values))
    for path, value in too_large.items():
        yield OutsideLimit(path, value, "a number of 64 bits")
    for path, limit in LIMITS.items():
        value = _value(values, path)
        if value is not None and path not in too_large and not _holds(limit, value):
            yield OutsideLimit(path, value, limit.expected)
    pool, block = _value(values, _POOL), _value(values, _BLOCK) or DEFAULT_TOKENS_PER_BLOCK
    if isinstance(pool, int) and isinstance(block, int) and 1 <= pool < block:
        yield OutsideLimit(_POOL, pool, f"at least one block, {block} tokens")
    yield from _drafts_outside_limits(values)
    yield from _experts_outside_limits(values)


def _beyond_64_bits(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, int]]:
    """Yields the integers, by their paths, that the processes of an engine can't send to each other."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _beyond_64_bits(value, f"{within}{name}.")
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            yield f"{within}{name}", value


def _experts_outside_limits(values: Mapping[str, Any]) -> Iterator[OutsideLimit]:
    """Yields a parallel size of experts that does not fit ``tensor_parallel_size`` and the other such size."""
    ranks = values.get("tensor_parallel_size") or 1
    sizes = {name: values.get(name) for name in ("moe_tensor_parallel_size", "moe_expert_parallel_size")}
    stated = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    product = prod(stated.values())
    if isinstance(ranks, int) and (product != ranks if len(stated) == 2 else ranks % product):
        name, size = list(stated.items())[-1]
        other = " x ".join(one for one in sizes if one in stated)
        must = "equals" if len(stated) == 2 else "divides"
        yield OutsideLimit(name, size, f"a size with which {other} {must} tensor_parallel_size, {ranks}")


def _drafts_outside_limits(values: Mapping[str, Any]) -> Iterator[OutsideLimit]:
    """Yields the fields of ``speculative_config`` that contradict other fields."""
    if not isinstance(spec := values.get(_SPEC), Mapping):
        return
    kind, length, schedule = (spec.get(name) for name in ("decoding_type", "max_draft_len", "draft_len_schedule"))
    if kind is not None and length is None:
        yield OutsideLimit(f"{_SPEC}.max_draft_len", None, f"the draft length of {kind}, such as 4")
    if kind in ("Draft_Target", "Eagle3") and not (spec.get("speculative_model") or spec.get("speculative_model_dir")):
        yield OutsideLimit(f"{_SPEC}.speculative_model", None, f"the draft model, which {kind} needs")
    for name in ("speculative_model", "speculative_model_dir"):
        if kind in ("NGram", "SA") and spec.get(name):
            yield OutsideLimit(f"{_SPEC}.{name}", spec[name], f"none, as {kind} drafts without a model")
    if kind == "NGram" and spec.get("max_matching_ngram_size") == -1:
        yield OutsideLimit(f"{_SPEC}.max_matching_ngram_size", -1, "at least 1, as NGram matches that many tokens")
    if schedule and spec.get("max_concurrency") is not None:
        yield OutsideLimit(
            f"{_SPEC}.draft_len_schedule", schedule, "none beside max_concurrency; leave one of them out"
        )
    yield from _pool_outside_limits(spec, values.get("max_batch_size"))
    if not isinstance(length, int):
        return
    if isinstance(schedule, Mapping) and any(isinstance(one, int) and one > length for one in schedule.values()):
        yield OutsideLimit(
            f"{_SPEC}.draft_len_schedule", schedule, f"draft lengths up to {length}, as max_draft_len is {length}"
        )
    for name, default, rest, why in (
        ("max_num_tokens", DEFAULT_MAX_NUM_TOKENS, 1, "a step computes the drafted tokens and one more"),
        ("max_seq_len", None, 2, "a sequence also has a token of the prompt and one of the answer"),
    ):
        most = values.get(name) or default
        if isinstance(most, int) and length > most - rest:
            found = f"at most {most - rest}, as" if most > rest else f"no {_SPEC}, as"
            yield OutsideLimit(f"{_SPEC}.max_draft_len", length, f"{found} {name} is {most} and {why}")


def _pool_outside_limits(spec: Mapping[str, Any], max_batch_size: Any) -> Iterator[OutsideLimit]:
    """Yields ``global_pool_size`` if there is no global pool, or if the pool holds fewer sequences than a batch."""
    size = spec.get("global_pool_size")
    if size is not None and not spec.get("enable_global_pool"):
        yield OutsideLimit(f"{_SPEC}.global_pool_size", size, "none without enable_global_pool")
    elif isinstance(size, int) and isinstance(max_batch_size, int) and 1 <= size < max_batch_size:
        yield OutsideLimit(
            f"{_SPEC}.global_pool_size", size, f"at least {max_batch_size}, as max_batch_size is {max_batch_size}"
        )


def _holds(limit: FieldLimit, value: Any) -> bool:
    try:
        return limit.holds(value)
    except TypeError:
        return False


def _value(values: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.rpartition(".")
    holder = values.get(section) if section else values
    return holder.get(name) if isinstance(holder, Mapping) else None
