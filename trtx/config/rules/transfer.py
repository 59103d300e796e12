"""Rules for each side of a KV transfer: transceiver, overlap scheduler, buffers and deadlines."""

from __future__ import annotations

from collections.abc import Iterator

from trtx.config.findings import Severity
from trtx.config.rules.rule import PREFILL_DECODE, RECIPES, Breach, RoleRule, Subject

_TRANSCEIVER = "cache_transceiver_config"
_OVERLAP_OFF = "disable_overlap_scheduler"
_LONG_PROMPT, _LONG_TIMEOUT_MS = 100_000, 600_000
_BUFFER_SLACK = 256  # tokens; published buffers below max_seq_len are 40 or 203 tokens short and still hold their ISL


def _backend_set(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.backend"
    if side.get(path) is None:
        yield Breach(path, f"{side.says(path)} leaves disaggregation off", side.set(path, "DEFAULT"))


def _python_needs_nixl(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.backend"
    runtime = f"{_TRANSCEIVER}.transceiver_runtime"
    if side.has(runtime) and side.transceiver_runtime == "PYTHON" and side.get(path) != "NIXL":
        yield Breach(path, f"{side.says(path)} with {side.says(runtime)}", side.set(path, "NIXL"))


def _prefill_overlap(prefill: Subject) -> Iterator[Breach]:
    off, runtime = prefill.get(_OVERLAP_OFF), prefill.transceiver_runtime
    if runtime == "CPP" and not off:
        message = f"{prefill.says(_OVERLAP_OFF)} under the C++ transceiver"
        yield Breach(_OVERLAP_OFF, message, prefill.set(_OVERLAP_OFF, True))
    elif runtime == "PYTHON" and off:
        message = f"{prefill.says(_OVERLAP_OFF)} under the Python transceiver, which needs no such thing"
        yield Breach(_OVERLAP_OFF, message, prefill.set(_OVERLAP_OFF, False), "warning")


def _decode_overlap(decode: Subject) -> Iterator[Breach]:
    if decode.get(_OVERLAP_OFF):
        softer: Severity | None = "note" if decode.speculates else None  # Dynamo's Llama 4 config with Eagle3 does so
        yield Breach(_OVERLAP_OFF, decode.says(_OVERLAP_OFF), decode.set(_OVERLAP_OFF, False), softer)


def _buffer_holds_prompt(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.max_tokens_in_buffer"
    buffer, longest = side.get(path), side.longest_prompt
    if buffer is not None and longest is not None and buffer < longest:
        message = f"{side.says(path)} is below the longest prompt, {longest} tokens"
        softer: Severity | None = "warning" if longest - buffer <= _BUFFER_SLACK else None
        yield Breach(path, message, side.set(path, longest), softer)


def _long_prompts_have_time(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.kv_transfer_timeout_ms"
    longest, timeout = side.longest_sequence, side.get(path)
    if longest is not None and longest >= _LONG_PROMPT and timeout is not None and timeout < _LONG_TIMEOUT_MS:
        yield Breach(path, f"{side.says(path)} for sequences of {longest} tokens", side.set(path, _LONG_TIMEOUT_MS))


def _bounce_needs_python(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.kv_cache_bounce_size_mb"
    if side.get(path) and side.transceiver_runtime == "CPP":
        yield Breach(path, f"{side.says(path)} is read by the Python transceiver alone", side.set(path, 0))


def _pipelined_transfer(side: Subject) -> Iterator[Breach]:
    path = f"{_TRANSCEIVER}.enable_pipelined_transfer"
    if not side.get(path):
        return
    lacking = [
        text
        for text, there in (
            ("the Python transceiver on NIXL", side.transceiver_runtime != "CPP"),
            ("chunked prefill", side.get("enable_chunked_prefill")),
            ("pipeline_parallel_size 1", (side.get("pipeline_parallel_size") or 1) == 1),
            ("context_parallel_size 1", (side.get("context_parallel_size") or 1) == 1),
            ("max_beam_width 1", (side.get("max_beam_width") or 1) == 1),
            ("no bounce buffer", not side.get(f"{_TRANSCEIVER}.kv_cache_bounce_size_mb")),
        )
        if not there
    ]
    if lacking:
        yield Breach(path, f"{side.says(path)} needs {', '.join(lacking)}", side.set(path, False))


def _one_beam(side: Subject) -> Iterator[Breach]:
    if (side.get("max_beam_width") or 1) > 1:
        yield Breach("max_beam_width", side.says("max_beam_width"), side.set("max_beam_width", 1))


def _prefill_pipeline(prefill: Subject) -> Iterator[Breach]:
    path = "pipeline_parallel_size"
    if (prefill.get(path) or 1) > 1 and prefill.version.is_before("1.3.0rc10"):
        message = f"{prefill.says(path)} on TensorRT-LLM {prefill.version.name}"
        yield Breach(path, message, prefill.set(path, 1))


TRANSFER_RULES = (
    RoleRule(
        id="transceiver-backend-set",
        roles=PREFILL_DECODE,
        severity="error",
        reason="both sides of disaggregation need a transceiver with a backend",
        evidence=f"423 of 423 published pairs, {RECIPES}; llm_args.json",
        check=_backend_set,
    ),
    RoleRule(
        id="python-transceiver-needs-nixl",
        roles=PREFILL_DECODE,
        severity="error",
        reason="the Python transceiver runs on NIXL alone",
        evidence=f"18 of 18 published pairs with it, {RECIPES}; llm_args.json",
        check=_python_needs_nixl,
    ),
    RoleRule(
        id="prefill-overlap",
        roles=("prefill",),
        severity="error",
        reason="the C++ transceiver can't send while the overlap scheduler runs ahead; the Python one can",
        evidence=f"off in 405 of 405 published prefill workers with C++, on in 18 of 18 with Python, {RECIPES}; "
        "TensorRT-LLM #17390",
        check=_prefill_overlap,
    ),
    RoleRule(
        id="decode-overlap",
        roles=("decode",),
        severity="error",
        reason="without the overlap scheduler the GPU waits for the host at each step",
        evidence=f"on in 423 of 423 published decode workers, {RECIPES}; off in Dynamo's Llama 4 with Eagle3",
        check=_decode_overlap,
    ),
    RoleRule(
        id="buffer-holds-prompt",
        roles=("prefill",),
        severity="error",
        reason="a prompt beyond the transfer buffer fails or crawls",
        evidence=f"392 of 411 published prefill workers with a buffer, {RECIPES}; aiconfigurator takes ISL + OSL + 500",
        check=_buffer_holds_prompt,
    ),
    RoleRule(
        id="long-prompts-have-time",
        roles=PREFILL_DECODE,
        severity="warning",
        reason="a transfer of 100,000 tokens, or the queue before it, outlasts the default of 60 s",
        evidence=f"600000 in 76 published worker configs with such prompts, {RECIPES}; TensorRT-LLM #12249",
        check=_long_prompts_have_time,
    ),
    RoleRule(
        id="bounce-buffer-needs-python",
        roles=PREFILL_DECODE,
        severity="warning",
        reason="the bounce buffer belongs to the Python transceiver",
        evidence="llm_args.json",
        check=_bounce_needs_python,
    ),
    RoleRule(
        id="pipelined-transfer",
        roles=PREFILL_DECODE,
        severity="error",
        reason="TensorRT-LLM sends blocks ahead of the whole prompt only under these conditions",
        evidence="TensorRT-LLM docs, 1.3.0rc27",
        check=_pipelined_transfer,
    ),
    RoleRule(
        id="one-beam",
        roles=PREFILL_DECODE,
        severity="error",
        reason="disaggregated serving takes beam width 1",
        evidence="TensorRT-LLM docs on disaggregated serving",
        check=_one_beam,
    ),
    RoleRule(
        id="prefill-pipeline",
        roles=("prefill",),
        severity="error",
        reason="a pipeline on the prefill side hangs the executor before 1.3.0rc10",
        evidence="TensorRT-LLM #11789 (known issue of 1.2), fixed by #12528",
        check=_prefill_pipeline,
    ),
)
