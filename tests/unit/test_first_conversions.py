"""Every type that trtx converts messages to is known to msgspec once its module is imported.

msgspec 0.22.0 crashes a process in which two threads convert to a type for the first time;
``trtx.torch_engine.llm_args`` names the cause. So a module that converts to a class of trtx makes a decoder for it
at import.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from source_trees import FILES, ROOT, nodes_of

KNOWN_TYPES = """
import dataclasses, functools, importlib, sys, typing
import msgspec

known = set()

def classes_in(kind, found):
    for one in typing.get_args(kind):
        classes_in(one, found)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        if kind not in found:
            found.add(kind)
            for one in typing.get_type_hints(kind).values():
                classes_in(one, found)
    return found

def recorded(decoder, kind=typing.Any, **options):
    classes_in(kind, known)
    return decoder(kind, **options)

for form in (msgspec.json, msgspec.msgpack):
    form.Decoder = functools.partial(recorded, form.Decoder)
for line in sys.stdin:
    module, expression = line.rstrip("\\n").split("\\t")
    names = vars(importlib.import_module(module))
    try:
        kind = eval(expression, dict(names))
    except NameError:  # an argument of the function: its callers name the types
        continue
    for one in classes_in(kind, set()) - known:
        print(f"{module} converts to {one.__qualname__}: add msgspec.json.Decoder({one.__name__}) to {one.__module__}")
"""


def _conversions() -> list[tuple[str, str]]:
    """Module and type expression of each ``msgspec.convert`` and ``msgspec.<format>.decode`` in trtx."""
    found = []
    for path in FILES:
        module = ".".join(("trtx", *path.relative_to(ROOT).with_suffix("").parts))
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "msgspec.convert":
                found.append((module, ast.unparse(node.args[1])))
            elif called.startswith("msgspec.") and called.endswith(".decode"):
                found += [(module, ast.unparse(word.value)) for word in node.keywords if word.arg == "type"]
    return found


@pytest.mark.slow
def test_every_type_is_known_once_its_module_is_imported() -> None:
    conversions = _conversions()
    assert len(conversions) > 12
    lines = "".join(f"{module}\t{kind}\n" for module, kind in conversions)
    seen = subprocess.run([sys.executable, "-c", KNOWN_TYPES], input=lines, text=True, capture_output=True, check=True)
    assert seen.stdout == ""
