"""Every field of a sweep changes what is started, sent or computed, or is refused beside what excludes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from certificates import make
from cyclopts import CycloptsError
from judged_runs import GOLDEN, provenance
from loopback import Handler, serving
from other_values import another
from processes import free_port
from pydantic import BaseModel, ValidationError

from trtx.bench import LoadSpec, Target
from trtx.bench.aiperf.command import command
from trtx.bench.aiperf.flags import owned
from trtx.bench.images import Images
from trtx.config import TopologySpec
from trtx.config.media import MediaLimits
from trtx.config.option_field import DEFAULT, field_records, record_of, value_before
from trtx.config.strict_yaml import parse_yaml
from trtx.errors import UsageError
from trtx.experiment import Attach, ExperimentSpec, load_sweep, plan_only
from trtx.experiment.bench.axes import OWN_MODE
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.directory import PROVENANCE, create, read_lock, spec_of, write_lock
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.experiment.targets import attached_target, target_of
from trtx.launch import preparation
from trtx.runs.forms import LOCK
from trtx.topology import Gpu, Machine

pytestmark = pytest.mark.slow

RECORDS = Path(__file__).parent / "records"
SESSIONS = Path(__file__).parents[3] / "sweeps" / "agents" / "sessions"

# For each field, a value other than the default, unless its type tells one (other_values.py).
OTHER: dict[type, dict[str, Any]] = {
    LoadSpec: {
        "concurrency": [2],
        "request_rate": [2.5],
        "isl": 100,
        "osl": 100,
        "extra_inputs": {"temperature": 0},
        "aiperf_args": ["--slice-duration", "2"],
        "prompt_corpus": "coding",
        "input_file": f"{RECORDS}/texts.jsonl",
        "scenario": "inferencex-agentx-mvp",
        "custom_dataset_type": "random_pool",
        "public_dataset": "sharegpt",
        "image_format": "jpeg",
    },
    TopologySpec: {
        "model": "synthetic:tiny",
        "media": {"max_images": 3},
        "gpus": [0],
        "host": "0.0.0.0",
        "port": None,  # one that nobody has, drawn below
        "tls_cert": "own.pem",  # made below
        "tls_key": "own.key",
        "router_args": ["--router-temperature", "0.5"],
        "chat_template": "chat.jinja",  # made below
        "engine_configs": {"agg": "agg.yaml"},
        "overrides": ["max_batch_size=3"],
    },
    Attach: {  # None: a value of its own below
        "url": None,
        "model": "second",
        "tokenizer": None,
        "gpu_count": 4,
        "etcd": ["http://127.0.0.1:9"],
        "etcd_auth": "username=me,password_file=password",
    },
    ExperimentSpec: {
        "name": "other",
        "modes": ["disagg"],
        "topology": None,
        "load": None,
        "attach": None,
        "axes": {"workers": [2, 3]},
        "max_cells": 99,
        "arms": {"a": {}, "b": {"workers": 2}},
        "order": "abba",
        "gate": None,
        "eval": None,
    },
    ScoringSpec: {
        "tasks": ["others"],
        "limit": 9,
        "num_fewshot": 3,
        "task_dir": "tasks",
        "endpoint_type": "chat",
        "concurrency": 3,
        "request_timeout": 60.0,
        "needle_lengths": [512],
        "needle_depths": [50],
        "needle_samples": 3,
        "text": "mine.txt",
        "schemas": "mine.jsonl",
        "min_score": ["sums:acc:0.5"],
        "max_drop": 0.5,
    },
    GateSpec: {
        "slo": ["request_latency:p50:le:900"],
        "min_goodput": 2.0,
        "max_error_rate": "1%",
        "baseline": "other",
        "max_regression": "7%",
        "metrics": ["request_latency:p50"],
        "allow_different": ["machine.cpu"],
        "window": "steady",
        "baseline_dir": "elsewhere",
        "save_baseline": "next",
    },
}
for _model, _values in OTHER.items():
    _told = {name: another(name, field) for name, field in _model.model_fields.items() if name not in _values}
    _values |= {name: value for name, value in _told.items() if value is not None}

TASK_OF = {  # field of an evaluation -> the task that it shapes
    "needle_lengths": "needle", "needle_depths": "needle", "needle_samples": "needle", "text": "perplexity",
    "schemas": "schemas",
}  # fmt: skip
OF_A_RATE = ("request_rate", "arrival", "burstiness")  # fields of a load that a concurrency excludes
OF_OTHERS: dict[str, dict[str, Any]] = {  # field of a load → those without which it has no effect
    "custom_dataset_type": {"input_file": f"{RECORDS}/texts.jsonl"},
    "session_turns_stddev": {"session_turns_mean": 3},
    "session_turn_delay_mean": {"session_turns_mean": 3},
    "session_turn_delay_stddev": {"session_turns_mean": 3, "session_turn_delay_mean": 50.0},
    "num_prefix_prompts": {"prefix_prompt_length": 20},
    **{name: {"image_batch_size": 1} for name in field_records(Images) if name != "image_batch_size"},
    "fixed_schedule": {"input_file": f"{RECORDS}/trace.jsonl", "custom_dataset_type": "mooncake_trace"},
    "scenario": {"input_file": str(SESSIONS), "custom_dataset_type": "weka_trace"},
}
# Beside which no lengths are asked.
DATASETS = ("input_file", "custom_dataset_type", "public_dataset", "fixed_schedule", "scenario")
TLS = {"tls_cert": "tls_key", "tls_key": "tls_cert"}  # field of a topology → the one without which it has no effect
BESIDE = {
    "prefill": "disagg",
    "decode": "disagg",
    "conditional_disagg": "disagg",
}  # field of a topology → the mode that takes it
REFUSED = {  # field of a topology → why it can't be said of these sweeps at all
    "mode": "topology.mode is not a field of a sweep; use modes at the top level",
    "gpus": "--gpus 0: engine paced uses no GPU",
    "media": "--max-images has no effect with --engine paced, whose workers take no images",
    "encode": "--encode 2 has no effect with --engine paced, which computes nothing and sees no image",
    "conditional_disagg": "'isl_bounding' has no effect with --engine paced, which computes no prompts",
    "deterministic": "--deterministic has no effect with --engine paced, which computes nothing",
    "share_weights": "--share-weights 3 has no effect with --engine paced; use --engine torch, or leave it out",
    "encode_shared": "--encode-shared 2 has no effect with --engine paced, which computes nothing and sees no image",
}
_OWN = re.compile(r"trtx-[0-9a-f]{8}|\b[1-3]\d{4}\b")  # names and ports, drawn anew for each plan


def _asked(sweep: dict[str, Any], tmp_path: Path) -> str:
    """All that a dry run of a sweep file would start and send."""
    (tmp_path / "agg.yaml").write_text("max_batch_size: 5\n")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(sweep))
    spec = load_sweep(file, {})
    planned = plan_only(spec, parent=tmp_path).topologies
    documents = [(one.label, one.plan and one.plan.to_json(), one.aiperf) for one in planned]
    kept_port = str(spec.topology.port)
    return _OWN.sub(lambda found: found.group() if found.group() == kept_port else "own", json.dumps(documents))


@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_the_same_sweep_asks_for_the_same(mode: str, tmp_path: Path) -> None:
    sweep = {"modes": [mode], "topology": {"engine": "paced"}}
    assert _asked(sweep, tmp_path) == _asked(sweep, tmp_path), "what is drawn anew for each plan belongs into _OWN"


@pytest.mark.parametrize("model", OTHER, ids=lambda model: model.__name__)
def test_every_field_is_tried(model: Any) -> None:
    missing, gone = set(model.model_fields) - set(OTHER[model]), set(OTHER[model]) - set(model.model_fields)
    assert not missing, (
        f"{sorted(missing)} of {model.__name__} need a value other than the default, which their types don't tell: add "
        "it to TEXTS of tests/unit/other_values.py for an option of serve, else to OTHER of "
        "tests/unit/experiment/test_spec_fields.py"
    )
    assert not gone, f"take {sorted(gone)} out of OTHER of tests/unit/experiment/test_spec_fields.py"


PARTS = {LoadSpec: "load", TopologySpec: "topology", GateSpec: "gate", Attach: "attach", ScoringSpec: "eval"}


SECTIONS = {*PARTS.values(), "media"}
# Each field with a default -> its record, by the section of a sweep that has it; "" is the top level.
RECORDED = {
    (PARTS.get(model, ""), name): record_of(field)
    for model in OTHER
    for name, field in model.model_fields.items()
    if not field.is_required()
}
LATER = {key: record.since for key, record in RECORDED.items() if record is not None and record.since > LOCK.oldest}


def test_a_lock_from_before_fields_were_listed_is_read() -> None:
    fields = parse_yaml((RECORDS / "version-9.lock.yaml").read_text(), "version-9.lock.yaml")
    try:
        spec_of(fields, "version-9.lock.yaml")
    except UsageError as refused:
        pytest.fail(
            f"a lock that trtx wrote before the field came is refused ({refused}): say since=10 in the record of the "
            "field (an OptionField, LoadField, TopologyField or MediaField in its Annotated), and before= what older "
            "runs had where that is not the default; the version of LOCK does not rise"
        )


class Older:
    """A specification as a trtx without one field would write it."""

    def __init__(self, spec: ExperimentSpec, part: str, field: str) -> None:
        self.name, self.document = spec.name, spec.to_json()
        del (self.document[part] if part else self.document)[field]

    def to_json(self) -> dict[str, Any]:
        return self.document


@pytest.mark.parametrize(
    ("part", "field"), [key for key in RECORDED if key[0] != "eval" and key[1] not in SECTIONS], ids=".".join
)
def test_a_lock_without_a_later_field_is_read_and_one_that_lost_it_is_refused(
    part: str, field: str, tmp_path: Path
) -> None:
    attached = {"attach": {"url": "http://127.0.0.1:9"}}
    spec = load_sweep(None, attached if part == "attach" else {"topology": {"port": 8000}})
    write_lock(tmp_path, Older(spec, part, field), provenance(GOLDEN))
    record = RECORDED[part, field]
    if record is None or record.before is DEFAULT:
        assert read_lock(tmp_path) == spec
    else:
        found = getattr(read_lock(tmp_path), part) if part else read_lock(tmp_path)
        assert _plain(getattr(found, field)) == record.before
    (tmp_path / "whole").mkdir()
    write_lock(tmp_path / "whole", spec, provenance(GOLDEN))
    lock = tmp_path / LOCK.file
    written = parse_yaml(lock.read_text(), lock.name)
    written[PROVENANCE]["fields_sha256"] = provenance(tmp_path / "whole").fields_sha256
    lock.write_text(json.dumps(written))  # which is YAML too
    with pytest.raises(UsageError, match=f"{field} is missing"):
        read_lock(tmp_path)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def test_a_field_of_a_load_without_a_record_is_told_what_it_needs() -> None:
    class Other(LoadSpec):
        new: int = 1

    with pytest.raises(LookupError, match=r"Other\.new has no record: put an OptionField of trtx/config/option_field"):
        field_records(Other)


@pytest.mark.parametrize("key", LATER, ids=".".join)
def test_a_lock_from_before_a_field_is_read_as_what_its_run_did(key: tuple[str, str], tmp_path: Path) -> None:
    part, name = key
    asked = {"attach": {"url": "http://127.0.0.1:9"}} if part == "attach" else {}
    write_lock(tmp_path, load_sweep(None, asked), provenance(GOLDEN))
    lock = tmp_path / LOCK.file
    written = parse_yaml(lock.read_text(), lock.name) | {"schema_version": min(LATER[key], 10) - 1}
    for (section, field), since in LATER.items():
        if since >= LATER[key] and (found := written[section] if section else written) is not None:
            del found[field]
    lock.write_text(json.dumps(written))  # which is YAML too
    read = read_lock(tmp_path)
    model = {section: model for model, section in PARTS.items()}.get(part, ExperimentSpec)
    found = _plain(getattr(getattr(read, part) if part else read, name))
    before = value_before(model.model_fields[name])
    assert found == (before | VIDEOS_BEFORE if name == "media" else before)


VIDEOS_BEFORE = {
    name: record.before for name, record in field_records(MediaLimits).items() if record.before is not DEFAULT
}


def test_the_arms_of_a_lock_from_before_encode_workers_had_none(tmp_path: Path) -> None:
    write_lock(tmp_path, load_sweep(None, {"arms": {"a": {}, "b": {"workers": 2}}}), provenance(GOLDEN))
    lock = tmp_path / LOCK.file
    written = parse_yaml(lock.read_text(), lock.name) | {"schema_version": 4}
    for topology in (written["topology"], *written["arms"].values()):
        del topology["encode"], topology["media"]
    lock.write_text(json.dumps(written))  # which is YAML too
    assert [one.spec.encode for one in read_lock(tmp_path).topologies] == [0, 0]


@pytest.mark.parametrize("version", [4, 6, 7])
def test_workers_of_a_lock_from_before_videos_took_none(tmp_path: Path, version: int) -> None:
    write_lock(tmp_path, load_sweep(None, {"arms": {"a": {}, "b": {"media": {"max_images": 3}}}}), provenance(GOLDEN))
    lock = tmp_path / LOCK.file
    written = parse_yaml(lock.read_text(), lock.name) | {"schema_version": version}
    for topology in (written["topology"], *written["arms"].values()):
        for name in VIDEOS_BEFORE:
            del topology["media"][name]
    lock.write_text(json.dumps(written))  # which is YAML too
    if version == 7:
        with pytest.raises(UsageError, match="max_videos is missing"):
            read_lock(tmp_path)
        return
    assert [one.spec.media.max_videos for one in read_lock(tmp_path).topologies] == [0, 0]
    assert [one.spec.media.max_images for one in read_lock(tmp_path).topologies] == [16, 3]


def _in_place_of_numbers(value: Any, number: float) -> Any:
    if isinstance(value, dict):
        return {key: _in_place_of_numbers(one, number) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_place_of_numbers(one, number) for one in value]
    return number if isinstance(value, (int, float)) and not isinstance(value, bool) else value


TAKES_ANY = {  # numeric fields without an upper bound -> why none is needed
    "min_goodput": "one that no run reaches is missed, and said to be",
    "extra_inputs": "they are the server's to judge",
    "gpus": "planning looks for each of them on the machine",
}


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 2**53])
@pytest.mark.parametrize(
    ("model", "field"),
    [
        (model, field)
        for model, fields in OTHER.items()
        for field, value in (fields | {"port": 1}).items()
        if field in model.model_fields and _in_place_of_numbers(value, 0.125) != value
    ],
)
def test_a_number_without_end_or_beyond_sense_is_refused_in_every_field(model: type, field: str, number: float) -> None:
    if number == 2**53 and field in TAKES_ANY:
        return
    value = _in_place_of_numbers(OTHER[model][field] or 1, number)
    beside = {**OF_OTHERS.get(field, {}), **({"request_rate": [1.0]} if field in OF_A_RATE else {})}
    beside |= {"tasks": [TASK_OF.get(field, "sums")]} if model is ScoringSpec else {}
    said: dict[str, Any] = {**beside, field: value}
    part = PARTS.get(model)
    said = {part: said | ({"url": "http://127.0.0.1:9"} if part == "attach" else {})} if part else said
    try:
        load_sweep(None, said)
    except UsageError as error:
        assert field in str(error) and "\n" not in str(error) and len(str(error)) < 1000
    else:
        pytest.fail(
            f"{model.__name__}.{field} takes {number}: give its Field le= and allow_inf_nan=False, or it reaches the "
            "command line of what is started, and a typing mistake hangs; or say why it needs none in TAKES_ANY of "
            f"{Path(__file__).name}"
        )


@pytest.mark.parametrize("field", OTHER[LoadSpec])
def test_a_field_of_a_load_changes_what_aiperf_is_asked(field: str, tmp_path: Path) -> None:
    lengths = {} if field in DATASETS else {"isl": 64, "osl": 16}
    load = {"request_rate": [1.0]} if field in OF_A_RATE else {"concurrency": [1]}
    load = {} if field == "fixed_schedule" else load  # which says when requests are sent itself
    sees = {"engine": "torch", "model": "synthetic:tiny-vl"}
    served = sees if field in field_records(Images) else {"engine": "paced"}
    base: dict[str, Any] = {"topology": served, "load": load | lengths | OF_OTHERS.get(field, {})}
    changed = base | {"load": base["load"] | {field: OTHER[LoadSpec][field]}}
    assert _asked(changed, tmp_path) != _asked(base, tmp_path), (
        f"load.{field} is taken and does nothing: hand it to aiperf in trtx/bench/aiperf/command.py, or refuse it in "
        "trtx/bench/load.py"
    )


def _load(field: str, *, is_open: bool) -> LoadSpec:
    """One with another value of this field, at a request rate or at a concurrency."""
    rate = {"request_rate": [1.0]} if field in OF_A_RATE or is_open else {}
    rate = {} if field in ("concurrency", "fixed_schedule", "scenario") else rate
    return LoadSpec.model_validate({**rate, **OF_OTHERS.get(field, {}), field: OTHER[LoadSpec][field]})


def _argv(spec: LoadSpec) -> tuple[str, ...]:
    target = Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg")
    return command(target, spec, spec.loads[0], spec.trials, Path("trial"))


def _together() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Fields of a load that say all that they say alone in one command line, and it. aiperf takes long to read one."""
    left = list(OTHER[LoadSpec])
    while left:
        names, said = [], {}
        words: tuple[str, ...] = ()
        for name in left:
            alone = _load(name, is_open=False)
            both = said | {one: getattr(alone, one) for one in alone.model_fields_set}
            try:
                argv = _argv(LoadSpec.model_validate(both))
            except (ValidationError, UsageError):
                continue
            own = {*_argv(alone)} - {*_argv(LoadSpec())}
            if {*words, *own} <= {*argv} or not names:
                names, said, words = [*names, name], both, tuple(own | {*words})
        yield names, _argv(LoadSpec.model_validate(said))
        left = [name for name in left if name not in names]


