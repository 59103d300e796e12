"""A worker asks no engine which one it is: what tells them apart is in ``trtx/engine/api.py``, and each one answers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trtx
from trtx.engine import ENGINE_KINDS

ROOT = Path(trtx.__file__).parent
# What of the engine's room is no one engine's.
SHARED = {
    f"trtx.engine.{name}"
    for name in ("api", "handoff_facts", "ranks", "served_family", "worker_facts", "worker_status")
}
CURE = (
    "say what differs as a member of Engine or EngineApi in trtx/engine/api.py, with what its absence means, and let "
    "engine/embedded.py, engine/paced.py and engine/tensorrt_llm/adapter.py answer"
)


def module_of(name: str) -> str:
    """``trtx.engine.paced`` of ``trtx.engine.paced.PacedLLM``: the part that is a file or a folder."""
    path = ROOT.parent / name.replace(".", "/")
    return name if path.is_dir() or path.with_suffix(".py").exists() else name.rpartition(".")[0] or name


def questions(path: Path) -> list[str]:
    """Where the code of a file asks which engine it has before it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and node.id in ("getattr", "hasattr"):
            found.add(f"line {node.lineno} asks by {node.id} what there is")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for module in {module_of(within + one.name) for one in node.names}:
                is_engines = module.startswith("trtx.engine.") and module not in SHARED
                if is_engines or module.startswith(("trtx.torch_engine", "tensorrt_llm")):
                    found.add(f"line {node.lineno} imports {module}, which is one engine's")
        elif isinstance(node, (ast.Compare, ast.MatchValue)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in ENGINE_KINDS:
                    found.add(f"line {node.lineno} compares with the name of an engine")
                if isinstance(part, ast.Attribute) and ast.unparse(part).endswith("api.kind"):
                    found.add(f"line {node.lineno} compares {ast.unparse(part)}")
    return sorted(found)


@pytest.mark.parametrize("path", sorted((ROOT / "worker").rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_of_the_worker_asks_which_engine_it_has(path: Path) -> None:
    found = questions(path)
    assert not found, f"worker/{path.name}: {'; '.join(found)}: {CURE}"


@pytest.mark.parametrize(
    "line",
    [
        "pid = getattr(self.llm, 'engine_pid', None)",
        "from trtx.engine.tensorrt_llm import versions",
        "from trtx.engine import paced",
        "from trtx.engine import embedded",
        "import trtx.torch_engine.messages",
        "import tensorrt_llm",
        "if options.engine == 'tensorrt-llm': pass",
        "if options.engine in ('torch', 'paced'): pass",
        "is_fatal = loaded.api.kind != other",
    ],
)
def test_each_way_to_ask_is_seen(tmp_path: Path, line: str) -> None:
    path = tmp_path / "asks.py"
    path.write_text(line)
    assert len(questions(path)) == 1
