"""Judges facts. The functions are pure: the same facts give the same check results on any machine.

Each file has the rows about one kind of facts, with the least versions and sizes that they need: the driver's are in
``gpus.py``. ``requirements.py`` has no row; it finds requirements of Python packages that ``software.py`` reports.
"""

from __future__ import annotations

from trtx.doctor.check import Check
from trtx.doctor.facts import Facts
from trtx.doctor.judge.gpus import judge_gpus
from trtx.doctor.judge.hosts import judge_hosts
from trtx.doctor.judge.software import judge_software
from trtx.doctor.judge.system import judge_system
from trtx.doctor.judge.topologies import judge_environment, judge_topologies

__all__ = ["judge"]


def judge(facts: Facts) -> tuple[Check, ...]:
    """Returns the results of all checks, in the order in which a person would look."""
    return (
        *judge_software(facts),
        *judge_gpus(facts),
        *judge_system(facts),
        *judge_environment(facts),
        *judge_topologies(facts),
        *(judge_hosts(facts.hosts) if facts.hosts is not None else ()),
    )
