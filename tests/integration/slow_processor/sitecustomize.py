"""Python imports this at its start. It gives each worker's engine a logits processor that takes long on the host."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

if any(argument.startswith(("trtx.worker", "trtx.torch_engine")) for argument in sys.orig_argv):
    from trtx.worker.requests.dynamo_test_hook import VARIABLE, ForcedTokens

    os.environ[VARIABLE] = "1"
    _force = ForcedTokens.__call__

    def _slowly(self: ForcedTokens, *arguments: Any, **named: Any) -> None:
        time.sleep(float(os.environ["SLOW_PROCESSOR_S"]))
        _force(self, *arguments, **named)

    ForcedTokens.__call__ = _slowly  # type: ignore[method-assign]