def test_aiperf_takes_what_the_fields_of_a_load_make_of_its_command_line() -> None:
    from aiperf.cli import app

    for names, asked in _together():
        fields = ", ".join(f"load.{name}" for name in names)
        try:
            _, bound, *_ = app.parse_args(asked[asked.index("profile") :], exit_on_error=False, print_error=False)
        except CycloptsError as error:
            pytest.fail(
                f"aiperf refuses what one of {fields} makes of it ({error}): see command() of bench/aiperf/command.py"
            )
        said_by_the_user = {"slice_duration"} if "aiperf_args" in names else set()
        strangers = sorted(bound.arguments["cli_config"].model_fields_set - owned().keys() - said_by_the_user)
        assert not strangers, (
            f"command() of bench/aiperf/command.py sets {', '.join(strangers)} beside one of {fields}: name it in "
            "_OWNED of trtx/bench/aiperf/flags.py, or --aiperf-args can say it too"
        )


FLAGS = {  # field of a load -> aiperf's flag where it has another name
    "arrival": "--arrival-pattern",
    "burstiness": "--arrival-smoothness",
    "request_timeout_s": "--request-timeout-seconds",
}
IN_ANOTHER_FORM = {  # fields that reach aiperf otherwise than word for word
    "trials": "aiperf is called once for each",
    "seed": "each trial has one that is made of it",
    "streaming": "a flag without a value",
    "fixed_schedule": "a flag without a value",
    "ignore_eos": "a field of every request's body",
    "extra_inputs": "fields of every request's body",
    "aiperf_args": "flags themselves",
}


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("field", OTHER[LoadSpec])
def test_the_value_of_a_field_stands_word_for_word_behind_its_flag(field: str, is_open: bool) -> None:
    if field in IN_ANOTHER_FORM:
        return
    value = OTHER[LoadSpec][field]
    wanted = value[0] if isinstance(value, list) else value
    words, flag = _argv(_load(field, is_open=is_open)), FLAGS.get(field, f"--{field.replace('_', '-')}")
    found = words[words.index(flag) + 1] if flag in words else None
    is_equal = found == str(wanted) if isinstance(wanted, str) or found is None else float(found) == wanted
    assert is_equal, (
        f"load.{field}={wanted!r} reaches aiperf as {flag} {found}: hand it over as it is, in the same unit, in "
        f"command() of bench/aiperf/command.py; another flag name is in FLAGS of {Path(__file__).name}, what is "
        "told otherwise in IN_ANOTHER_FORM"
    )


