"""Commands of ``benchmarks/`` that documents, docstrings and ``make bench-gpu`` quote can still be given.

What a script takes is read from its ``add_argument`` calls: many import what only a machine with a GPU has.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "Path": Path, "str": str}
CODE = re.compile(r"(?P<ticks>`+)(?P<code>[^`]+)(?P=ticks)(?P<after>[^`]{0,20})")
COMMAND = re.compile(r"(?P<python>\bpython )?\bbenchmarks/(?P<script>\w+\.py)(?P<words>.*)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}\S.*\n(?: {8}.*\n)*", re.MULTILINE)
OF_THE_PAST = re.compile(r"\s+at commit [0-9a-f]{7,}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def or_placeholder(convert: Callable[[str], object]) -> Callable[[str], object]:
    """A document may say N or … where a number stands."""
    return lambda text: text if re.fullmatch("[A-Z_]+|…", text) else convert(text)


def parser_of(script: Path) -> Parser:
    """A parser with the arguments of the script's own, and what of their choices its source spells out."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    parser = Parser(allow_abbrev=False)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        given = {word.arg: word.value for word in node.keywords}
        taken: dict[str, Any] = {name: ast.literal_eval(given[name]) for name in ("action", "nargs") if name in given}
        if isinstance(convert := given.get("type"), ast.Name):
            taken["type"] = or_placeholder(TYPES[convert.id])
        choices = given.get("choices")
        if isinstance(choices, ast.Name):
            choices = assigned.get(choices.id)
        if isinstance(choices, ast.Dict):
            taken["choices"] = [ast.literal_eval(key) for key in choices.keys if key is not None]
        elif isinstance(choices, ast.List | ast.Tuple):
            taken["choices"] = ast.literal_eval(choices)
        if "required" in given:
            taken["required"] = True
        parser.add_argument(*(ast.literal_eval(name) for name in node.args), **taken)
    return parser


def fault(script: str, words: list[str], *, is_whole: bool = True) -> str | None:
    """What is wrong with the command. ``is_whole``: it has all arguments that the script can't do without."""
    path = BENCHMARKS / script
    if not path.is_file():
        return f"benchmarks/{script}: there is no such script"
    if (not is_whole and not words) or "--help" in words:
        return None
    try:
        parser_of(path).parse_args(words)
    except ValueError as error:
        return f"benchmarks/{script} {shlex.join(words)}: {error}"
    return None


def told(code: str) -> str | None:
    """What is wrong with a piece of code that may be a command, as a person writes one: on several lines, with
    ``[--rounds 3]`` for what may be left out and ``a|b`` in it."""
    line = re.sub(r"\\?\n\s*", " ", code)
    found = COMMAND.search(line)
    if found is None:
        return None
    words = re.sub(r"\[([^]|]*)[^]]*\]", r"\1", found["words"])
    return fault(found["script"], shlex.split(words, comments=True), is_whole=bool(found["python"]))


def pieces(text: str, blocks: re.Pattern[str]) -> Iterator[str]:
    """Code of a document: its blocks, by line, and what stands between backticks. A script of an older commit is not
    asked about."""
    for block in blocks.findall(text):
        yield from re.sub(r"\\\n", " ", block).splitlines()
    for found in CODE.finditer(blocks.sub("\n", text)):
        if not OF_THE_PAST.match(found["after"]):
            yield found["code"]


def faults(text: str, blocks: re.Pattern[str] = FENCED) -> list[str]:
    wrong = [told(code) for code in pieces(text, blocks)]
    wrong += [fault("bench_gpu.py", shlex.split(words)) for words in re.findall(r'ARGS="([^"]*)"', text)]
    return [one for one in wrong if one is not None]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_document_are_those_that_a_script_takes(document: Path) -> None:
    wrong = faults(document.read_text(encoding="utf-8"))
    assert not wrong, f"{document.relative_to(ROOT)} quotes:\n" + "\n".join(wrong)


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_commands_of_a_docstring_are_those_that_the_script_takes(script: Path) -> None:
    said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    wrong = faults(f"{said}\n", INDENTED)
    assert not wrong, f"{script.name} says of itself:\n" + "\n".join(wrong)


def bench_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # of the modules that it imports
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCHMARKS / "bench_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_commands_of_make_bench_gpu_are_those_that_its_scripts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench_gpu(monkeypatch)
    images = module.Images("synthetic:tiny-vl", 64, "1,8,8", 12)
    found = [
        command
        for section in module.sections(module.MODELS, "1,8", {"vllm": Path("vllm"), "sglang": Path("sglang")}, images)
        for command in (*section.commands.values(), *section.peer.values())
    ]
    wrong = [fault(script, words) for script, *words in found]
    assert len(found) > 20 and not any(wrong), "\n".join(filter(None, wrong))
