"""What messages say: options as a person types them, and no address of a package index."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import typer
from source_trees import FILES, ROOT, nodes_of

from trtx.cli import app
from trtx.cli.verb_help import option_name

pytestmark = pytest.mark.slow

# Programs with options of their own, which trtx starts itself.
_OTHER_PROGRAMS = ("worker", "frontend", "launch/guardian.py")
# Options of other tools, in the commands that a fix spells out.
_OTHERS = {
    "--help",
    "--help-all",
    "--version",
    "--ulimit",
    "--shm-size",
    "--ipc",
    "--pid",
    "--ntasks",
    "--router-temperature",
}
_OTHERS |= {"--repo-type", "--cacert", "--connect-to"}
_OTHERS |= {"--header", "--isl-block-size"}  # aiperf's
_OTHERS |= {"--batch", "--qos", "--signal"}  # Slurm's
_OTHERS |= {"--client-cert-auth", "--enable-grpc-gateway", "--listen-client-urls"}  # etcd's
_OTHERS |= {"--no-deps"}  # pip's


def _texts() -> Iterator[tuple[str, str]]:
    """(file and line, text) of every string that is neither documentation nor by itself a word of a command line."""
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name.startswith(_OTHER_PROGRAMS):
            continue
        documentation = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
        for node in nodes_of(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
                continue
            if not re.fullmatch(r"--?[a-z-]+(=\S*)?", node.value) and not node.value.startswith("git "):
                yield f"{name}:{node.lineno}", node.value


def _options() -> set[str]:
    commands = [app.Verbs().get_command(typer.Context, verb) for verb in app.VERBS]  # type: ignore[arg-type]
    return {option_name(parameter) for command in commands for parameter in command.params}


def test_every_option_that_a_message_names_can_be_typed() -> None:
    known = _options() | _OTHERS
    named = [
        (where, option)
        for where, text in _texts()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)
        if option not in known
    ]
    assert not named


def test_no_message_prints_the_address_of_a_package_index() -> None:
    """A site has its own: a fix names the package and its version."""
    assert not [where for where, text in _texts() if re.search(r"index-url|pypi\.|download\.pytorch", text)]


def test_a_set_beside_a_url_is_called_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bench", "--url", "http://127.0.0.1:9", "--set", "max_batch_size=1"]) == 2
    assert capsys.readouterr().err.startswith("trtx: --set has no effect with --url")