def test_a_target_has_the_gpus_of_all_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H100 80GB HBM3", 80 * 2**30) for index in range(3))
    monkeypatch.setattr(preparation, "probe", lambda: Machine(gpus, 16))
    spec = TopologySpec(mode="disagg", prefill=2, decode=1, engine="torch", model="synthetic:tiny-trained", port=0)
    planned = preparation.prepare(spec, run_dir=tmp_path / "run")
    preparation.HOLDER.release((planned.port, *planned.internal_ports))
    target = target_of("disagg", planned)
    assert (target.gpu_count, target.worker_count) == (3, 3), "rates per GPU divide by what target_of() counts"


@pytest.mark.parametrize("field", OTHER[TopologySpec])
def test_a_field_of_a_topology_changes_its_plan_or_is_refused(field: str, tmp_path: Path) -> None:
    base = {"modes": [BESIDE.get(field, "agg")], "topology": {"engine": "paced"}}
    value = OTHER[TopologySpec][field]
    value = {"agg": str(tmp_path / "agg.yaml")} if field == "engine_configs" else value
    value = str(tmp_path / value) if field == "chat_template" else value
    value = free_port() if field == "port" else value
    changed = base | {"topology": base["topology"] | {field: value}}  # type: ignore[operator]
    if field in TLS:
        with pytest.raises(UsageError, match="has no effect without"):
            _asked(changed, tmp_path)
        own, other = make(tmp_path, "own", ["127.0.0.1"]), make(tmp_path, "other", ["127.0.0.1"])
        other.key.write_bytes(own.key.read_bytes())
        if field == "tls_cert":
            other = make(tmp_path, "other", ["127.0.0.1"], private=own.private)
        paths = {"tls_cert": own.certificate, "tls_key": own.key}
        changed_to = {"tls_cert": other.certificate, "tls_key": other.key}[field]
        base = {"topology": {"engine": "paced", **{name: str(path) for name, path in paths.items()}}}
        changed = {"topology": base["topology"] | {field: str(changed_to)}}  # type: ignore[operator]
    if field in REFUSED:
        with pytest.raises(UsageError, match=re.escape(REFUSED[field])):
            _asked(changed, tmp_path)
        return
    assert _asked(changed, tmp_path) != _asked(base, tmp_path), (
        f"topology.{field} is taken and changes no plan: use it in trtx/topology, or refuse it in "
        "_refuse_unused of trtx/experiment/bench/sweep_file.py"
    )


