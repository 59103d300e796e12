"""The files that describe a checkpoint are opened in ``trtx/checkpoint`` alone, each in one place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
from source_trees import FILES, ROOT, nodes_of

pytestmark = pytest.mark.slow

Source = str | Path  # or the file that it stands in
READERS = {
    "config.json": ("checkpoint/documents.py", "read_config of trtx.checkpoint.facts, or read_model_config"),
    "generation_config.json": ("checkpoint/facts.py", "read_end_ids of trtx.checkpoint"),
    "hf_quant_config.json": ("checkpoint/quantization.py", "read_quantization of trtx.checkpoint.quantization"),
    "model.safetensors.index.json": ("checkpoint/weight_index.py", "weight_files of trtx.checkpoint.weight_index"),
}
_OPENING = {"read_text", "read_bytes", "open", "load", "loads", "read_object"}
# Modules that name a file beside others, to write it or to look whether it is there.
NAMING = {
    "build/contents.py", "checkpoint/facts.py", "checkpoint/quantization.py",
    "checkpoint/resolve.py", "checkpoint/synthetic.py", "cli/check.py",
}  # fmt: skip
# Modules that make a model of transformers, which wants a config of its own.
TRANSFORMERS = {
    "build/quantize.py", "torch_engine/vision/load.py",
}  # fmt: skip
_JOINING = {"join", "joinpath"}
_ASKING = {"is_file", "exists", "write_text", "write_bytes", "unlink"}
_NAMES = {"CONFIG": "config.json", "MODELOPT_FILE": "hf_quant_config.json", "INDEX": "model.safetensors.index.json"}


def _nodes(source: Source) -> Sequence[ast.AST]:
    """The tree of a module, itself first."""
    return nodes_of(source) if isinstance(source, Path) else list(ast.walk(ast.parse(source)))


@functools.cache
def _modules() -> Sequence[Path]:
    """Those of trtx that name a file of a checkpoint, by a string or by its constant."""
    return [path for path in FILES if any(map(_is_name, nodes_of(path)))]


def _is_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.rpartition("/")[2] in READERS
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
    return name in _NAMES


def _opened(source: Source) -> set[str]:
    """The files of a checkpoint whose name, or the constant for it, stands in an expression that is opened or parsed.

    A variable of the same function counts as what was assigned to it.
    """
    found: set[str] = set()
    nodes = _nodes(source)
    for scope in [nodes[0], *(node for node in nodes if isinstance(node, (ast.FunctionDef, ast.Lambda)))]:
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


def _handed_on(source: Source) -> set[str]:
    """The files of a checkpoint whose path is made for somebody else to open: all but a sentence that names the file,
    and a question whether it is there."""
    nodes = _nodes(source)
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    aliases = {
        one.asname or one.name: _NAMES[one.name]
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if one.name in _NAMES
    }
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            file = node.value.rpartition("/")[2]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            file = aliases.get(name, _NAMES.get(name, ""))
        else:
            continue
        around: list[ast.AST] = [node]
        while around[-1] in parents and not isinstance(around[-1], ast.stmt):
            around.append(parents[around[-1]])
        is_asked = any(isinstance(one, ast.Attribute) and one.attr in _ASKING for one in around)
        is_told = any(_is_sentence(one) for one in around)
        if file in READERS and not is_asked and not is_told:
            found.add(file)
    return found


def _is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) and any(
        isinstance(one, ast.Constant) and " " in str(one.value) for one in node.values
    )


def _helpers(source: Source) -> set[str]:
    """The functions that return the path of a file of a checkpoint."""
    return {
        scope.name
        for scope in _nodes(source)
        if isinstance(scope, ast.FunctionDef)
        for node in ast.walk(scope)
        if isinstance(node, ast.Return) and node.value is not None
        if isinstance(node.value, ast.BinOp) or getattr(getattr(node.value, "func", None), "attr", "") in _JOINING
        if _named(node.value)
    }


def _transformers_configs(source: Source) -> set[str]:
    """The configs of transformers that are imported or looked up: each reads config.json by itself."""
    found = set()
    for node in _nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            found |= {one.name for one in node.names if one.name.endswith("Config")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("transformers."):
            found |= {node.attr} if node.attr.endswith("Config") else set()
    return found


def test_the_path_of_a_file_of_a_checkpoint_is_made_where_it_is_opened() -> None:
    naming = set()
    for path in _modules():
        module = str(path.relative_to(ROOT))
        for file in _handed_on(path):
            place, instead = READERS[file]
            naming.add(module)
            assert module == place or module in NAMING, (
                f"trtx/{module} makes a path of {file}; trtx/{place} reads it, for all: call {instead}. Where it is "
                f"never read by that path, name the module in NAMING of {Path(__file__).name}"
            )
        assert not (helpers := _helpers(path)), (
            f"{sorted(helpers)} of trtx/{module} hands out a path, and who gets it reads the file a second way; "
            "hand out what the file says"
        )
    assert naming >= NAMING, (
        f"take {sorted(NAMING - naming)} out of NAMING of {Path(__file__).name}: no path is made there"
    )


def test_no_config_of_transformers_is_a_second_reader() -> None:
    for path in FILES:
        module = str(path.relative_to(ROOT))
        found = _transformers_configs(path)
        assert not found or module in TRANSFORMERS, (
            f"trtx/{module} reads config.json by transformers' {', '.join(sorted(found))}, which takes other defaults; "
            f"call {READERS['config.json'][1]}"
        )


@pytest.mark.parametrize(
    ("source", "handed_on"),
    [
        ('def path(d):\n    return d / "config.json"', {"config.json"}),
        ('def path(d):\n    return os.path.join(d, "config.json")', {"config.json"}),
        ('NAME = "config.json"', {"config.json"}),
        ("from x import CONFIG as NAME\n\n\ndef path(d):\n    return d / NAME", {"config.json"}),
        ("def path(d):\n    return d / documents.CONFIG", {"config.json"}),
        ('def path(d):\n    return f"{d}/config.json"', {"config.json"}),
        ('def f(d):\n    return f(f"{d / INDEX}")', {"model.safetensors.index.json"}),
        ('def f(d):\n    raise E(f"{d / INDEX} is not there")', set()),
        ('def f(d):\n    return (d / "config.json").is_file()', set()),
        ('def f(d):\n    return "config.json is not there"', set()),
    ],
)
def test_a_path_is_seen_however_it_is_made(source: str, handed_on: set[str]) -> None:
    assert _handed_on(source) == handed_on


def test_a_helper_that_hands_out_a_path_is_seen() -> None:
    assert _helpers('def path(d):\n    return d / "config.json"') == {"path"}
    assert _helpers('def path(d):\n    return os.path.join(d, "config.json")') == {"path"}
    assert _helpers("def fields(d):\n    return read_object(d / CONFIG, 'a config')") == set()


@pytest.mark.parametrize(
    "source",
    [
        "from transformers import AutoConfig",
        "def f(d):\n    from transformers import AutoConfig as A\n    return A.from_pretrained(d)",
        "import transformers\n\nx = transformers.AutoConfig.from_pretrained(d)",
        "from transformers.models.auto import AutoConfig",
    ],
)
def test_a_config_of_transformers_is_seen_however_it_is_spelt(source: str) -> None:
    assert _transformers_configs(source) == {"AutoConfig"}


def test_a_file_of_a_checkpoint_is_opened_in_one_place() -> None:
    for path in _modules():
        module = str(path.relative_to(ROOT))
        for file in _opened(path):
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
