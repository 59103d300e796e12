"""``python3 -m trtx.export.wait URL MODEL --workers prefill=1,decode=2`` waits until a topology serves.

It exits with 4 if the topology does not serve in time. It is for jobs that use a topology which trtx did not start. A
topology serves when its frontend counts every expected worker and has answered a real request. Dynamo 1.6.1's
``/health`` is not enough, because it is 200 even if no model is served.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import httpx

from trtx.config.wording import quoted
from trtx.errors import LaunchError, TrtxError, UsageError
from trtx.export.handoffs import prove_handoffs
from trtx.tls import trust_of

# Dynamo's name for each role in /v1/models/<name>/ready.
_WORKER_TYPES = {"agg": "aggregated", "prefill": "prefill", "decode": "decode", "encode": "encode"}
_PAUSE_S = 1.0
_REQUEST_S = 60.0


def missing(client: httpx.Client, url: str, model: str, workers: Mapping[str, int]) -> str | None:
    """Returns a short description of what is missing; None once all workers are counted and a request was answered."""
    try:
        answer = client.get(f"{url}/v1/models/{quote(model, safe='')}/ready", timeout=5.0)
        if answer.status_code == 404:
            return "the frontend knows no worker"
        document = answer.json()
        found: dict[str, int] = {}
        for namespace in document["namespaces"].values():  # several during a rolling update
            for kind, entry in namespace["worker_types"].items():
                found[kind] = found.get(kind, 0) + int(entry["workers"])
        counted = {role: found.get(_WORKER_TYPES[role], 0) for role in workers}
        if document.get("ready") is not True or any(counted[role] < count for role, count in workers.items()):
            return ", ".join(f"{counted[role]} of {count} {role}" for role, count in workers.items())
        body = {"model": model, "prompt": "a", "max_tokens": 1}
        answer = client.post(f"{url}/v1/completions", json=body, timeout=_REQUEST_S)
        return None if answer.status_code == 200 else f"a request got HTTP {answer.status_code}"
    except (httpx.HTTPError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"the frontend does not answer ({type(error).__name__}: {error})"


def wait(url: str, model: str, workers: Mapping[str, int], *, timeout_s: float) -> None:
    """Waits until nothing is missing. Raises LaunchError after ``timeout_s``, which names what is still missing."""
    deadline = time.monotonic() + timeout_s
    printed = ""
    with httpx.Client(trust_env=False, verify=trust_of(url)) as client:
        while (lacking := missing(client, url, model, workers)) is not None:
            if lacking != printed:
                sys.stderr.write(f"waiting: {lacking}\n")
                printed = lacking
            if time.monotonic() > deadline:
                raise LaunchError(f"{url} does not serve {quoted(model)} after {timeout_s:g} s: {lacking}")
            time.sleep(_PAUSE_S)


def _counts(text: str) -> dict[str, int]:
    counts = {}
    for part in text.split(","):
        role, _, count = part.partition("=")
        if role not in _WORKER_TYPES or not count.isdecimal() or int(count) < 1:
            raise UsageError(
                f"--workers {quoted(text)} can't be read; expected one such as agg=2 or prefill=1,decode=2"
            )
        counts[role] = int(count)
    return counts


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m trtx.export.wait", allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("model", help="the name that requests carry")
    parser.add_argument("--workers", required=True, help="of each role, such as prefill=1,decode=2")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--prove-handoffs", metavar="ENGINE", help="with KV of each pair of workers, of this engine")
    parser.add_argument("--logs", type=Path, default=Path(), help="directory of the workers' logs, for the cause")
    args = parser.parse_args(argv)
    url, workers, until = args.url.rstrip("/"), _counts(args.workers), time.monotonic() + args.timeout_s
    wait(url, args.model, workers, timeout_s=args.timeout_s)
    proved = ""
    if args.prove_handoffs is not None:
        left_s = until - time.monotonic()
        proved = prove_handoffs(url, args.model, workers, engine=args.prove_handoffs, logs=args.logs, timeout_s=left_s)
    sys.stderr.write(f"every worker is counted, one request went through{proved}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.export.wait: {error}\n")
        sys.exit(error.exit_code)
