"""docs/provenance.md names every field of a lock's provenance."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trtx.experiment import ExperimentSpec
from trtx.report.forms import Container, Environment, Files, Gpu, Measured, Provenance

DOCUMENT = Path(__file__).parents[3] / "docs" / "provenance.md"


@pytest.mark.parametrize(
    "form", [Provenance, Environment, Gpu, Container, Measured, Files], ids=lambda one: one.__name__
)
def test_every_field_of_the_lock_stands_in_the_document(form: Any) -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("## `trtx bench reproduce")[0]
    lacking = [
        one.name for one in fields(form) if f"`{one.name}`" not in table and f"provenance.{one.name}`" not in table
    ]
    assert not lacking, f"docs/provenance.md, What stands in it, lacks {lacking} of {form.__name__}"


def test_every_part_of_what_was_asked_stands_in_the_document() -> None:
    (row,) = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| asked |")]
    assert not [name for name in ExperimentSpec.model_fields if f"`{name}`" not in row]
