"""docs/kubernetes.md has a reason for every field and variable that an export may have, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from exported_manifests import ASKED, fields, manifests, pods, variables

from trtx.export.kubernetes.variables import FLAGS_DROPPED
from trtx.export.plan_variables import VARIABLES

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[3] / "docs" / "kubernetes.md"


def section(title: str) -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def named(title: str) -> set[str]:
    """What the first cells of the section's rows name."""
    rows = re.findall(r"^\| (`[^|]+`) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_field_has_its_reason() -> None:
    written = {field for name in ASKED for manifest in manifests(name) for field in fields(manifest)}
    rows = named("Every field")
    general = {row for row in rows if row.startswith("*")}
    missing = {one for one in written - rows if f"*{one[one.index('.') :]}" not in general}
    assert not missing, f"give each a row under 'Every field' of {DOCUMENT.name}: {sorted(missing)}"
    unused = {row for row in rows - general if row not in written}
    assert not unused, f"no export of {Path(__file__).name} has these rows of {DOCUMENT.name}: {sorted(unused)}"


def test_every_variable_has_its_reason() -> None:
    of_jobs = {
        entry["name"]
        for name in ASKED
        for pod in pods(name)
        for container in pod["spec"]["containers"]
        for entry in container["env"]
    }
    written = {variable for name in ASKED for variable in variables(name)} | of_jobs
    in_pods = {name for name, row in VARIABLES.items() if row.pod not in (None, "dropped")}
    assert written >= in_pods, f"no export has {sorted(in_pods - written)}: correct pod= of their rows in VARIABLES"
    of_exports = named("Variables that an export adds")
    lacking = sorted(written - in_pods - of_exports)
    assert not lacking, f"give each a row under 'Variables that an export adds' of {DOCUMENT.name}: {lacking}"
    assert of_exports <= written, f"no export has these rows of {DOCUMENT.name}: {sorted(of_exports - written)}"
    told = section("Flags that pods do not have")
    assert FLAGS_DROPPED.keys() <= set(re.findall(r"`([^`]+)`", told)), "say of each why pods do not have it"
