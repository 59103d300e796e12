"""Every file of a run directory is covered by a digest, or is listed as not covered with the reason: each is edited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from called import call
from openai_server import MODEL, openai_server
from topology_clients import PACED

from trtx.bench.digests import FOLLOWED, NOT_COVERED, why_not_noted
from trtx.bench.journal import JOURNAL, RunEnded, read_journal

pytestmark = pytest.mark.slow
LOAD = ("--concurrency", "2", "--request-count", "4", "--isl", "16", "--osl", "4", "--prompt-corpus", "random")
EVAL = ("eval", "--tasks", "trtx_arithmetic", "--limit", "2")
REFUSED = ("have changed since the run ended (", "have changed since the measurement")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of ``trtx bench`` with scores, and of ``trtx eval``, both over."""
    parent = tmp_path_factory.mktemp("runs")
    asked = ["bench", *PACED, "--model", "synthetic:tiny-trained", *LOAD, "-o", str(parent / "bench")]
    assert call(*asked, "--slo", "time_to_first_token:p50:le:60000").code in (0, 3)
    with openai_server() as server:
        argv = [*EVAL, "--url", server.url, "--tokenizer", f"synthetic:{MODEL}", "-o", str(parent / "eval")]
        assert call(*argv).code == 0
    return {name: next((parent / name).iterdir()) for name in ("bench", "eval")}


def files_of(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def is_covered(name: str) -> bool:
    of_trial = any(name.startswith("cells/") and name.endswith(f"/{one}") for one in FOLLOWED)
    return of_trial or name.endswith("/cell.json") or why_not_noted(name) is None


def edited(path: Path) -> Iterator[None]:
    """With a space more at its end, which no reader of JSON, YAML or lines minds."""
    before = path.read_bytes()
    path.write_bytes(before[:-1] + b" " + before[-1:])
    yield
    path.write_bytes(before)


@pytest.mark.parametrize("verb", ["bench", "eval"])
def test_an_edited_file_is_refused_or_is_listed_as_not_covered(runs: dict[str, Path], verb: str) -> None:
    run = runs[verb]
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


def test_a_cell_that_was_taken_away_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(runs["bench"], tmp_path / "without"))
    cell = next(run.glob("cells/*/cell.json"))
    cell.unlink()
    assert call("report", str(run)).code == 0
    assert f"not checked: {cell.relative_to(run).as_posix()} gone" in (run / "report.html").read_text()


@pytest.mark.parametrize("verb", ["bench", "eval"])
def test_what_the_end_of_a_run_notes_is_all_that_no_pattern_names(runs: dict[str, Path], verb: str) -> None:
    (ended,) = [event for event in read_journal(runs[verb]) if isinstance(event, RunEnded)]
    own = {name for name in files_of(runs[verb]) if name.startswith("cells/")}
    assert {*(ended.files or ())} == {name for name in files_of(runs[verb]) if is_covered(name)} - own
    assert all(NOT_COVERED.values()) and JOURNAL.file in NOT_COVERED


@pytest.mark.parametrize("verb", ["bench", "eval"])
def test_of_an_older_run_nothing_is_claimed(runs: dict[str, Path], verb: str, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(runs[verb], tmp_path / "older"))
    lines = (run / JOURNAL.file).read_text().splitlines()
    kept = [line for line in lines if '"event": "run_ended"' not in line]
    (run / JOURNAL.file).write_text("".join(f"{line}\n" for line in kept))
    assert call("report", str(run)).code == 0
    page = (run / "report.html").read_text()
    assert "not checked: the journal has no SHA-256 of them from the end of the run" in page
    assert "unchanged since the run ended" not in page
