"""One thing to say about an engine config, whoever found it: the schema, a rule, or the file's own header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtx.config.topology import Role
from trtx.errors import UsageError

Severity = Literal["error", "warning", "note"]
LIST_ITEM = "\n  - "  # before each of several findings
_LISTED_CHARACTERS = 800
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """``path`` is the field's, in the first of ``roles``. ``message`` has the values and where they are from, ``fix``
    the options that mend it (None: there is no single one), ``evidence`` where the rule comes from."""

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
    """Raises UsageError that names every error among ``findings``."""
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise UsageError(f"engine config of {errors[0]}")
    if errors:
        listed: list[str] = []
        for error in errors:
            if sum(map(len, listed)) + len(error) <= _LISTED_CHARACTERS or not listed:
                listed.append(error)
        more = len(errors) - len(listed)
        if more:
            listed.append(f"{more} more, which trtx build --check lists")
        raise UsageError(f"{len(errors)} findings in the engine configs:{''.join(LIST_ITEM + one for one in listed)}")
