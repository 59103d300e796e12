"""Every file of a run directory is covered by a digest, or is listed as not covered with the reason: each is edited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from called import call
from openai_server import MODEL, openai_server
from topology_clients import PACED

from trtx.bench.digests import FOLLOWED, NOT_COVERED, why_not_recorded
from trtx.bench.journal import JOURNAL, RunEnded, read_journal

pytestmark = pytest.mark.proof  # runs of its own; make test has unit/experiment/test_records_checked.py
LOAD = ("--concurrency", "2", "--request-count", "4", "--isl", "16", "--osl", "4", "--prompt-corpus", "random")
EVAL = ("eval", "--tasks", "trtx_arithmetic", "--limit", "2")
VERBS = pytest.mark.parametrize("verb", ["bench", "eval"])
REFUSED = ("have changed since the run ended (", "have changed since the measurement")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``trtx bench`` that is over."""
    parent = tmp_path_factory.mktemp("bench")
    asked = ["bench", *PACED, "--model", "synthetic:tiny-trained", *LOAD, "-o", str(parent)]
    assert call(*asked, "--slo", "time_to_first_token:p50:le:60000").code in (0, 3)
    return next(parent.iterdir())


@pytest.fixture(scope="module", name="eval")
def eval_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``trtx eval`` that is over."""
    parent = tmp_path_factory.mktemp("eval")
    with openai_server() as server:
        argv = [*EVAL, "--url", server.url, "--tokenizer", f"synthetic:{MODEL}", "-o", str(parent)]
        assert call(*argv).code == 0
    return next(parent.iterdir())


def files_of(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def is_covered(name: str) -> bool:
    of_trial = any(name.startswith("cells/") and name.endswith(f"/{one}") for one in FOLLOWED)
    return of_trial or name.endswith("/cell.json") or why_not_recorded(name) is None


def edited(path: Path) -> Iterator[None]:
    """With a space more at its end, which no reader of JSON, YAML or lines minds."""
    before = path.read_bytes()
    path.write_bytes(before[:-1] + b" " + before[-1:])
    yield
    path.write_bytes(before)


@VERBS
def test_an_edited_file_is_refused_or_is_listed_as_not_covered(request: pytest.FixtureRequest, verb: str) -> None:
    run = request.getfixturevalue(verb)
    assert call("report", str(run)).code == 0
    covered = [name for name in files_of(run) if is_covered(name)]
    wanted = {"bench": {"cell.json", "verdict.json", "plan.json", "run.lock.yaml", "conditions.json"}}
    wanted["eval"] = {"verdict.json", "run.lock.yaml", "samples.jsonl", "eval.json"}
    assert wanted[verb] <= {Path(name).name for name in covered}
    for name in covered:
        for _ in edited(run / name):
            done = call("report", str(run))
            assert done.code == 2 and any(one in done.err for one in REFUSED) and Path(name).name in done.err, name
    assert call("report", str(run)).code == 0
    assert "unchanged since the run ended" in (run / "report.html").read_text()


def test_a_cell_that_was_taken_away_is_named(bench: Path, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(bench, tmp_path / "without"))
    cell = next(run.glob("cells/*/cell.json"))
    cell.unlink()
    assert call("report", str(run)).code == 0
    assert f"not checked: {cell.relative_to(run).as_posix()} gone" in (run / "report.html").read_text()


@VERBS
def test_what_the_end_of_a_run_notes_is_all_that_no_pattern_names(request: pytest.FixtureRequest, verb: str) -> None:
    run = request.getfixturevalue(verb)
    (ended,) = [event for event in read_journal(run) if isinstance(event, RunEnded)]
    own = {name for name in files_of(run) if name.startswith("cells/")}
    assert {*(ended.files or ())} == {name for name in files_of(run) if is_covered(name)} - own
    assert all(NOT_COVERED.values()) and JOURNAL.file in NOT_COVERED


@VERBS
def test_of_an_older_run_nothing_is_claimed(request: pytest.FixtureRequest, verb: str, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(request.getfixturevalue(verb), tmp_path / "older"))
    lines = (run / JOURNAL.file).read_text().splitlines()
    kept = [line for line in lines if '"event": "run_ended"' not in line]
    (run / JOURNAL.file).write_text("".join(f"{line}\n" for line in kept))
    assert call("report", str(run)).code == 0
    page = (run / "report.html").read_text()
    assert "not checked: the journal has no SHA-256 of them from the end of the run" in page
    assert "unchanged since the run ended" not in page
