"""docs/multimodal.md lists each status of refused media, and each limit has a help text for its table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from trtx.config.option_field import field_records
from trtx.media import MediaLimits
from trtx.media.errors import Status

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "multimodal.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_every_limit_has_a_help_text_of_its_own() -> None:
    helps = [record.help for record in field_records(MediaLimits).values()]
    assert all(text.endswith(".") for text in helps) and len(set(helps)) == len(helps)


def test_every_status_stands_there_and_is_raised_somewhere() -> None:
    told = [int(status) for status in re.findall(r"^\| (\d{3}) \|", section("Statuses of refused media"), re.MULTILINE)]
    assert told == sorted(get_args(Status))
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trtx" / "media").rglob("*.py"))
    raised = {int(status) for status in re.findall(r"(?:MediaError|Refused)\(\s*(\d{3})", sources)}
    assert raised == set(told)
