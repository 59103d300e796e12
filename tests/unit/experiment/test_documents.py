"""What trtx bench wrote is read as it was written, or refused: which file, which field, its value, what to do."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judged_runs import a_run, an_ab_run, compared, conditions_of_kept, gated, write_lock_anew

from trtx.bench import Cell, Load, Trial, cells, journal, read_cells, read_journal, readings
from trtx.bench.documents import DocumentKind
from trtx.bench.judge.judgement import CheckResult
from trtx.config.strict_yaml import parse_yaml
from trtx.errors import UsageError
from trtx.experiment import gate
from trtx.experiment.baselines.baseline import StoredBaseline, of_run, read_baseline, write_baseline
from trtx.experiment.baselines.conditions import Conditions
from trtx.experiment.bench.resumption import PlanDocument, read_recorded
from trtx.experiment.directory import read_lock
from trtx.report import read_run
from trtx.runs import forms
from trtx.runs.forms import (
    CONDITIONS,
    AskedLoad,
    AskedRun,
    ComparedArms,
    ComparedMetric,
    ComparedWith,
    Comparison,
    Difference,
    Environment,
    Files,
    MeasuredMode,
    MeasuredStart,
    PlannedProcess,
    PlannedTopology,
    Provenance,
    RunVerdict,
)
from trtx.topology import Plan

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "report" / "golden" / "run"
RUN_DIRECTORY = TESTS.parents[1] / "docs" / "run-directory.md"
DOCUMENTS = sorted(
    {
        one
        for module in (cells, journal, readings, forms)
        for one in vars(module).values()
        if isinstance(one, DocumentKind)
    },
    key=lambda one: one.file,
)


def _parse(path: Path) -> Any:
    """A journal is a list of its lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return parse_yaml(text, path.name) if path.suffix == ".yaml" else json.loads(text)


def _line(event: type[journal.JournalEvent]) -> int:
    return [one["event"] for one in _parse(GOLDEN / "journal.jsonl")].index(event.name())


def _inside(document: Any, *keys: str | int) -> Any:
    for key in keys:
        document = document[key]
    return document


Where = tuple[str | int, ...]
IN_GOLDEN = (  # events of a run that nothing went wrong in
    journal.TopologyReady, journal.TopologyStopping, journal.SweepStarted, journal.LoadStarted, journal.TrialStarted,
    journal.TrialEnded, journal.CellEnded, journal.SweepEnded,
)  # fmt: skip
# Each form that is read, and where one of it stands in which file. A form that is in no row is not tried: add one.
FORMS: list[tuple[Any, str, Where]] = [
    (Cell, "cells/agg-c1/cell.json", ()),
    (Trial, "cells/agg-c1/cell.json", ("trials", 0)),
    (Load, "cells/agg-c1/cell.json", ("load",)),
    *((event, "journal.jsonl", (_line(event),)) for event in IN_GOLDEN),
    (AskedRun, "run.lock.yaml", ()),
    (AskedLoad, "run.lock.yaml", ("load",)),
    (Load, "run.lock.yaml", ("load", "cells", 0)),
    (Provenance, "run.lock.yaml", ("provenance",)),
    (Environment, "run.lock.yaml", ("provenance", "environment")),
    (MeasuredMode, "run.lock.yaml", ("provenance", "measured", "agg")),
    (Files, "run.lock.yaml", ("provenance", "measured", "agg", "files")),
    (PlanDocument, "plan.json", ()),
    (Plan, "plan.json", ("topologies", "agg")),
    (PlannedTopology, "plan.json", ("topologies", "agg")),
    (PlannedProcess, "plan.json", ("topologies", "agg", "processes", 0)),
    (RunVerdict, "verdict.json", ()),
    (CheckResult, "verdict.json", ("judgements", 0)),
    (ComparedWith, "verdict.json", ("baseline",)),
    (ComparedArms, "comparison.json", ()),
    (MeasuredStart, "comparison.json", ("starts", 0)),
    (Comparison, "comparison.json", ("comparisons", 0)),
    (Difference, "comparison.json", ("comparisons", 0, "differences", 0)),
    (ComparedMetric, "comparison.json", ("comparisons", 0, "metrics", 0)),
    (Conditions, "conditions.json", ()),
    (StoredBaseline, "baseline.json", ()),
]


def _read(run: Path) -> None:
    """As a report, a resumed run, a comparison and the judge of a run read it."""
    read_run(run)
    of_run(run)
    read_baseline(run / "baseline.json")
    read_recorded(run, read_lock(run))


