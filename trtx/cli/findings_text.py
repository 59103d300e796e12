"""Formats findings: a line with the field, followed by the problem, the reason, the evidence and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trtx.cli.sentences import fill
from trtx.config import Finding

_WIDTH = 80
_SEVERITY, _ROLES = 9, 16


def describe_findings(findings: Iterable[Finding]) -> Iterator[str]:
    """Yields the lines of a table of 80 columns; only paths and options longer than a line exceed it."""
    yield f"{'Severity':<{_SEVERITY}}{'Roles':<{_ROLES}}Field and rule"
    for finding in findings:
        yield (
            f"{finding.severity:<{_SEVERITY}}{'+'.join(finding.roles):<{_ROLES}}"
            f"{finding.path or 'the whole config'} [{finding.rule}]"
        )
        yield from _beneath("", finding.message)
        yield from _beneath("why: ", finding.reason)
        yield from _beneath("evidence: ", finding.evidence)
        if finding.fix:
            yield from _beneath("fix: ", finding.fix)


def _beneath(label: str, text: str) -> list[str]:
    return fill(f"  {label}{text}", _WIDTH, indent="    ")
