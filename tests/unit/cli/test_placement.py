"""Every option of every verb means something in the use that it is typed in, or is refused there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trtx.cli import app
from trtx.cli.command import Verb, option_name
from trtx.cli.placement import PLACES, USES, refuse_ignored
from trtx.errors import UsageError

# verb -> use -> a command line that is in this use, and would start nothing
CALLS = {
    "serve": {
        "agg": ["serve", "--dry-run", "--mode", "agg"],
        "disagg": ["serve", "--dry-run", "--mode", "disagg"],
        "no GPU": ["serve", "--dry-run", "--engine", "paced"],
    },
    "bench": {
        "agg": ["bench", "--dry-run", "--mode", "agg"],
        "disagg": ["bench", "--dry-run", "--mode", "disagg"],
        "no GPU": ["bench", "--dry-run", "--engine", "simulated"],
        "resume": ["bench", "--resume", "no-such-run"],
        "attach": ["bench", "--url", "http://127.0.0.1:9"],
        "serve": ["bench"],
        "dry run": ["bench", "--dry-run"],
    },
    "build": {
        "build": ["build", "--quant", "fp8"],
        "none": ["build", "synthetic:tiny", "--quant", "none"],
        "tensorrt": ["build", "synthetic:tiny", "--quant", "fp8", "--backend", "tensorrt"],
        "check": ["build", "--check", "--recipe", "qwen3"],
        "check all": ["build", "--check", "--all"],
    },
    "doctor": {},
}
VALUES = {
    "--mode": "agg", "--quant": "fp8", "--kv-dtype": "fp8", "--backend": "pytorch", "--role": "agg",
    "--config": "agg=x",
    "--set": "max_batch_size=1", "--engine": "torch", "--router-mode": "kv", "--gpu": "H100", "--recipe": "qwen3",
    "--url": "http://127.0.0.1:9",
}  # fmt: skip
FLAGS = {"--dry-run", "--json", "--check", "--all"}


def parameters(verb: str) -> list[Any]:
    command = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    assert isinstance(command, Verb)  # which refuses empty and repeated values
    return [parameter for parameter in command.params if parameter.name != "help"]


def test_every_option_of_every_verb_is_placed() -> None:
    assert PLACES.keys() == USES.keys() == app.VERBS.keys()
    for verb in app.VERBS:
        names = {option_name(parameter) for parameter in parameters(verb)}
        assert names == PLACES[verb].keys(), f"place each option of trtx {verb} in trtx/cli/placement.py"
        assert {use for uses in PLACES[verb].values() for use in uses} == USES[verb].keys() == CALLS[verb].keys()


def ignored() -> Iterator[tuple[str, str, str]]:
    for verb, places in PLACES.items():
        for option, uses in places.items():
            for use in uses:
                yield verb, option, use


@pytest.mark.parametrize(("verb", "option", "use"), list(ignored()))
def test_an_option_that_its_use_would_ignore_is_refused(
    verb: str,
    option: str,
    use: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    added = [option] if option in FLAGS else [VALUES.get(option, "2")]
    if option not in FLAGS and option.startswith("--"):
        added = [option, *added]
    assert app.run([*CALLS[verb][use], *added]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"trtx: {option} means nothing ") and said.count("\n") == 1
    assert USES[verb][use].where in said
    assert list(tmp_path.iterdir()) == []


def test_an_option_passes_where_it_means_something() -> None:
    for verb, places in PLACES.items():
        for use in USES[verb]:
            refuse_ignored(verb, [option for option, uses in places.items() if use not in uses], [use])


def test_an_option_without_a_place_can_not_be_typed() -> None:
    with pytest.raises(KeyError):
        refuse_ignored("serve", ["--new"], ["agg"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "--dry-run", "--prefill", "2"], ["--prefill", "--mode agg"]),  # the mode that is served unasked
        (["bench", "--dry-run", "--sweep", "disagg.yaml", "--workers", "2"], ["--workers", "--mode disagg"]),
        (["bench", "--dry-run", "--sweep", "attached.yaml", "--engine", "torch"], ["attach", "topology"]),
        (["serve", "--dry-run", "--recipe", "qwen3", "--config", "agg=a.yaml"], ["--recipe 'qwen3'", "--config"]),
        (["build", "--check", "--recipe", "tiny", "--mode", "agg", "--config", "agg=a.yaml"], ["--recipe", "--config"]),
        (["serve", "--dry-run", "--config", "agg=a.yaml", "--config", "agg=b.yaml"], ["--config names agg twice"]),
        (["serve", "--dry-run", "--set", "max_batch_size="], ["--set 'max_batch_size='", "no value", "null"]),
        (["serve", "--dry-run", "--set", "agg=1"], ["--set 'agg=1'", "role.a.b=value"]),
        (["serve", "--dry-run", "--set", "kv_cache_config={x: 1, x: 2}"], ["--set", "'x' stands twice"]),
        (["build", "--check", "--recipe", "qwen3", "--gpu", "H1000"], ["'H1000'", "Known"]),
        (["build", "synthetic:tiny", "--quant", "fp8", "--kv-dtype", "fp8", "--set", "kv_cache_config.dtype=auto"],
         ["--kv-dtype fp8", "--set 'kv_cache_config.dtype=auto'"]),
        (["serve", "--dry-run", "--workers", "99999"], ["--workers 99999", "256"]),
    ],
)  # fmt: skip
def test_what_would_be_dropped_is_refused(
    argv: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disagg.yaml").write_text("modes: [disagg]\n")
    Path("attached.yaml").write_text("attach: {url: 'http://127.0.0.1:9'}\n")
    Path("a.yaml").write_text("max_batch_size: 1\n")
    assert app.run(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    for word in words:
        assert word in said


def test_a_refusal_by_typer_itself_is_one_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--mode", "both"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    assert "--mode" in said and "agg" in said and "see trtx serve --help" in said


def test_a_long_message_loses_its_middle_and_nothing_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "x" * 5000, "\x1b[31m"]) == 2
    said = capsys.readouterr().err
    assert len(said) < 1000 and " ... " in said and "\x1b" not in said


def test_every_placed_use_has_words() -> None:
    with pytest.raises(UsageError, match="--calib means nothing beside --quant none, which calibrates nothing"):
        refuse_ignored("build", ["--calib"], ["build", "none"])