@pytest.fixture(scope="module")
def judged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept run, without aiperf's files, held against another."""
    parent = tmp_path_factory.mktemp("judged")
    run = Path(shutil.copytree(GOLDEN, parent / "run", ignore=shutil.ignore_patterns("trial-*")))
    write_lock_anew(run)
    CONDITIONS.write(run, conditions_of_kept(run))
    write_baseline(run / "baseline.json", of_run(a_run(parent / "base")))
    gate.judge(run, gated(run, baseline="base", max_regression="5%"))
    of_arms = an_ab_run(parent / "arms", 1.1)
    compared(of_arms)
    shutil.copy(of_arms / "comparison.json", run)
    return run


@pytest.fixture
def run(tmp_path: Path, judged_run: Path) -> Path:
    return Path(shutil.copytree(judged_run, tmp_path / "run"))


def _spoil(path: Path, change: Callable[[Any], None]) -> None:
    document = _parse(path)
    change(document)
    lines = document if path.suffix == ".jsonl" else [document]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))  # YAML too


@pytest.mark.slow
@pytest.mark.parametrize(("form", "file", "where"), FORMS)
def test_a_field_that_is_missing_or_of_another_type_is_named_with_its_file(
    run: Path, form: Any, file: str, where: Where
) -> None:
    original = (run / file).read_text()
    for field in dataclasses.fields(form):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            _check_named(run, file, where, field.name, has_a_type=field.type != "Any")
            (run / file).write_text(original)


def _check_named(run: Path, file: str, where: Where, field: str, *, has_a_type: bool) -> None:
    original = (run / file).read_text()
    changes: list[Callable[[Any], object]] = [
        lambda inner: inner.pop(field, None),
        lambda inner: inner.update({field: [[0.5]]}),
    ]
    inside = where[1:] if file.endswith(".jsonl") else where
    name = ".".join(str(key) for key in (*inside, field))
    for change in changes if has_a_type else changes[:1]:
        (run / file).write_text(original)
        _spoil(run / file, lambda document, change=change: change(_inside(document, *where)))  # type: ignore[misc]
        try:
            _read(run)
        except UsageError as refused:
            said = str(refused)
        else:
            pytest.fail(
                f"{file} is read although {name} is missing, or a list: nobody reads it by its form; read it with "
                "Document.read or restored where read_run or read_recorded need it, or take the form out of FORMS"
            )
        assert Path(file).name in said and name in said, (
            f"without {name}, {file} is refused with another reason: {said}: put right where FORMS says that the form "
            "stands, and give the kept run (make goldens) every field that has no default"
        )
        assert len(said) < 1000 and "\n" not in said and "start a new run" in said


def test_what_is_whole_is_read(run: Path) -> None:
    _read(run)


@pytest.mark.parametrize("field", ["isl", "seed", "ignore_eos", "cells"])
def test_a_resumed_run_takes_no_default_for_a_field_that_its_record_lost(run: Path, field: str) -> None:
    _spoil(run / "run.lock.yaml", lambda document: document["load"].pop(field))
    with pytest.raises(UsageError, match=rf"run\.lock\.yaml: load\.{field} is missing; expected .*start a new run"):
        read_lock(run)


@pytest.mark.parametrize(("part", "field"), [("load", "fixed_schedule"), ("gate", "window")])
def test_a_run_from_before_a_field_goes_on_with_what_it_did(run: Path, part: str, field: str) -> None:
    asked = read_lock(run)
    _spoil(run / "run.lock.yaml", lambda document: document[part].pop(field))
    with pytest.raises(UsageError, match=rf"run\.lock\.yaml: {part}\.{field} is missing"):
        read_lock(run)
    _spoil(run / "run.lock.yaml", lambda document: document.update(schema_version=2))
    assert read_lock(run) == asked


def test_a_resumed_run_refuses_a_record_whose_loads_are_not_those_of_its_spec(run: Path) -> None:
    _spoil(run / "run.lock.yaml", lambda document: document["load"]["cells"][0].update(request_count=99))
    with pytest.raises(UsageError, match=r"load\.cells is .*label.*follows from the rest"):
        read_lock(run)


