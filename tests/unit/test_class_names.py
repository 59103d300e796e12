"""A public class name means one thing in the whole of trtx."""

from __future__ import annotations

import ast
from collections import defaultdict

from source_trees import FILES, ROOT, nodes_of


def test_no_public_class_name_stands_twice() -> None:
    defined = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: files for name, files in defined.items() if len(files) > 1}
    assert not twice, f"rename all but one of these classes: {twice}"