@pytest.mark.parametrize(("field", "mode"), OWN_MODE.items())
def test_a_field_of_a_mode_that_is_not_swept_is_refused(field: str, mode: str, tmp_path: Path) -> None:
    other = "disagg" if mode == "agg" else "agg"
    with pytest.raises(UsageError, match=f"topology.{field} belongs to mode {mode}"):
        _asked({"modes": [other], "topology": {"engine": "paced", field: 2}}, tmp_path)


class _Models(Handler):
    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "tiny"}, {"id": "second"}]})


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """Of two deployments."""
    with serving(_Models) as first, serving(_Models) as second:
        yield first, second


# What etcd tells is seen in tests/integration/test_planes.py.
@pytest.mark.parametrize("field", [field for field in OTHER[Attach] if not field.startswith("etcd")])
def test_a_field_of_an_attachment_changes_who_is_measured(field: str, urls: tuple[str, str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
    base = {"url": urls[0], "model": "tiny", "tokenizer": str(tmp_path / "one")}
    own = {"url": urls[1], "tokenizer": str(tmp_path / "two")}
    value = OTHER[Attach][field] or own[field]
    attachments = [Attach.model_validate(said) for said in (base, base | {field: value})]
    targets = [attached_target(attach, ask_deployment(attach)) for attach in attachments]
    assert targets[0] != targets[1], (
        f"attach.{field} is taken and does nothing: use it in attached_target of trtx/experiment/targets.py"
    )


@pytest.mark.parametrize("field", OTHER[GateSpec])
def test_a_field_of_a_gate_is_kept_in_the_record_of_a_run(field: str, tmp_path: Path) -> None:
    """What it does when a run is judged, test_gate.py asks."""
    gate = {"slo": ["time_to_first_token:p50:le:9"], "baseline": "main", "max_regression": "5%"}
    spec = load_sweep(None, {"gate": gate | {field: OTHER[GateSpec][field]}})
    write_lock(tmp_path, spec, provenance(GOLDEN))
    assert read_lock(tmp_path).gate == spec.gate != load_sweep(None, {"gate": gate}).gate


@pytest.mark.parametrize("field", OTHER[ScoringSpec])
def test_a_field_of_an_evaluation_is_kept_in_the_record_of_a_run(field: str, tmp_path: Path) -> None:
    """What it asks of lm-eval, and how it judges, the tests of trtx eval ask: it has the same fields."""
    gate = {"baseline": "main", "max_regression": "5%"}
    asked = {"tasks": [TASK_OF.get(field, "sums")], field: OTHER[ScoringSpec][field]}
    spec = load_sweep(None, {"gate": gate, "eval": asked})
    write_lock(tmp_path, spec, provenance(GOLDEN))
    assert read_lock(tmp_path).eval == spec.eval != load_sweep(None, {"eval": {"tasks": ["sums"]}}).eval


@pytest.mark.parametrize("field", ["modes", "topology"])
def test_what_shapes_a_topology_is_refused_beside_an_attachment(field: str, tmp_path: Path) -> None:
    value = {"modes": ["agg"], "topology": {"engine": "paced"}}[field]
    with pytest.raises(UsageError, match=f"{field} configures what trtx serves; leave one of them out"):
        _asked({"attach": {"url": "http://127.0.0.1:9"}, field: value}, tmp_path)


def test_a_name_and_modes_are_the_runs(tmp_path: Path) -> None:
    spec = load_sweep(None, {"name": "other", "modes": ["disagg"]})
    assert "-other-" in create(tmp_path, spec, datetime.now(UTC)).name
    assert spec.labels == ("disagg",)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"eval": None}, "eval is empty; expected tasks below it"),
        ({"eval": {"tasks": ["sums"], "limit": True}}, "eval.limit is true; expected a value that is not a boolean"),
        ({"load": {"concurrency": [True]}}, r"load.concurrency is \[true\]; expected a value that is not a boolean"),
        ({"gate": {"min_goodput": True}}, "gate.min_goodput is true; expected a value that is not a boolean"),
    ],
)
def test_what_yaml_makes_of_little_is_no_number_and_no_default(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_sweep(None, said)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"model": "synthetic:tiny"}, "model is not a field of a sweep; did you mean topology.model?"),
        ({"concurrency": [1]}, "concurrency is not a field of a sweep; did you mean load.concurrency?"),
        ({"load": {"model": "x"}}, "load.model is not a field of a sweep; did you mean topology.model?"),
        ({"load": {"concurency": [1]}}, "load.concurency is not a field of a sweep; did you mean concurrency?"),
    ],
)
def test_a_field_of_another_section_is_named_with_its_section(document: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_sweep(None, document)
    assert said in str(refused.value)
