"""What only the stand-in has: switches for tests, read from the environment when the package is imported.

``STANDIN_TRTLLM_VERSION``: whose facts hold, ``1.2.1``, ``1.3.0rc7`` or ``1.3.0rc22`` (the default). Names, parameters,
fields and arguments that came later are not there. ``version.py`` stays as it is; ``tensorrt_llm.__version__`` tells.

``STANDIN_TRTLLM_FAULT``: one fault, or several joined by commas:

- ``fatal-after:N``: request N meets an engine that dies: RuntimeError where it is read, ``_check_health()`` False, and
  every later request is refused with RuntimeError "shutting down";
- ``request-error-after:N``: request N and every later one is refused with RequestError; the engine stays healthy;
- ``hang-on-shutdown``: ``shutdown()`` never returns, as with dead ranks before TensorRT-LLM PR #16312;
- ``drop-events``: every fifth KV event is lost, so the ids have gaps;
- ``leave-rank``: one more rank process is started, that outlives ``shutdown()`` and its parent.

Requests are counted from 1 in each process.
"""

from __future__ import annotations

import os

VERSIONS = ("1.2.1", "1.3.0rc7", "1.3.0rc22")
RANK_LIFE_SECONDS = 120
"""A rank process that nobody ends is gone after this time: a test that forgets one harms nobody."""
NEVER_RETURNS_SECONDS = 120.0
"""Of a shutdown that hangs: longer than any bound that a worker sets, and an end for a process that has none."""
LOST_EVENT_PERIOD = 5

VERSION = os.environ.get("STANDIN_TRTLLM_VERSION", VERSIONS[-1])
if VERSION not in VERSIONS:
    raise ValueError(f"STANDIN_TRTLLM_VERSION is {VERSION!r}; expected one of {', '.join(VERSIONS)}")

_KINDS = ("fatal-after", "request-error-after", "hang-on-shutdown", "drop-events", "leave-rank")


def _faults(text: str) -> dict[str, int]:
    """Kind -> the number behind its colon (1 where there is none)."""
    faults = {}
    for part in filter(None, text.split(",")):
        kind, _, count = part.partition(":")
        if kind not in _KINDS:
            raise ValueError(f"STANDIN_TRTLLM_FAULT has {kind!r}; expected {', '.join(_KINDS)}")
        faults[kind] = int(count or 1)
    return faults


FAULTS = _faults(os.environ.get("STANDIN_TRTLLM_FAULT", ""))


def is_known(since: str | None, until: str | None = None) -> bool:
    """Whether the version under test has what came with ``since`` (None: always there; "later": never) and left after
    ``until``."""
    if until is not None and VERSIONS.index(until) < VERSIONS.index(VERSION):
        return False
    return since is None or (since in VERSIONS and VERSIONS.index(since) <= VERSIONS.index(VERSION))


def absent(what: str) -> NotImplementedError:
    """The error for what the real package does and this one can't. It must not pass silently."""
    return NotImplementedError(f"the stand-in for tensorrt_llm has no {what}; only the real package does it")
