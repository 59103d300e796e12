"""The table of a served topology: what became of the KV of a decode worker's prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from trtx.cli.topology_view import render_table
from trtx.engine.worker_status import HandoffsSoFar, WorkerStatus
from trtx.launch.slots import Slot
from trtx.topology import ProcessSpec


@pytest.mark.parametrize(
    ("handoffs", "shown"),
    [
        (None, "-"),
        (HandoffsSoFar(7, 0, 0), "7"),
        (HandoffsSoFar(7, 0, 0, local=30), "7, 30 local"),
        (HandoffsSoFar(7, 2, 0, "prefill-0", "it is gone", local=30), "7, 30 local, 2 recomputed"),
    ],
)
def test_prompts_that_the_router_left_to_a_decode_worker_stand_beside_its_handoffs(
    handoffs: HandoffsSoFar | None, shown: str
) -> None:
    spec = ProcessSpec(name="decode-0", role="decode", argv=("true",), env={}, log_path=Path("log"))
    slot = Slot(spec, status=WorkerStatus(pid=1, handoffs=handoffs))
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(render_table((slot,), 0.0))
    (row,) = [line for line in captured.get().splitlines() if "decode-0" in line]
    assert row.strip(" │").endswith(shown), row
