"""An export that meets what FAKE_EXPORT says: it hangs half written, or finds the disk full."""

import os
import signal
from pathlib import Path
from typing import Any


def export_hf_checkpoint(model: Any, *, export_dir: str) -> None:
    (Path(export_dir) / "model.safetensors").write_bytes(b"half")
    match os.environ["FAKE_EXPORT"]:
        case "hang":
            signal.pause()
        case "full":
            with Path("/dev/full").open("wb", buffering=0) as full:
                full.write(b"one byte")
