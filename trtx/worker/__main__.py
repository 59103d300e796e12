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
"""Python's thread switch interval in a worker; Python's own default is 5 ms.

Each token crosses two threads: the one that reads the engine's socket, and the event loop. At the default, each of them
can wait 5 ms for a thread that decodes base64 or hashes an image. docs/performance-notes.md has the measured effect.
"""

LAST_WORD_SECONDS = 5.0
"""How long the runtime may take, after the engine died, to return errors to clients and to deregister."""


def main(argv: list[str]) -> int:
    """Runs one worker and returns its exit code. Raises TrtxError for mistakes that the user can correct."""
    options = parse(argv)
    # Imported here because Dynamo configures logging at import and in run(), and because uvloop and dynamo take 0.2 s
    # to import, which a wrong flag need not wait for.
    with nothing_of_it_is_garbage():
        import uvloop
        from dynamo.common.backend.worker import Worker

        from trtx.worker.engine import TrtxEngine

    # Dynamo drains a prefill worker before it calls cleanup(), within a budget of its own (25 s by default). This sets
    # that budget to --drain-seconds, so that one bound holds for all roles.
    os.environ["DYN_PREFILL_DRAIN_TIMEOUT_S"] = str(max(1, round(options.drain_seconds)))
    if options.role == "encode":
        # Dynamo waits (5 s by default) between removing the endpoint and calling cleanup(), and during that wait its
        # frontends refuse every request for the model (see Leaving). A worker that asks this encode worker in the
        # meantime falls back to another one.
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
    # os._exit instead of sys.exit: threads of the runtime or of an engine may outlive it (with Dynamo 1.4.2 processes
    # were seen that never ended, or ended in SIGABRT "exception not rethrown"). cleanup() has released everything that
    # must be released.
    os._exit(code)
