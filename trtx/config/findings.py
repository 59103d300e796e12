"""Findings about engine configs, as the schema, the rules and the check of the file's header report them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtx.config.topology import Role
from trtx.config.wording import shown, with_list
from trtx.errors import UsageError

Severity = Literal["error", "warning", "note"]
_LISTED_CHARACTERS = 850  # the budget for the list; a whole message stays below 1,000 characters
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about an engine config.

    ``path``: the field, in the config of the first of ``roles``. ``message``: the values and their sources. ``fix``:
    the options that resolve the finding; None if no single fix exists. ``evidence``: the public source of the rule.
    """

    severity: Severity
    rule: str
    roles: tuple[Role, ...]
    path: str
    message: str
    reason: str
    evidence: str
    fix: str | None = None

    def __str__(self) -> str:
        fix = f"; fix: {self.fix}" if self.fix else ""
        because = f"; {self.reason} ({self.evidence})" if self.reason else ""
        return f"{'+'.join(self.roles)}: {self.message} [{self.rule}]{because}{fix}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"roles": list(self.roles)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        return cls(**{**document, "roles": tuple(document["roles"])})


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raises UsageError if ``findings`` contains errors; the message covers all of them."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise UsageError(f"engine config of {errors[0]}")
    if errors:
        raise UsageError(with_list(f"{len(errors)} findings in the engine configs", _listed(errors)))


def _listed(errors: list[Finding]) -> list[str]:
    """Returns the errors as lines of at most ``_LISTED_CHARACTERS`` characters in total.

    Errors appear in full while there is room, then only with role, path and rule, and the rest as a count.
    """
    lines: list[str] = []
    left = _LISTED_CHARACTERS
    for number, error in enumerate(errors):
        short = shown(f"{'+'.join(error.roles)}: {error.path} [{error.rule}]; trtx build --check says why", 160)
        behind = len(errors) - number - 1
        line = next((text for text in (str(error), short) if len(text) <= left - behind * len(short)), short)
        if len(line) > left:
            return [*lines, f"{behind + 1} more, which trtx build --check lists"]
        lines.append(line)
        left -= len(line)
    return lines
