"""Where the ``trtx`` command begins, before anything is imported that takes time."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Entry point of the ``trtx`` command. Ctrl-C while it is imported, where nothing has begun, ends it at once: an
    exception would come up in the middle of somebody's module. Before this line, in Python's own start, it still does.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job of a shell ignores it
    if is_usual:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from trtx.cli.app import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
