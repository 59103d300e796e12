"""``trtx bench reproduce`` as typed: what it prints before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.cli.app import run
from trtx.cli.reproduce import NOTHING_DIFFERS, table
from trtx.runs.forms import Difference

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "report" / "golden" / "run" / "run.lock.yaml"  # of another machine than any


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Path(shutil.copy(GOLDEN, tmp_path / "of-a-job.yaml"))


def test_a_dry_run_prints_the_differences_then_what_would_run_and_leaves_nothing(
    lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "reproduce", lock.name, "--dry-run", "-o", "elsewhere"]) == 0
    said = capsys.readouterr().out
    first, _, rest = said.partition("Dry run: nothing was started.")
    lines = first.splitlines()
    assert lines[0].split() == ["what", "then", "here"] and max(map(len, lines)) <= 80
    assert any(line.startswith("trtx_sources") and "7429d61e8b50" in line for line in lines)
    assert "elsewhere/RUN" in rest and "--random-seed 7874214573550100331" in rest
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


def test_exact_ends_with_the_table_where_something_differs(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "reproduce", lock.name, "--exact"]) == 2
    said = capsys.readouterr()
    count = int(said.err.removeprefix("trtx: ").split()[0])
    assert said.err.endswith("correct them, or leave out --exact\n") and said.err.count("\n") == 1
    assert said.out.startswith("what ") and 1 <= count <= len(said.out.splitlines()) - 1
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Missing argument 'LOCK'; see trtx bench reproduce --help"),
        (["no-such.yaml"], "no-such.yaml can't be read (No such file"),
        (["of-a-job.yaml", "--sweep", "x"], "No such option: --sweep"),
        (["of-a-job.yaml", "--dry-run", "--json"], "--json has no effect with --dry-run"),
    ],
)
@pytest.mark.usefixtures("lock")
def test_what_it_does_not_take_is_one_sentence(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "reproduce", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_bench_itself_is_called_as_before(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--engine", "paced", "--concurrency", "3", "--dry-run"]) == 0
    assert "concurrency 3: " in capsys.readouterr().out
    assert run(["bench", "--help"]) == 0
    assert "trtx bench reproduce" in capsys.readouterr().out
    assert run(["bench", "reproduce", "--help"]) == 0
    assert "LOCK" in capsys.readouterr().out


def test_no_difference_is_said_in_words() -> None:
    assert list(table((), 80)) == [NOTHING_DIFFERS]


VALUES = st.none() | st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=100)


DIFFERENCES = st.builds(Difference, st.text("abc_.", min_size=1, max_size=90), VALUES, VALUES)


@given(st.lists(DIFFERENCES, min_size=1), st.integers(0, 300))
def test_every_value_is_whole_in_a_table_of_at_most_80_columns(found: list[Difference], width: int) -> None:
    lines = list(table(found, width))
    assert max(map(len, lines)) <= min(80, max(60, width))
    letters = sorted("".join("".join(lines[1:]).split()))
    shown = [one.name + "".join("–" if value is None else value for value in (one.before, one.now)) for one in found]
    assert letters == sorted("".join(shown))
