from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtx.errors import UsageError
from trtx.experiment import load_sweep, plan_only
from trtx.experiment.bench.spec import Attach

pytestmark = pytest.mark.slow

SWEEPS = sorted((Path(__file__).parents[3] / "sweeps").glob("*.yaml"))


def test_the_demo_measures_both_modes_at_three_loads() -> None:
    spec = load_sweep(next(path for path in SWEEPS if path.name == "demo.yaml"), {})
    assert (spec.modes, spec.load.concurrency) == (("agg", "disagg"), (1, 8, 64))


def test_what_was_typed_wins_over_the_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("modes: [agg, disagg]\nload: {concurrency: [1, 8], isl: 100, osl: 50}\ntopology: {decode: 2}\n")
    spec = load_sweep(file, {"load": {"isl": 300}, "topology": {"engine": "paced"}})
    assert (spec.load.isl, spec.load.osl, spec.load.concurrency) == ((300,), (50,), (1, 8))
    assert (spec.topology.engine, spec.topology.decode) == ("paced", 2)
    assert [one.spec.mode for one in spec.topologies] == ["agg", "disagg"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("load: {concurency: [1]}", ["load.concurency", "did you mean concurrency?"]),
        ("load: {isl: -5}", ["load.isl.0 is -5"]),
        ("load: {concurrency: [8, 8]}", ["concurrency 8,8", "once"]),
        ("modes: [agg, split]", ["modes.1", "split"]),
        ("modes: [agg, agg]", ["modes agg,agg", "once"]),
        ("modes: [agg, disagg]\ntopology: {port: 8001}", ["port 8001", "agg and disagg"]),
        ("attach: {url: localhost}", ["'localhost'", "http://"]),
        ("- agg", ["list", "modes"]),
        ("modes: agg", ['"agg"', "expected a list"]),
        ("topology: 3", ["topology is 3", "expected a map"]),
        ("load: [", ["not YAML", "line 1"]),
        ("load: {isl: 1}\nload: {isl: 2}", ["line 2", "'load' occurs twice", "first in line 1"]),
        ("topology: {model: ''}", ["model ''", "is empty"]),
        ("topology: {model: ~no-such-user/x}", ["model '~no-such-user/x'", "no such user"]),
        ("topology: {engine_configs: {agg: ''}}", ["engine_configs", "is empty"]),
        ("attach: {url: 'http://[::1'}", ["'http://[::1'", "is not an address"]),
        ("attach: {tokenizer: x}", ["attach.url is missing"]),
        ("attach: {url: 'http://127.0.0.1:9/v1?key=1'}", ["'http://127.0.0.1:9/v1'", "query"]),
        ("load: {extra_inputs: {stream: false}}", ["extra_inputs.stream", "load.streaming"]),
        ("attach: {url: 'http://127.0.0.1:9'}\ntopology: {engine: paced}", ["attach", "topology", "leave one"]),
        ("attach: {url: 'http://127.0.0.1:9'}\nmodes: [agg]", ["attach", "modes", "leave one"]),
        ("topology: {mode: disagg}", ["topology.mode", "modes"]),
        ("modes: [agg]\ntopology: {prefill: 2}", ["topology.prefill", "mode disagg"]),
        ("topology: {decode: 2}", ["topology.decode", "mode disagg", "agg"]),
        (
            "topology: {engine_configs: {encode: e.yaml}}",
            ["engine_configs.encode", "encode workers", "set topology.encode to 1"],
        ),
        ("topology: {overrides: [encode.a=1]}", ["'encode.a=1'", "encode workers", "set topology.encode to 1"]),
        ("modes: [disagg]\ntopology: {workers: 2}", ["topology.workers", "mode agg"]),
        ("topology: {overrides: [prefill.a=1]}", ["'prefill.a=1'", "mode disagg"]),
        ("topology: {engine_configs: {decode: d.yaml}}", ["engine_configs.decode", "mode disagg"]),
        ("topology: {workers: 100000}", ["topology.workers is 100000", "256"]),
        ("topology: {host: ..}", ["host '..'", "not an address"]),
    ],
)
def test_a_mistake_in_a_sweep_is_named_with_its_value(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_sweep(file, {})
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("price", "says"), [(float("nan"), "NaN"), (float("inf"), "Infinity"), (-0.5, "-0.5")])
def test_a_price_that_is_no_price_is_one_sentence(price: float, says: str) -> None:
    with pytest.raises(UsageError, match=rf"^gpu_hour_price is {says}; expected [^;]+$"):
        load_sweep(None, {"gpu_hour_price": price})  # as the option gives it


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('topology: {deterministic: "yes"}', 'topology.deterministic is "yes"; expected a valid boolean'),
        ("topology: {deterministic: 1}", "topology.deterministic is 1; expected a valid boolean"),
        ("topology: {encode_shared: true}", "topology.encode_shared is true; expected a whole number"),
        ("topology: {encode_shared: 1.0}", "topology.encode_shared is 1.0; expected a whole number"),
        ("topology: {workers: true}", "topology.workers is true; expected a whole number"),
        ('topology: {tp: "2"}', 'topology.tp is "2"; expected a whole number'),
        ("topology: {gpus: [true]}", "topology.gpus.0 is true; expected a whole number"),
        ("topology: {media: {max_images: true}}", "topology.media.max_images is true; expected a whole number"),
        ('topology: {media: {max_video_s: "4"}}', 'topology.media.max_video_s is "4"; expected a number'),
        ("arms: {a: {workers: true}}", "arms.a.workers is true; expected a whole number"),
        ("axes: {workers: [1, true]}", "axes.workers has 'True': Input should be a valid integer"),
        ('axes: {deterministic: ["yes"]}', "axes.deterministic has 'yes': Input should be a valid boolean"),
        ("max_cells: true", "max_cells is true; expected a whole number"),
        ('gpu_hour_price: "2"', 'gpu_hour_price is "2"; expected a number'),
        ("gpu_hour_price: -0.01", "gpu_hour_price is -0.01; expected greater than or equal to 0"),
        ("gpu_hour_price: .inf", ".inf is not a finite number; give one, or put it in quotes"),
        ('load: {streaming: "yes"}', 'load.streaming is "yes"; expected a valid boolean'),
        ('load: {trials: "3"}', 'load.trials is "3"; expected a whole number'),
        ("load: {isl: 128.0}", "load.isl.0 is 128.0; expected a whole number"),
        ('gate: {min_goodput: "2"}', 'gate.min_goodput is "2"; expected a number'),
        ('load: {extra_inputs: {a: "\\ud800"}}', "half a Unicode character"),
    ],
)
def test_a_value_of_another_type_is_not_taken_for_one_of_the_fields(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_sweep(file, {})
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("gate", "names"),
    [
        ('{slo: ["time_to_first_token:p50:le:500"], min_goodput: 1}', "time_to_first_token:p50"),
        ('{slo: ["request_latency:p50:le:9", "inter_token_latency:avg:le:9"]}', "inter_token_latency:avg"),
        ("{baseline: main, max_regression: 5%}", "time_to_first_token:p50, inter_token_latency:p50"),
        (
            "{baseline: main, max_regression: 5%, metrics: output_token_throughput_per_user}",
            "output_token_throughput_per_user:p50",
        ),
    ],
)
def test_what_takes_a_stream_is_not_judged_where_none_is_asked(tmp_path: Path, gate: str, names: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"load: {{streaming: false}}\ngate: {gate}\n")
    with pytest.raises(UsageError) as refused:
        load_sweep(file, {})
    assert f"gate judges {names}, which only streamed answers have, but load.streaming is false" in str(refused.value)
    file.write_text(f"gate: {gate}\n")
    load_sweep(file, {})


