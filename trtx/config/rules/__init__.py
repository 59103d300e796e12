"""Rules that a schema can't express: how the values of an engine config must fit each other and those of its peer.

Owns the rules: one record each, with its reason and its evidence. Reads no file and raises no error: a rule turns a
:class:`Subject` (or the two sides of a pair) into :class:`Breach` values. Enter through :func:`findings_of`.
Invariants: every rule has public evidence; every fix is a ``--set`` that resolves the finding; and a finding without a
fix has a path that its rule lists as unmendable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtx.config.findings import Finding
from trtx.config.rules.batching import BATCHING_RULES
from trtx.config.rules.features import FEATURE_RULES
from trtx.config.rules.memory import MEMORY_RULES
from trtx.config.rules.pairs import PAIR_RULES
from trtx.config.rules.parallel import PARALLEL_RULES
from trtx.config.rules.rule import Breach, ModelFacts, PairRule, RoleRule, Rule, Subject
from trtx.config.rules.transfer import TRANSFER_RULES
from trtx.config.topology import Role

__all__ = ["RULES", "ModelFacts", "PairRule", "RoleRule", "Rule", "Subject", "findings_of"]

RULES: tuple[Rule, ...] = (
    *PAIR_RULES, *TRANSFER_RULES, *BATCHING_RULES, *MEMORY_RULES, *PARALLEL_RULES, *FEATURE_RULES,
)  # fmt: skip


def findings_of(subjects: Mapping[Role, Subject], *, engine: str) -> Iterator[Finding]:
    """Yields every violation of every rule, pair rules first.

    A violation of a rule that only TensorRT-LLM needs becomes a note on another ``engine``.
    """
    for rule in RULES:
        for roles in rule.sides:
            if subjects.keys() >= {*roles} and rule.only_engine in (None, engine):
                for breach in rule.check(*(subjects[role] for role in roles)):
                    yield _finding(rule, roles, breach, engine)


def _finding(rule: Rule, roles: tuple[Role, ...], breach: Breach, engine: str) -> Finding:
    binding = rule.every_engine or engine == "tensorrt-llm"
    return Finding(
        severity=(breach.severity or rule.severity) if binding else "note",
        rule=rule.id,
        roles=roles,
        path=breach.path,
        message=breach.message,
        reason=rule.reason,
        evidence=rule.evidence,
        fix=breach.fix,
    )
