"""Rules for pairs of workers of one topology.

A prefill worker sends its KV blocks as raw memory, so prefill and decode worker must agree on their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trtx.config.findings import Severity
from trtx.config.rules.rule import RECIPES, Breach, PairRule, Subject

_KV, _TRANSCEIVER = "kv_cache_config", "cache_transceiver_config"
_AS_THEY_LIE = "KV blocks move as they lie, so both sides must agree on what a block looks like"


def _equal(path: str) -> Callable[[Subject, Subject], Iterator[Breach]]:
    """Returns a check that both sides have the same value at ``path``.

    If the values differ, the fix keeps one and changes the other side: it prefers a file's value to one from ``--set``,
    and that to a default.
    """

    def check(prefill: Subject, decode: Subject) -> Iterator[Breach]:
        if prefill.get(path) != decode.get(path):
            kept, changed = (prefill, decode) if _weight(prefill, path) > _weight(decode, path) else (decode, prefill)
            message = f"{prefill.says(path)} but {decode.value_of(path)}"
            yield Breach(path, message, changed.set(path, kept.get(path)))

    return check


def _weight(side: Subject, path: str) -> int:
    return 0 if not side.has(path) else 1 if side.is_given(path) else 2


def _same_runtime(prefill: Subject, decode: Subject) -> Iterator[Breach]:
    if prefill.transceiver_runtime != decode.transceiver_runtime:  # an unset runtime counts as CPP
        yield from _equal(f"{_TRANSCEIVER}.transceiver_runtime")(prefill, decode)


def _same_buffer(prefill: Subject, decode: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.max_tokens_in_buffer"
    sizes = [size for size in (prefill.get(path), decode.get(path)) if size is not None]
    if prefill.get(path) != decode.get(path):
        longest = prefill.longest_prompt
        both_hold_it = len(sizes) == 2 and longest is not None and min(sizes) >= longest
        softer: Severity | None = "warning" if both_hold_it or decode.transceiver_runtime == "PYTHON" else None
        smaller = decode if decode.get(path) is None or decode.get(path) < max(sizes) else prefill
        message = f"{prefill.says(path)} but {decode.value_of(path)}"
        yield Breach(path, message, smaller.set(path, max(sizes)), softer)


def _decode_holds_prefill(prefill: Subject, decode: Subject) -> Iterator[Breach]:
    path = "max_seq_len"
    prompt, total = prefill.longest_sequence, decode.longest_sequence
    if prompt is not None and total is not None and total < prompt:
        message = f"{decode.says(path)} is below {prefill.says(path)}"
        yield Breach(path, message, decode.set(path, prompt))


def _both_speculate(prefill: Subject, decode: Subject) -> Iterator[Breach]:
    path = "speculative_config"
    if prefill.speculates and decode.speculates:
        yield from _equal(f"{path}.decoding_type")(prefill, decode)
    elif prefill.speculates != decode.speculates:
        with_it, without = (prefill, decode) if prefill.speculates else (decode, prefill)
        python = decode.transceiver_runtime == "PYTHON" and decode.speculates
        kind = with_it.get(f"{path}.decoding_type")
        message = f"{with_it.role} speculates ({kind}, {with_it.source}) and {without.role} does not ({without.source})"
        yield Breach(path, message, without.set(path, with_it.get(path)), "note" if python else None)


def _encoder_shares_gpu(encode: Subject, consumer: Subject) -> Iterator[Breach]:
    path = f"{_KV}.free_gpu_memory_fraction"
    if consumer.get(f"{_KV}.max_tokens") is None and not consumer.get(f"{_KV}.max_gpu_total_bytes"):
        yield Breach(path, f"{consumer.says(path)} is of what the encoder on the same GPU leaves", None)


PAIR_RULES = (
    PairRule(
        id="kv-dtype-equal",
        reason=_AS_THEY_LIE,
        evidence=f"423 of 423 published pairs, {RECIPES}",
        check=_equal(f"{_KV}.dtype"),
        every_engine=True,
    ),
    PairRule(
        id="tokens-per-block-equal",
        reason=_AS_THEY_LIE,
        evidence=f"423 of 423 published pairs, {RECIPES}",
        check=_equal(f"{_KV}.tokens_per_block"),
        every_engine=True,
    ),
    PairRule(
        id="transceiver-backend-equal",
        reason="the two ends of a transfer speak one protocol",
        evidence=f"423 of 423 published pairs (UCX 374, DEFAULT 31, NIXL 18), {RECIPES}",
        check=_equal(f"{_TRANSCEIVER}.backend"),
    ),
    PairRule(
        id="transceiver-runtime-equal",
        reason="the C++ and the Python transceiver do not speak to each other",
        evidence=f"423 of 423 published pairs, {RECIPES}",
        check=_same_runtime,
    ),
    PairRule(
        id="transfer-buffer-equal",
        reason="a prompt that fits one side's transfer buffer must fit the other's",
        evidence=f"405 of 423 published pairs, in the 18 others both sides hold the longest prompt, {RECIPES}",
        check=_same_buffer,
    ),
    PairRule(
        id="decode-holds-prefill",
        reason="decode goes on with every sequence that prefill took",
        evidence=f"423 of 423 published pairs, {RECIPES}",
        check=_decode_holds_prefill,
    ),
    PairRule(
        id="speculation-on-both",
        reason="draft layers are part of the KV layout, so a C++ transfer needs them on both sides",
        evidence=f"417 of 423 published pairs, the 6 others decode only with the Python transceiver, {RECIPES}; "
        "aiconfigurator",
        check=_both_speculate,
    ),
    PairRule(
        id="encoder-shares-gpu",
        pairs=(("encode", "agg"), ("encode", "prefill")),
        severity="note",
        reason="image handles travel by CUDA IPC, so an encoder shares the GPU of the worker that takes them: "
        "start it first, or bound the other by kv_cache_config.max_tokens",
        evidence="aiconfigurator's launcher; TensorRT-LLM #2773",
        check=_encoder_shares_gpu,
        unmendable=(f"{_KV}.free_gpu_memory_fraction",),
        only_engine="tensorrt-llm",  # trtx gives encode workers of the torch engine GPUs of their own
    ),
)
