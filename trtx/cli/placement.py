"""Which options mean something in which use of a verb: one table of all of them.

An option that a use of its verb would ignore is refused in that use. Every option of every verb has a row; a test holds
the table against the verbs, so a new option must be placed before anybody can type it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Use:
    """One way to call a verb, in the words of the sentence that refuses an option there."""

    where: str
    because: str
    way_out: str = "leave one of them out"


# verb -> use -> words. Several uses of a verb may hold at once.
USES: Mapping[str, Mapping[str, Use]] = {
    "serve": {
        "agg": Use(
            "with --mode agg", "whose workers --workers counts", "leave it out, or choose --mode disagg"
        ),
        "disagg": Use(
            "with --mode disagg", "whose workers --prefill and --decode count", "leave it out, or choose --mode agg"
        ),
        "no GPU": Use("with --engine simulated or paced", "which has nothing to spread over GPUs"),
    },
    "bench": {
        "agg": Use("with --mode agg", "whose workers --workers counts", "leave it out, or choose --mode disagg"),
        "disagg": Use(
            "with --mode disagg", "whose workers --prefill and --decode count", "leave it out, or choose --mode agg"
        ),
        "no GPU": Use("with --engine simulated or paced", "which has nothing to spread over GPUs"),
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which measures what is served already"),
        "serve": Use("without --url", "whose deployment it describes", "add --url, or leave it out"),
        "dry run": Use("beside --dry-run", "which measures nothing"),
    },
    "build": {
        "build": Use("without --check", "to which it belongs", "add --check, or leave it out"),
        "none": Use("beside --quant none", "which calibrates nothing"),
        "tensorrt": Use("beside --backend tensorrt", "which builds for the GPU that is here and proves nothing"),
        "check": Use("beside --check", "which builds nothing"),
        "check all": Use("beside --all", "which checks every shipped config by itself"),
    },
    "doctor": {},
}  # fmt: skip

# verb -> option -> the uses in which it would be ignored
PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "serve": {
        "--model": (),
        "--served-model-name": (),
        "--engine": (),
        "--config": (),
        "--recipe": (),
        "--set": (),
        "--mode": (),
        "--workers": ("disagg",),
        "--prefill": ("agg",),
        "--decode": ("agg",),
        "--tp": ("no GPU",),
        "--gpus": ("no GPU",),
        "--router-mode": (),
        "--router-args": (),
        "--host": (),
        "--port": (),
        "--output": (),
        "--dry-run": (),
    },
    "bench": {
        "--sweep": ("resume",),
        "--concurrency": ("resume",),
        "--isl": ("resume",),
        "--osl": ("resume",),
        "--request-count": ("resume",),
        "--warmup-request-count": ("resume",),
        "--trials": ("resume",),
        "--seed": ("resume",),
        "--url": ("resume",),
        "--tokenizer": ("resume", "serve"),
        "--gpu-count": ("resume", "serve"),
        "--model": ("resume",),
        "--served-model-name": ("resume", "attach"),
        "--engine": ("resume", "attach"),
        "--config": ("resume", "attach"),
        "--recipe": ("resume", "attach"),
        "--set": ("resume", "attach"),
        "--mode": ("resume", "attach"),
        "--workers": ("resume", "attach", "disagg"),
        "--prefill": ("resume", "attach", "agg"),
        "--decode": ("resume", "attach", "agg"),
        "--tp": ("resume", "attach", "no GPU"),
        "--gpus": ("resume", "attach", "no GPU"),
        "--router-mode": ("resume", "attach"),
        "--router-args": ("resume", "attach"),
        "--host": ("resume", "attach"),
        "--port": ("resume", "attach"),
        "--output": ("resume",),
        "--resume": (),
        "--dry-run": ("resume",),
        "--json": ("dry run",),
    },
    "build": {
        "MODEL": ("check all",),
        "--quant": ("check",),
        "--kv-dtype": ("check",),
        "--calib": ("check", "none"),
        "--calib-size": ("check", "none"),
        "--max-ppl-increase": ("check", "tensorrt"),
        "--backend": ("check",),
        "--role": ("check",),
        "--config": ("check all",),
        "--set": (),
        "--output": ("check",),
        "--gpu": ("tensorrt",),
        "--check": (),
        "--mode": ("build",),
        "--recipe": ("check all",),
        "--all": ("build",),
        "--trtllm-version": (),
        "--json": ("build",),
    },
    "doctor": {
        "--engine": (),
        "--port": (),
        "--output": (),
        "--json": (),
    },
}  # fmt: skip


def refuse_ignored(verb: str, typed: Iterable[str], uses: Iterable[str]) -> None:
    """Raises UsageError for the first option of ``typed`` that means nothing in one of ``uses``."""
    held = tuple(uses)
    for option in typed:
        for use in PLACES[verb][option]:
            if use in held:
                words = USES[verb][use]
                raise UsageError(f"{option} means nothing {words.where}, {words.because}; {words.way_out}")
