"""As much of ModelOpt as the quantizing child calls, in no time: no weight is touched. Crashes if told to."""

import os
import signal
from collections.abc import Callable
from typing import Any

FP8_DEFAULT_CFG: dict[str, Any] = {"quant_cfg": [], "algorithm": "max"}
FP8_KV_CFG: dict[str, Any] = {"quant_cfg": []}

if os.environ["FAKE_EXPORT"] == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)


def quantize(model: Any, config: dict[str, Any], forward_loop: Callable[[Any], None]) -> Any:
    forward_loop(model)
    return model
