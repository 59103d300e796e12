"""Where the verbs show what goes on: a console whose reader may go away."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class ProgressConsole(Console):
    """Says nothing more once its reader is gone, as in ``trtx serve | tee log`` after Ctrl-C.

    Rich's own raises SystemExit there (seen in 14.1), in the middle of whatever told the news: a topology that is
    being stopped would be left half stopped.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, soft_wrap=soft_wrap)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        stream = sys.stderr if self.stderr else sys.stdout
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # or the interpreter fails once more when it flushes at its end
        os.close(nowhere)
