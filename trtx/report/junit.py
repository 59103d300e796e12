"""``junit.xml``: one test case per cell and one per judgement."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.bench.metrics import benchmark_duration
from trtx.report.validity import reason_text, reasons, reasons_text
from trtx.report.view import Row, RunView
from trtx.runs.forms import RunVerdict

_HAS_FIGURES = ("ok", "errors")  # in any other status, the metrics don't represent the requested load


def junit_xml(view: RunView) -> str:
    """Failures are measured problems; errors are missing conclusions.

    Errors are: a cell without a result, with too few trials, uncounted or INVALID; a judgement without a verdict; and
    all judgements of a cell without a result. Failed requests are a failure of the cell in an unjudged run; otherwise
    their judgement decides, since the limit may allow some.

    The reasons for SUSPECT and the unchecked items are added as output and don't fail a case. Judgements of scores
    follow those of cells.
    """
    suite = ElementTree.Element("testsuite", name=_xml_safe(f"trtx bench {view.name}"))
    judgements = view.verdict.judgements if view.verdict is not None else ()
    for row in view.rows:
        _cell_case(suite, row, is_judged=view.verdict is not None)
        for judgement in judgements:
            if judgement.cell == row.name:
                _judgement_case(suite, judgement, is_error=row.figures is None)
    of_cells = {row.name for row in view.rows}
    for judgement in judgements if view.scores is not None else ():
        if judgement.cell not in of_cells:
            _judgement_case(suite, judgement, room="eval")
    if view.scores is not None and view.verdict is None:
        _unjudged_case(suite)
    return _document(suite)


def scores_junit_xml(name: str, verdict: RunVerdict | None) -> str:
    """The document of a trtx eval run: one case per judgement. ``verdict`` None: the run ended early, which is an
    error.
    """
    suite = ElementTree.Element("testsuite", name=_xml_safe(f"trtx eval {name}"))
    for judgement in verdict.judgements if verdict is not None else ():
        _judgement_case(suite, judgement, room="eval")
    if verdict is None:
        _unjudged_case(suite)
    return _document(suite)


def _unjudged_case(suite: ElementTree.Element) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="trtx.eval", name="verdict", time="0.000")
    _found(case, "error", "the run ended early", type=Verdict.NO_VERDICT.value)


def _document(suite: ElementTree.Element) -> str:
    for name, found in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
        suite.set(name, str(len(suite.findall(found))))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _cell_case(suite: ElementTree.Element, row: Row, *, is_judged: bool) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"trtx.bench.{row.topology}", name=row.name)
    if (seconds := row.value(benchmark_duration)) is not None:
        case.set("time", f"{seconds:.3f}")
    if row.level is not None:
        properties = ElementTree.SubElement(case, "properties")
        ElementTree.SubElement(properties, "property", name="validity", value=row.level.value)
    invalid = f"INVALID: {reasons_text(row)}" if row.level is ValidityLevel.INVALID else None
    if row.status == "errors" and not is_judged:
        _found(case, "failure", "; ".join(text for text in (row.problem, invalid) if text))
    elif row.status not in _HAS_FIGURES or invalid:
        problem = row.problem if row.status not in _HAS_FIGURES else None
        _found(case, "error", "; ".join(text for text in (problem, invalid) if text) or row.status)
    _output(case, [f"{reason.level.value}: {reason_text(reason)}" for reason in reasons(row)] + _unchecked(row))


def _judgement_case(
    suite: ElementTree.Element, judgement: CheckResult, *, room: str = "bench", is_error: bool = False
) -> None:
    """Adds one judgement. ``is_error``: its cell has no result, so the judgement counts as an error."""
    case = ElementTree.SubElement(
        suite, "testcase", classname=f"trtx.{room}.{judgement.cell}", name=judgement.criterion, time="0.000"
    )
    if judgement.verdict is not Verdict.PASS:
        kind = "error" if is_error or judgement.verdict is Verdict.NO_VERDICT else "failure"
        _found(case, kind, judgement.reason, type=judgement.verdict.value)
    _output(case, [f"SUSPECT: {'; '.join(judgement.doubts)}"] if judgement.doubts else [])


def _found(case: ElementTree.Element, kind: str, message: str, **attributes: str) -> None:
    ElementTree.SubElement(case, kind, {**attributes, "message": _xml_safe(message)})


def _output(case: ElementTree.Element, lines: list[str]) -> None:
    if lines:
        ElementTree.SubElement(case, "system-out").text = _xml_safe("\n".join(lines))


def _unchecked(row: Row) -> list[str]:
    return [str(one) for one in (row.validity.unchecked if row.validity else ())]


def _xml_safe(text: str) -> str:
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
