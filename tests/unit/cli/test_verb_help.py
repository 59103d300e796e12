"""``--help`` of a verb shows its most used options on one screen, and ``--help-all`` shows all."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
import typer
from pydantic import BaseModel

from trtx.cli import app
from trtx.cli.field_options import OptionGroup
from trtx.cli.verb_help import FIRST_OPTIONS, HELP_ALL, option_name
from trtx.config.option_field import OptionField

LINES, COLUMNS = 40, 80
MANY = 40  # options that fill more than a screen


def options(verb: str) -> list[str]:
    command: Any = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    return [option_name(one) for one in command.params]


def shown(verb: str, help_option: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert app.run([*verb.split(), help_option]) == 0
    return capsys.readouterr().out


def of_options(text: str) -> str:
    """The part of the help that lists options and arguments."""
    found = re.search(
        r"^[A-Z][a-z]+:\n.*?(?=\n  Exit codes:|\Z)", text.replace("Examples:", ""), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[0]


def listed(text: str) -> list[str]:
    return re.findall(r"^  (?:-o, )?(--[a-z][a-z-]*)", of_options(text), re.MULTILINE)


@pytest.mark.parametrize("verb", FIRST_OPTIONS)
def test_the_first_help_fits_on_a_screen_and_names_the_other(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(verb, "--help", capsys)
    first = [name for name in FIRST_OPTIONS[verb].split() if name.startswith("--")]
    assert sorted(listed(text)) == sorted(first), f"correct the row of {verb} in FIRST_OPTIONS of trtx/cli/verb_help.py"
    lines = text.splitlines()
    assert max(map(len, of_options(text).splitlines())) <= COLUMNS
    assert of_options(text).count("\n") <= LINES, (
        f"shorten the help of {verb}, or its row in FIRST_OPTIONS of trtx/cli/verb_help.py"
    )
    assert lines[-1] == f"{len(options(verb)) - len(FIRST_OPTIONS[verb].split())} more options: trtx {verb} {HELP_ALL}"


@pytest.mark.parametrize("verb", app.VERBS)
def test_all_options_are_shown_where_they_are_asked_for(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(verb, HELP_ALL if verb in FIRST_OPTIONS else "--help", capsys)
    assert sorted(listed(text)) == sorted(name for name in options(verb) if name.startswith("--"))
    assert HELP_ALL not in text


def test_a_verb_of_many_options_has_a_first_help() -> None:
    lacking = [verb for verb in app.VERBS if len(options(verb)) > MANY and verb not in FIRST_OPTIONS]
    assert not lacking, f"name the most used options of {lacking} in FIRST_OPTIONS of trtx/cli/verb_help.py"


def test_a_flag_that_would_change_nothing_is_refused_where_its_field_gets_an_option() -> None:
    class Other(BaseModel):
        logs: Annotated[bool, OptionField(help="Write a log.")] = True

    with pytest.raises(
        ValueError, match=r"Other\.logs is true by default.*--logs would change nothing; name the field"
    ):
        OptionGroup(Other, ("logs",)).members({})
