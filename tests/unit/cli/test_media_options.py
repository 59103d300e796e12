"""Options of media in verbs that serve a topology of a sweep: laid over what its file says, and checked with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.cli.topology_options import topology_fields
from trtx.errors import UsageError
from trtx.experiment import load_sweep


def swept(tmp_path: Path, **typed: Any) -> Any:
    file = tmp_path / "sweep.yaml"
    file.write_text("topology: {media: {max_media_bytes: 1000, media_memory_bytes: 5000, max_images: 3}}\n")
    return load_sweep(file, {"topology": topology_fields(typed, ["agg"])}).topology.media


def test_what_is_typed_wins_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    media = swept(tmp_path, max_videos=7, allow_http_media=True)
    assert (media.max_videos, media.allow_http_media, media.max_images, media.max_media_bytes) == (7, True, 3, 1000)


def test_limits_that_depend_on_each_other_are_looked_at_together(tmp_path: Path) -> None:
    assert swept(tmp_path, media_memory_bytes=2000).media_memory_bytes == 2000, "above the file's own max_media_bytes"
    with pytest.raises(UsageError, match="media_memory_bytes is 999, expected at least 1000"):
        swept(tmp_path, media_memory_bytes=999)
    with pytest.raises(UsageError, match="^--media-memory-bytes is 10, expected at least 20"):
        topology_fields({"media_memory_bytes": 10, "max_media_bytes": 20}, ["agg"])


def test_a_value_that_is_none_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^--max-videos -1: expected"):
        swept(tmp_path, max_videos=-1)