@pytest.mark.parametrize("figure", ["request_count", "time_to_first_token", "output_sequence_lengths"])
def test_a_figure_that_is_missing_or_no_number_is_named(run: Path, figure: str) -> None:
    cell = run / "cells" / "agg-c1" / "cell.json"
    original = cell.read_text()
    for change in (lambda figures: figures.pop(figure), lambda figures: figures.update({figure: "12"})):
        cell.write_text(original)
        _spoil(cell, lambda document, change=change: change(document["figures"]))  # type: ignore[misc]
        with pytest.raises(UsageError, match=rf"cell\.json .*figures\.{figure} is "):
            read_cells(run)


def test_nan_is_no_figure(run: Path) -> None:
    cell = run / "cells" / "agg-c1" / "cell.json"
    _spoil(cell, lambda document: document["figures"].update(request_throughput=float("nan")))
    with pytest.raises(UsageError, match=r"cell\.json is not valid JSON.*NaN is not a JSON number"):
        read_cells(run)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_number_that_python_takes_for_infinity_is_no_figure(run: Path, number: str) -> None:
    cell = run / "cells" / "agg-c1" / "cell.json"
    _spoil(cell, lambda document: document["figures"].update(request_throughput="MARK"))
    cell.write_text(cell.read_text().replace('"MARK"', number))
    with pytest.raises(
        UsageError, match=r"cell\.json is not valid JSON.*is larger than any number that can be computed with"
    ):
        read_cells(run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_throughput", -5.0),
        ("request_error_rate", -5.0),
        ("error_request_count", -1),
        ("time_to_first_token", {"p50": -5.0}),
        ("input_sequence_lengths", {"min": -1.0}),
    ],
)
def test_what_is_below_0_is_no_figure(run: Path, name: str, value: Any) -> None:
    cell = run / "cells" / "agg-c1" / "cell.json"

    def change(document: Any) -> None:
        figures = document["figures"]
        figures[name] = {**figures[name], **value} if isinstance(value, dict) else value

    _spoil(cell, change)
    with pytest.raises(UsageError, match=rf"cell\.json .*figures\.{name}.* is -\d.*; expected 0 or more"):
        read_cells(run)


def test_two_files_of_one_cell_are_refused(run: Path) -> None:
    """A copy beside it, or in another's place."""
    cells = run / "cells"
    shutil.copytree(cells / "agg-c1", cells / "agg-c1 copy")
    with pytest.raises(
        UsageError, match=r"agg-c1/cell\.json and .*agg-c1 copy/cell\.json both contain the cell 'agg-c1'"
    ):
        read_cells(run)
    shutil.rmtree(cells / "agg-c1 copy")
    other = next(path for path in sorted(cells.iterdir()) if path.name != "agg-c1")
    shutil.copy(cells / "agg-c1" / "cell.json", other / "cell.json")
    with pytest.raises(UsageError, match=rf"{other.name}/cell\.json both contain the cell 'agg-c1'"):
        read_cells(run)


@pytest.mark.parametrize(
    "file",
    ["cells/agg-c1/cell.json", "journal.jsonl", "run.lock.yaml", "plan.json", "verdict.json", "conditions.json",
     "comparison.json", "baseline.json"],
)  # fmt: skip
def test_a_document_of_another_version_is_refused_with_both(run: Path, file: str) -> None:
    for version in (0, 99, "1", True, 1.0, None):
        _spoil(
            run / file,
            lambda document, version=version: (document[0] if "jsonl" in file else document).update(  # type: ignore[misc]
                schema_version=version
            ),
        )
        with pytest.raises(
            UsageError, match=rf"{Path(file).name}.* has schema_version .*, but this trtx reads \d.*start a new"
        ) as refused:
            _read(run)
        assert ": ;" not in str(refused.value)  # where nothing is to be said of why


def test_an_event_that_nobody_knows_is_refused_with_its_line(run: Path) -> None:
    with (run / "journal.jsonl").open("a") as file:
        file.write('{"schema_version": 2, "time": 1.5, "event": "run_finished"}\n')
    with pytest.raises(
        UsageError, match=r"journal\.jsonl, line 24: event is 'run_finished'; expected one of .*run_ended"
    ):
        read_journal(run)


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.file != "cell.json"], ids=lambda one: one.file)
def test_the_page_says_the_version_of_every_document(document: DocumentKind) -> None:
    reads = "nobody" if document is forms.SUMMARY else str(document.version)
    if document.oldest != document.version:
        reads = f"{document.oldest} to {document.version}"
    row = f"| `{document.file}` | {document.version} | {reads} |"
    assert row in RUN_DIRECTORY.read_text(encoding="utf-8"), f"docs/run-directory.md lacks the row {row}"
