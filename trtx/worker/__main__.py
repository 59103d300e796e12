"""``python -m trtx.worker``: runs one worker until SIGTERM, or until its engine dies (exit 4)."""

from __future__ import annotations

import logging
import os
import sys
import threading

from trtx.errors import LaunchError, TrtxError
from trtx.garbage import nothing_of_it_is_garbage
from trtx.worker.options import parse

SWITCH_SECONDS = 0.0005
"""After which a thread that computes lets another one have the interpreter. A token crosses two: the one that reads the
engine's socket, and the event loop. Of the 5 ms that Python has by itself, each waits for a thread that decodes base64
or hashes a picture; docs/performance-notes.md has what it is worth."""

LAST_WORD_SECONDS = 5.0
"""After the engine died: how long the runtime may take to hand errors to clients and deregister."""


def main(argv: list[str]) -> int:
    """The exit code; raises TrtxError for what a person can put right."""
    options = parse(argv)
    # Dynamo configures logging at import and run; uvloop and dynamo cost 0.2 s that a wrong flag need not pay.
    with nothing_of_it_is_garbage():
        import uvloop
        from dynamo.common.backend.worker import Worker

        from trtx.worker.engine import TrtxEngine

    # Dynamo drains a prefill worker before cleanup(), by a budget of its own (25 s in 1.4.2): one bound for all roles.
    os.environ["DYN_PREFILL_DRAIN_TIMEOUT_S"] = str(max(1, round(options.drain_seconds)))
    if options.role == "encode":
        # Between its endpoint's end and cleanup() Dynamo waits, 5 s by itself, and its frontends refuse every request
        # (see Leaving). Who still asks this worker meanwhile asks another one.
        os.environ["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = TrtxEngine(options)
    engine.leaving.on_engine_death = _end_soon
    try:
        uvloop.run(Worker(engine, engine.worker_config()).run())
    except Exception as error:
        if engine.start_error is None:
            raise
        raise LaunchError(f"{options.name} did not start: {engine.start_error}") from error
    return LaunchError.exit_code if engine.leaving.engine_died or engine.engine_hangs else 0


def _end_soon() -> None:
    timer = threading.Timer(LAST_WORD_SECONDS, os._exit, (LaunchError.exit_code,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except TrtxError as error:
        sys.stderr.write(f"trtx.worker: {error}\n")
        code = error.exit_code
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: threads of the runtime or of an engine may outlive it (seen with 1.4.2: a process that never ends,
    # or ends in SIGABRT "exception not rethrown"). Everything that must be released was released in cleanup().
    os._exit(code)