def test_a_whole_number_is_a_number_too(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("topology: {gpus: [0, 1], media: {max_video_s: 4}}\nload: {request_rate: [2], isl_stddev: 3}\n")
    spec = load_sweep(file, {})
    assert (spec.topology.media.max_video_s, spec.load.request_rate, spec.load.isl_stddev) == (4.0, (2.0,), 3.0)
    assert spec.topology.gpus == (0, 1)


def test_a_sweep_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        load_sweep(tmp_path / "none.yaml", {})


def test_an_identical_spec_gives_an_identical_document() -> None:
    assert load_sweep(None, {}).to_json() == load_sweep(None, {}).to_json()
    assert load_sweep(None, {}).to_json() != load_sweep(None, {"load": {"seed": 8}}).to_json()


def test_a_file_for_both_modes_may_be_narrowed_by_what_was_typed(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("modes: [agg, disagg]\ntopology: {prefill: 2, workers: 3}\n")
    assert load_sweep(file, {"modes": ["agg"]}).modes == ("agg",)


def test_overrides_of_the_file_and_typed_ones_both_hold(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("topology: {overrides: [a=1], router_args: [--x, '1']}\n")
    topology = load_sweep(file, {"topology": {"overrides": ["b=2"], "router_args": ["--y"]}}).topology
    assert topology.overrides == ("a=1", "b=2")
    assert topology.router_args == ("--x", "1", "--y")


def test_an_attached_sweep_may_be_given_its_tokenizer_by_flags(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("attach: {url: 'http://127.0.0.1:9', model: m}\n")
    attach = load_sweep(file, {"attach": {"tokenizer": "t"}}).attach
    assert attach is not None and (attach.url, attach.model, attach.tokenizer) == ("http://127.0.0.1:9", "m", "t")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"]
)
def test_an_address_is_the_same_with_the_v1_that_clients_take_it_with(url: str) -> None:
    assert Attach(url=url).url == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "url", ["http://u:s3cret@h", "ftp://u:s3cret@h/x", "u:s3cret@h:80", "http://u:s3cret@[::1", "//u:s3cret@h"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="user name or password") as refused:
        load_sweep(None, {"attach": {"url": url}})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "sweep",
    [  # a sweep that scores has lm-eval's process read its tasks, as gate-ci.md's of test_documented_commands.py does
        pytest.param(path, id=path.stem, marks=[pytest.mark.proof] if "eval" in path.stem else []) for path in SWEEPS
    ],
)
def test_every_shipped_sweep_can_be_planned(sweep: Path, tmp_path: Path) -> None:
    # The paced engine has nothing to load, but takes no images, follows no grammar and computes no prompts.
    computes = any(word in sweep.read_text() for word in ("image_batch_size", "conditional_disagg:"))
    engine = "torch" if computes or sweep.stem == "agents" else "paced"
    arms = "arms:" in sweep.read_text()  # complete topologies, whose engine no option replaces
    spec = load_sweep(sweep, {} if arms else {"topology": {"engine": engine}})
    assert spec.name == sweep.stem
    if sweep.stem == "equal-gpus-moe":  # its weights need the memory of GPUs
        return
    planned = plan_only(spec, parent=tmp_path).topologies
    assert [one.label for one in planned] == list(spec.labels)
    assert sum(len(one.aiperf) for one in planned) == spec.cell_count * spec.load.trials


def test_axes_make_topologies_under_labels_of_what_they_differ_by() -> None:
    axes = {"prefill": [1, 2], "workers": [2, 4], "router_mode": ["kv"], "overrides.max_batch_size": [8, 16]}
    spec = load_sweep(None, {"modes": ["agg", "disagg"], "axes": axes, "topology": {"engine": "paced", "decode": 3}})
    assert spec.labels == tuple(
        f"{counts}-kv-max_batch_size_{size}" for counts in ("agg-2w", "agg-4w", "disagg-1p3d", "disagg-2p3d")
        for size in (8, 16)
    )  # fmt: skip
    last = spec.topologies[-1].spec
    assert (last.prefill, last.decode, last.router_mode, last.overrides) == (2, 3, "kv", ("max_batch_size=16",))


def test_encode_workers_are_an_axis_of_both_modes_and_none_of_them_stand_in_no_label() -> None:
    spec = load_sweep(None, {"modes": ["agg", "disagg"], "axes": {"encode": [0, 1]}, "topology": {"decode": 3}})
    assert spec.labels == ("agg-1w", "agg-1e1w", "disagg-1p3d", "disagg-1e1p3d")
    assert [one.spec.encode for one in spec.topologies] == [0, 1, 0, 1]
    assert load_sweep(None, {"modes": ["disagg"], "topology": {"encode": 2}}).labels == ("disagg",)
    shared = load_sweep(None, {"modes": ["agg"], "axes": {"encode": [0, 1], "encode_shared": [0, 1]}})
    assert shared.labels == ("agg-1w", "agg-1s1w", "agg-1e1w", "agg-1e1s1w")
    assert [one.spec.encoders for one in shared.topologies] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ({"axes": {"prefil": [1]}}, "axes.prefil is not an axis: expected one of workers"),
        ({"axes": {"mode": ["agg"]}}, "axes.mode is not an axis: the modes are listed in modes"),
        ({"axes": {"prefill": [1, 2]}}, "axes.prefill belongs to mode disagg, and modes are agg"),
        ({"axes": {"workers": [0]}}, "axes.workers has '0'"),
        ({"axes": {"workers": []}}, "axes.workers"),
        ({"axes": {"workers": [1, 1]}}, "axes.workers lists a value twice"),
        ({"axes": {"recipe": ["no-such"]}}, "axes.recipe: "),
        ({"axes": {"workers": [1, 2]}, "topology": {"port": 8000}}, "port 8000 can't serve agg-1w and agg-2w"),
        ({"axes": {"workers": [1, 2]}, "max_cells": 5}, "2 topologies at 3 loads make 6 cells, and max_cells is 5"),
        ({"axes": {"workers": [1]}, "attach": {"url": "http://127.0.0.1:9"}}, "axes configure what trtx serves"),
        ({"load": {"request_rate": [1], "concurrency": [1]}}, "both set when requests are sent"),
        ({"load": {"concurrency": []}}, "concurrency is an empty list"),
        ({"load": {"burstiness": 0.5}}, "burstiness has no effect without a request_rate"),
        ({"load": {"request_rate": [1], "burstiness": 0.5, "arrival": "constant"}}, "both set the spacing of requests"),
        ({"load": {"isl": [1, 2, 3], "osl": [1, 2]}}, "isl has 3 lengths and osl 2"),
        ({"load": {"isl": [8, 8]}}, "a pair of lengths twice"),
    ],
)
def test_axes_and_loads_that_make_no_sweep_are_one_sentence(sweep: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_sweep(None, sweep)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_arms_are_topologies_under_their_own_labels() -> None:
    spec = load_sweep(None, {"arms": {"one": {"engine": "paced"}, "two": {"engine": "paced", "workers": 2}}})
    assert [(one.label, one.spec.workers, one.spec.port) for one in spec.topologies] == [("one", 1, 0), ("two", 2, 0)]
    with pytest.raises(UsageError, match="arms are complete topologies, so modes would have no effect"):
        load_sweep(None, {"arms": {"one": {}}, "modes": ["agg"]})
    with pytest.raises(UsageError, match="arms"):
        load_sweep(None, {"arms": {"../one": {}}})


def test_axes_of_more_topologies_than_anybody_serves_are_refused_before_they_are_made() -> None:
    axes = {f"overrides.field_{number}": list(range(10)) for number in range(12)}
    with pytest.raises(UsageError, match="axes make 1000000000000 topologies of mode agg; expected at most 1000"):
        load_sweep(None, {"axes": axes})
