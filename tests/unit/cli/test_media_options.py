"""Options of media in verbs that serve a topology of a sweep: laid over what its file says, and checked with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.cli.app import run as trtx
from trtx.cli.topology_options import topology_fields
from trtx.config.wording import shown
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
    with pytest.raises(UsageError, match="media_memory_bytes is 999, but one file may have 1000 bytes"):
        swept(tmp_path, media_memory_bytes=999)
    with pytest.raises(UsageError, match="^--media-memory-bytes is 10, but one file may have 20 bytes"):
        topology_fields({"media_memory_bytes": 10, "max_media_bytes": 20}, ["agg"])


def test_a_value_that_is_none_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^--max-videos -1: expected"):
        swept(tmp_path, max_videos=-1)


OF_VIDEOS = (["--max-videos", "3"], ["--max-video-frames", "4"], ["--max-video-s", "5"])
OF_IMAGES = (
    ["--max-images", "3"], ["--allow-http-media"], ["--decode-processes", "1"], ["--media-timeout-s", "3"],
    ["--max-media-bytes", "1000"],
)  # fmt: skip


@pytest.mark.parametrize("model", ["tiny", "tiny-vl", "tiny-qwen2.5-vl"])
@pytest.mark.parametrize("typed", [*OF_VIDEOS, *OF_IMAGES], ids=" ".join)
def test_a_limit_of_what_a_model_does_not_take_is_refused(
    model: str, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = model == "tiny-qwen2.5-vl" or (model == "tiny-vl" and typed in OF_IMAGES)
    assert trtx(
        ["serve", "--engine", "torch", "--model", f"synthetic:{model}", "--dry-run", "--port", "0", *typed]
    ) == 2 * (not taken)
    said = capsys.readouterr().err
    if not taken:
        takes = "a text model; leave it out" if model == "tiny" else "which takes images and no videos; leave it out"
        assert said.startswith(f"trtx: {typed[0]} has no effect with {model}, {takes}, or serve ")
        assert len(said) < 300 and said.count("\n") == 1


def test_no_videos_may_be_said_of_a_model_that_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    """As locks of runs say it that are older than videos."""
    for model in ("tiny", "tiny-vl"):
        said = [
            "serve",
            "--engine",
            "torch",
            "--model",
            f"synthetic:{model}",
            "--dry-run",
            "--port",
            "0",
            "--max-videos",
            "0",
        ]
        assert trtx(said) == 0, capsys.readouterr().err


IDLE = (
    ("--max-videos 0 --max-video-s 4", "--max-video-s", "--max-videos is 0"),
    ("--max-videos 0 --max-video-frames 32", "--max-video-frames", "--max-videos is 0"),
    ("--max-images 0 --max-videos 0 --encode 1", "--encode", "--max-images and --max-videos are 0"),
    ("--max-images 0 --max-videos 0 --encode-shared 1", "--encode-shared", "--max-images and --max-videos are 0"),
)


@pytest.mark.parametrize(("typed", "name", "where"), IDLE)
def test_what_no_picture_or_video_would_ever_meet_is_refused(
    typed: str, name: str, where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = ["--model", "synthetic:tiny-qwen2.5-vl", "--engine", "torch", "--dry-run", *typed.split()]
    assert trtx(["serve", *said]) == 2
    assert capsys.readouterr().err == f"trtx: {name} has no effect where {where}; leave it out, or allow some\n"
    for verb in (["bench"], ["eval", "--tasks", "trtx"]):  # which lay what is typed over a sweep's topology
        typed_there = said if verb == ["bench"] else [one for one in said if one != "--dry-run"]
        assert trtx([*verb, *typed_there, "-o", str(tmp_path)]) == 2
        assert f"trtx: {name} has no effect where {where}; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topology: {media: {max_videos: 0, max_video_s: 4}}", "topology.media.max_video_s has no effect where "),
        ("topology: {encode: 1, media: {max_images: 0, max_videos: 0}}", "topology.encode has no effect where "),
        ("topology: {media: {max_images: 0, max_videos: 0}}\naxes: {encode_shared: [0, 1]}", "topology.encode_shared "),
        ("arms: {a: {}, b: {encode: 2, media: {max_images: 0, max_videos: 0}}}", "topology.encode has no effect"),
    ],
)
def test_the_same_in_a_sweep_file_is_refused_in_its_words(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_sweep(file, {})
    assert says in str(raised.value) and str(raised.value).startswith(shown(file))


def test_an_encode_worker_for_videos_alone_is_none_that_idles(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("topology: {encode: 1, media: {max_images: 0, max_video_s: 4}}")
    assert load_sweep(file, {}).topology.encode == 1
