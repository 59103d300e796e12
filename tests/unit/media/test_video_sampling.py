"""Which frames are taken, at which size, and when they are, against the functions of transformers' video processors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata
from video_files import QWEN_2, QWEN_3, timestamps

from trtx.errors import UsageError
from trtx.media.decoder.sampling import VideoOptions, clip_of, frame_indices, frame_size, frames_by_time, read_options

EACH = VideoOptions(False, 14, 2, 2, min_pixels=56 * 56, max_pixels=28 * 28 * 768)
ALL = VideoOptions(True, 16, 2, 2, min_pixels=64 * 64, max_pixels=32 * 32 * 768)
RATES = st.sampled_from([1.0, 10.0, 23.976, 25.0, 29.97, 60.0])
MOST = st.sampled_from([4, 8, 32, 768])


def settings_of(most: int) -> Any:
    return SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=4, max_frames=most)


@settings(max_examples=examples(300), deadline=None)
@given(count=st.integers(2, 3000), fps=RATES, most=MOST)
def test_frames_are_those_that_transformers_takes(count: int, fps: float, most: int) -> None:
    metadata = VideoMetadata(total_num_frames=count, fps=fps)
    taken = QWEN_2.sample_frames(settings_of(most), metadata).tolist()
    # In float32, its last step may be one past the end: a frame that is not there.
    assert frame_indices(EACH, count, fps, most) == [index for index in taken if index < count]
    assert frame_indices(ALL, count, fps, most) == QWEN_3.sample_frames(settings_of(most), metadata).tolist()


def test_a_video_of_one_frame_is_that_frame() -> None:
    assert frame_indices(EACH, 1, 10.0, 32) == frame_indices(ALL, 1, 10.0, 32) == [0]
    assert clip_of(EACH, [0], 1, 10.0).at_s == (0.0,)


@settings(max_examples=examples(300), deadline=None)
@given(count=st.integers(2, 3000), fps=RATES, most=MOST)
def test_times_are_those_that_transformers_tells(count: int, fps: float, most: int) -> None:
    for options in (EACH, ALL):
        indices = frame_indices(options, count, fps, most)
        clip = clip_of(options, indices, count, fps)
        metadata = VideoMetadata(total_num_frames=count, fps=fps, frames_indices=indices)
        assert clip.step_s == 2 / metadata.sampled_fps
        assert list(clip.at_s) == timestamps(indices, fps)
        assert indices == sorted(set(indices)) and indices[-1] < count, "what was asked for is as it was"


def test_of_a_varying_rate_the_frame_on_show_is_taken() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 10.0]
    indices, clip = frames_by_time(EACH, times, 12.0, 4)
    assert indices == [0, 4, 4, 4], "at 0, 3, 6 and 9 s"
    assert (clip.step_s, clip.at_s) == (6.0, (1.5, 7.5))
    indices, clip = frames_by_time(ALL, times, 12.0, 5)
    assert indices == [0, 4, 4, 4, 5], "at 0, 2.5, 5, 7.5 and 10 s, the last one's"
    assert clip.at_s == (1.25, 6.25, 10.0)


@given(count=st.integers(2, 500), fps=RATES, most=MOST)
def test_a_steady_rate_is_sampled_by_time_as_by_count(count: int, fps: float, most: int) -> None:
    times = [index / fps for index in range(count)]
    found, clip = frames_by_time(EACH, times, count / fps, most)
    indices = frame_indices(EACH, count, fps, most)
    assert found == indices
    assert clip.step_s == pytest.approx(clip_of(EACH, indices, count, fps).step_s)


@settings(max_examples=examples(400), deadline=None)
@given(height=st.integers(1, 4000), width=st.integers(1, 4000), frames=st.integers(2, 64))
def test_sizes_are_those_of_transformers(height: int, width: int, frames: int) -> None:
    def found(size: Any) -> Any:
        try:
            return size()
        except ValueError:
            return None

    assert found(lambda: frame_size(EACH, frames, height, width)) == found(
        lambda: QWEN_2.smart_resize(height, width, 28, EACH.min_pixels, EACH.max_pixels)
    )
    assert found(lambda: frame_size(ALL, frames, height, width)) == found(
        lambda: QWEN_3.smart_resize(frames, height, width, 2, 32, ALL.min_pixels, ALL.max_pixels)
    )


def test_capped_frames_share_their_pixels() -> None:
    """``cap_pixels_per_frame``, by transformers' formulas with numbers put in."""
    capped = replace(EACH, max_tokens_to_cap=1000)
    most = max(min(EACH.max_pixels, int(1000 * 28 * 28 * 0.9) * 2 // 20), int(EACH.min_pixels * 1.05))
    assert frame_size(capped, 20, 900, 700) == QWEN_2.smart_resize(900, 700, 28, EACH.min_pixels, most)
    capped = replace(ALL, max_tokens_to_cap=30)
    most = 20 * max(min(30 * 32 * 32, ALL.max_pixels // 20), int(ALL.min_pixels * 1.05))
    assert frame_size(capped, 20, 900, 700) == QWEN_3.smart_resize(20, 900, 700, 2, 32, ALL.min_pixels, most)


PROCESSOR = SimpleNamespace(
    patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=[0.5], rescale_factor=1 / 255
)


def written(directory: Path, **documents: Any) -> Path:
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def test_options_are_looked_for_where_transformers_looks_for_them(tmp_path: Path) -> None:
    written(tmp_path, preprocessor_config={"min_pixels": 10, "max_pixels": 20})
    assert read_options(tmp_path, PROCESSOR, "each").min_pixels == 10
    assert read_options(tmp_path, PROCESSOR, "all").min_pixels == 128 * 32 * 32, "a name that its class does not know"
    written(tmp_path, video_preprocessor_config={"size": {"shortest_edge": 30, "longest_edge": 40}, "fps": 3})
    found = read_options(tmp_path, PROCESSOR, "all")
    assert (found.min_pixels, found.max_pixels, found.fps, found.factor) == (30, 40, 3.0, 28)
    written(tmp_path, processor_config={"video_processor": {"max_frames": 6}})
    assert read_options(tmp_path, PROCESSOR, "each").max_frames == 6


def test_limits_that_are_not_stated_are_those_of_the_class(tmp_path: Path) -> None:
    for rule, theirs in (("each", QWEN_2), ("all", QWEN_3)):
        found = read_options(tmp_path, PROCESSOR, rule)  # type: ignore[arg-type]
        assert theirs.size == {"shortest_edge": found.min_pixels, "longest_edge": found.max_pixels}


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"fps": -1}, "a limit that is not above 0"),
        ({"min_frames": "many"}, "can't be read"),
        ({"image_mean": [0.1]}, "image_mean in .* is .0.1., and the image processor's is .0.5.: both must"),
        ([], "holds no JSON object"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, stated: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_options(written(tmp_path, video_preprocessor_config=stated), PROCESSOR, "each")
