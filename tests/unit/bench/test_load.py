from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from trtx.bench import LoadSpec, Target, planned_trials
from trtx.bench.aiperf.command import command
from trtx.bench.judge.steadiness import warm_up_needed

TARGET = Target("http://127.0.0.1:8000", "tiny", Path("/models/tiny"), "agg")


def test_requests_are_four_rounds_and_enough_for_p90_beside_the_three_that_are_no_steady_part() -> None:
    counts = {load.concurrency: load.request_count for load in LoadSpec(concurrency=(1, 8, 64)).loads}
    assert counts == {1: 67, 8: 88, 64: 256}


def test_a_warm_up_is_long_enough_to_be_judged_unless_told_otherwise() -> None:
    for load in LoadSpec(concurrency=(1, 64)).loads:
        assert load.concurrency and load.warmup_request_count == warm_up_needed(load.concurrency)
    assert [load.warmup_request_count for load in LoadSpec(concurrency=(1, 64), warmup_request_count=0).loads] == [0, 0]


@pytest.mark.parametrize("concurrency", [(), (8, 8), (0,), (1, -2)])
def test_concurrencies_that_make_no_sweep_are_refused(concurrency: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        LoadSpec(concurrency=concurrency)


def test_requests_ask_for_exactly_the_output_length() -> None:
    for spec, body in (
        (LoadSpec(concurrency=(1,), osl=100), {"ignore_eos": True, "min_tokens": 100}),
        (LoadSpec(concurrency=(1,), osl=100, osl_stddev=9), {"ignore_eos": True}),  # max_tokens is each request's own
        (LoadSpec(concurrency=(1,), ignore_eos=False, extra_inputs={"temperature": 0}), {"temperature": 0}),
    ):
        assert spec.request_body(spec.loads[0]) == body


def test_each_load_has_a_warm_up_of_its_own() -> None:
    spec = LoadSpec(concurrency=(1, 8), request_count=20, warmup_request_count=5)
    calls = [command(TARGET, spec, load, 1, Path("/run")) for load in spec.loads]
    options = ("--concurrency", "--request-count", "--warmup-request-count", "--num-dataset-entries")
    # No prompt comes twice: what warms up must not fill the prefix cache for what is measured.
    assert [[argv[argv.index(option) + 1] for option in options] for argv in calls] == [
        ["1", "20", "5", "25"],
        ["8", "20", "5", "25"],
    ]


def test_no_warm_up_is_none() -> None:
    spec = LoadSpec(concurrency=(8,), warmup_request_count=0)
    assert "--warmup-request-count" not in command(TARGET, spec, spec.loads[0], 1, Path("/run"))


def test_trials_take_turns_over_the_loads() -> None:
    planned = planned_trials(LoadSpec(concurrency=(1, 8), trials=2))
    assert [(trial.load.label, trial.number) for trial in planned] == [("c1", 1), ("c8", 1), ("c1", 2), ("c8", 2)]


@pytest.mark.parametrize(
    ("field", "does"),
    [
        ("stream", "load.streaming"),
        ("max_tokens", "load.osl"),
        ("max_completion_tokens", "load.osl"),
        ("min_tokens", "load.ignore_eos"),
        ("ignore_eos", "load.ignore_eos"),
        ("messages", "load.isl"),
        ("model", "leave it out"),
        ("n", "leave it out"),
        ("best_of", "leave it out"),
        ("stream_options", "leave it out"),
    ],
)
def test_a_body_field_that_says_what_is_measured_is_no_extra_input(field: str, does: str) -> None:
    with pytest.raises(ValidationError, match=rf"extra_inputs\.{field} is set by trtx, because .*{does}"):
        LoadSpec(extra_inputs={"temperature": 0, field: False})


def test_every_field_that_we_send_is_refused_as_an_extra_one() -> None:
    for field in LoadSpec().request_body(LoadSpec().loads[0]):
        with pytest.raises(ValidationError, match=field):
            LoadSpec(extra_inputs={field: 1})


def test_rates_that_differ_in_a_late_digit_are_cells_of_their_own() -> None:
    loads = LoadSpec(request_rate=(100000.25, 100000.5)).loads
    assert [load.label for load in loads] == ["r100000.25", "r100000.5"]
    assert [load.asked for load in loads] == ["100000.25 requests/s", "100000.5 requests/s"]


def test_loads_are_counted_without_being_made() -> None:
    for spec in (LoadSpec(), LoadSpec(isl=(64, 128), osl=(8, 16), request_rate=(1.0, 2.0, 4.0))):
        assert spec.load_count == len(spec.loads)
    assert LoadSpec(isl=tuple(range(1, 50_001)), concurrency=tuple(range(1, 50_001))).load_count == 2_500_000_000


@pytest.mark.parametrize(
    ("kind", "saved"), [("png", {"compress_level": 6}), ("jpeg", {"quality": 85, "subsampling": 0})]
)
def test_files_of_noise_have_the_bytes_that_they_have_at_least(kind: str, saved: dict[str, int]) -> None:
    """As aiperf 0.13.0 saves them (``dataset/utils.py``)."""
    for width, height in ((64, 64), (300, 200)):
        load = LoadSpec.model_validate(
            {"image_batch_size": 1, "image_width_mean": width, "image_height_mean": height, "image_format": kind}
        )
        noise = np.random.default_rng(2).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), kind, **saved)
        assert load.least_image_bytes <= len(file.getvalue()) <= 1.15 * load.least_image_bytes
    assert LoadSpec.model_validate({"image_batch_size": 1, "image_source": "assets"}).least_image_bytes == 0
    assert LoadSpec().least_image_bytes == 0
