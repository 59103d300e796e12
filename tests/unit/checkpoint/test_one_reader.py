"""The files that describe a checkpoint are opened in ``trtx/checkpoint`` alone, each in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trtx

ROOT = Path(trtx.__file__).parent
READERS = {
    "config.json": ("checkpoint/documents.py", "read_config of trtx.checkpoint.facts, or read_model_config"),
    "generation_config.json": ("checkpoint/facts.py", "read_end_ids of trtx.checkpoint"),
    "hf_quant_config.json": ("checkpoint/quantization.py", "read_quantization of trtx.checkpoint.quantization"),
    "model.safetensors.index.json": ("checkpoint/weight_index.py", "weight_files of trtx.checkpoint.weight_index"),
}
_OPENING = {"read_text", "read_bytes", "open", "load", "loads", "read_object"}
_NAMES = {"CONFIG": "config.json", "MODELOPT_FILE": "hf_quant_config.json", "INDEX": "model.safetensors.index.json"}


def _opened(source: str) -> set[str]:
    """The files of a checkpoint whose name, or the constant for it, stands in an expression that is opened or parsed.

    A variable of the same function counts as what was assigned to it.
    """
    found: set[str] = set()
    tree = ast.parse(source)
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)))]:
        assigned = {
            target.id: _named(node.value)
            for node in ast.walk(scope)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in _OPENING:
                    found |= _named(node)
                    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                    found |= {file for name in names for file in assigned.get(name, ())}
    return found


def _named(node: ast.AST) -> set[str]:
    constants = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    names = {_NAMES[inner.id] for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id in _NAMES}
    last = {value.rpartition("/")[2] for value in constants if isinstance(value, str)}
    return {file for file in READERS if file in last} | names


def test_a_file_of_a_checkpoint_is_opened_in_one_place() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        module = str(path.relative_to(ROOT))
        for file in _opened(path.read_text(encoding="utf-8")):
            place, instead = READERS[file]
            assert module == place, f"trtx/{module} opens {file} itself; trtx/{place} does, for all: call {instead}"


@pytest.mark.parametrize(
    ("source", "opened"),
    [
        ('def f(d):\n    return json.loads((d / "config.json").read_text())', {"config.json"}),
        ('def f(d):\n    path = d / "config.json"\n    with open(path) as file:\n        pass', {"config.json"}),
        ('def f(d):\n    path: Path = d / "config.json"\n    return path.read_text()', {"config.json"}),
        ('def f(d):\n    return open(f"{d}/config.json")', {"config.json"}),
        ("def f(d):\n    return read_object(d / INDEX, 'an index')", {"model.safetensors.index.json"}),
        ('def f(d):\n    return (d / "config.json").is_file()', set()),
        ('def f(d):\n    (d / "config.json").write_text(json.dumps({}))', set()),
    ],
)
def test_a_reader_is_seen_however_it_is_spelt(source: str, opened: set[str]) -> None:
    assert _opened(source) == opened
