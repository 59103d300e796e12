"""The entry point of the ``trtx`` command, which runs before any slow import."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Runs the ``trtx`` command. Ctrl-C during its imports ends the process at once.

    Nothing has started by then, and an exception would only print a traceback from the middle of some module. During
    Python's own startup, before this function, Ctrl-C still raises.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores SIGINT
    if is_usual:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from trtx.cli.app import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
