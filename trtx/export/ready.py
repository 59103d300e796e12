"""``python -m trtx.export.ready``: waits until a topology that others started serves, as trtx's own launcher does.

Every worker counted by the frontend, then one real request. Exit codes: 0 ready; 2 wrong command line; 4 not in time,
with the reason in the last line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from trtx.errors import LaunchError, TrtxError, UsageError
from trtx.launch import WARM_UP_TOKENS, ask_readiness, complete, warm_up_prompt

_POLL_S = 1.0
_LEAST_REQUEST_S = 10.0


def await_ready(url: str, model: str, namespace: str, expected: dict[str, int], *, timeout_s: float) -> None:
    """Returns once ``expected`` workers of each role are routable and a request got its answer. Raises LaunchError.

    The first request has what is left of ``timeout_s``: kernels may compile in it.
    """
    deadline = time.monotonic() + timeout_s
    told = ""
    while True:
        seen = ask_readiness(url, model, namespace, expected)
        if seen.summary != told:
            print(seen.summary, flush=True)
            told = seen.summary
        if seen.is_ready:
            break
        if time.monotonic() >= deadline:
            raise LaunchError(f"{url} does not serve {model} after {timeout_s:g} s: {seen.summary}")
        time.sleep(_POLL_S)
    left_s = max(_LEAST_REQUEST_S, deadline - time.monotonic())
    if (problem := complete(url, model, warm_up_prompt(0), WARM_UP_TOKENS, timeout_s=left_s)) is not None:
        raise LaunchError(f"the first request to {url} failed: {problem}")
    print(f"{url} serves {model}", flush=True)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m trtx.export.ready", allow_abbrev=False)
    parser.add_argument("--url", required=True, help="of the frontend")
    parser.add_argument("--model", required=True, help="the name that clients send")
    parser.add_argument("--namespace", required=True, help="Dynamo's")
    parser.add_argument("--workers", required=True, nargs="+", metavar="ROLE=N", help="such as prefill=1 decode=2")
    parser.add_argument("--timeout-s", type=float, required=True)
    args = parser.parse_args(argv)
    await_ready(args.url, args.model, args.namespace, _counts(args.workers), timeout_s=args.timeout_s)


def _counts(texts: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        role, _, count = text.partition("=")
        if role not in ("agg", "prefill", "decode", "encode") or not count.isdecimal() or role in counts:
            raise UsageError(f"--workers {text!r} is not ROLE=N of a role of its own; expected such as decode=2")
        counts[role] = int(count)
    return counts


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.export.ready: {error}\n")
        sys.exit(error.exit_code)
