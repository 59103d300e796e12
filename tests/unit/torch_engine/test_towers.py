"""The torch engine is processes, and so are its folders: they share messages, and import nothing of each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from source_trees import FILES, ROOT, nodes_of

ENGINE = ROOT / "torch_engine"
PACKAGE = "trtx.torch_engine"
SHARED = {
    "messages",
    "media_positions",
    "channel",
    "sampling_plan",
    "llm_args",
    "logits_processor",
    "kv_fault",
}
CHILD = {"parent", "device", "triton_pointwise"}  # what the engine's process and the encoder's have in common
PLANS = {"kv_layout", "step", "drafting", "block_copies"}  # what the step loop and the runner say to each other
# What each part of the package may import of it. Whoever wants more of the other process adds to the messages.
TOWERS: dict[str, set[str]] = {
    "__init__": set(),
    **dict.fromkeys(SHARED, SHARED),
    "llmapi": {"embeddings", *SHARED},  # the caller's process
    **dict.fromkeys(CHILD, SHARED),
    "vision": {"embeddings", "handoff", *CHILD, *SHARED},  # the encoder's process
    "kv_layout": SHARED,  # from here on the engine's process
    "drafting": SHARED,
    "block_copies": SHARED,
    "step": {"kv_layout", "drafting", *SHARED},
    "handoff": {"kv_layout", "kv_fault"},
    "embeddings": {"handoff", *SHARED},  # of every process that hands one on: of the handoff NIXL's agent, neighbours
    "runner": {"embeddings", *PLANS, *CHILD, *SHARED},
    "ranks": {"runner", "handoff", *PLANS, *CHILD, *SHARED},
    "core": {"ranks", "runner", "handoff", "embeddings", *PLANS, *CHILD, *SHARED},
}
ENGINES_PROCESS = {"core", "handoff", "vision"}  # a build uses the runner's reader of weights


def _parts(path: Path) -> set[str]:
    """``messages``, ``core``, … for whatever ``path`` imports of the torch engine, inside functions too."""
    found: set[str] = set()
    for node in nodes_of(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; write trtx.… out, as everywhere"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[2] for name in names if name.startswith(f"{PACKAGE}.")}
    return found


def test_the_processes_share_messages_alone() -> None:
    for path in (path for path in FILES if ENGINE in path.parents):
        inside = path.relative_to(ENGINE)
        tower = inside.parts[0].removesuffix(".py")
        assert tower in TOWERS, (
            f"torch_engine/{inside} is in no process; put it into llmapi, vision, core, runner or handoff"
        )
        across = _parts(path) - TOWERS[tower] - {tower}
        assert not across, (
            f"torch_engine/{inside} imports {sorted(across)}, which {tower} may not: llmapi runs in the caller's "
            "process, vision in the encoder's, core, runner and handoff in the engine's. Let a field of "
            "torch_engine/messages.py or ipc/ carry what it needs; a type that both sides name belongs "
            "there"
        )


def test_nobody_else_enters_the_engines_processes() -> None:
    for path in FILES:
        if ENGINE not in path.parents:
            entered = _parts(path) & ENGINES_PROCESS
            assert not entered, (
                f"{path.relative_to(ROOT)} imports torch_engine/{', '.join(entered)}, which runs in a process of "
                "its own; ask trtx.torch_engine.llmapi, which asks that process"
            )


def test_the_engines_process_imports_nothing_that_its_start_need_not_wait_for() -> None:
    """Every worker waits for it; what both processes take from ``trtx.config`` are numbers."""
    program = (
        "import sys, trtx.torch_engine.core.process; print(sorted({'pydantic', 'yaml', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
