"""Every option of every verb means something in the use that it is typed in, or is refused there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from certificates import make
from examples import first_of
from other_values import another

from trtx.bench import LoadSpec
from trtx.build import BuildRequest
from trtx.cli import app
from trtx.cli.check import CheckRequest
from trtx.cli.command import Verb, spoken_name
from trtx.cli.placement import USES, uses_that_ignore
from trtx.cli.verb_help import option_name
from trtx.config import TopologySpec
from trtx.config.media import MediaLimits
from trtx.config.option_field import record_of
from trtx.experiment import ExperimentSpec
from trtx.experiment.gate_spec import GateSpec

pytestmark = pytest.mark.slow

REPRODUCE = ["bench", "reproduce", str(Path(__file__).parents[1] / "report" / "golden" / "run" / "run.lock.yaml")]
HOSTS = str(Path(__file__).with_name("{}.yaml"))  # without roles, and with them
# verb -> use -> a command line that is in this use
SESSIONS = ("--session-turns-mean", "3", "--session-turn-delay-mean", "9")
TLS = ("--tls-cert", "own.pem", "--tls-key", "own.key")
CALLS = {
    "serve": {
        "agg": ["serve", "--mode", "agg", *TLS],
        "disagg": ["serve", "--mode", "disagg"],
        "no GPU": ["serve", "--engine", "paced"],
        "hosts": ["serve", "--hosts", HOSTS.format("hosts")],
        "no hosts": ["serve"],
        "roles": ["serve", "--hosts", HOSTS.format("roles")],
    },
    "serve join": {"": ["serve", "join", "--etcd", "http://127.0.0.1:9", "--name", "one"]},
    "bench": {
        "agg": ["bench", "--mode", "agg", *TLS],
        "disagg": ["bench", "--mode", "disagg"],
        "no GPU": ["bench", "--engine", "simulated"],
        "resume": ["bench", "--resume", "no-such-run"],
        "attach": ["bench", "--url", "http://127.0.0.1:9", "--etcd", "http://127.0.0.1:9"],
        "serve": ["bench"],
        "closed loop": ["bench"],
        "open loop": ["bench", "--request-rate", "5", "--image-batch-size", "1", *SESSIONS],
        "schedule": ["bench", "--input-file", "a.yaml", "--fixed-schedule"],
        "dataset": ["bench", "--public-dataset", "aimo"],
        "file": ["bench", "--input-file", "a.yaml"],
        "public": ["bench", "--public-dataset", "aimo"],
        "no file": ["bench"],
        "one turn": ["bench"],
        "no delay": ["bench", "--session-turns-mean", "3"],
        "prefix": ["bench", "--prefix-prompt-length", "1"],
        "no prefix": ["bench"],
        "no images": ["bench"],
        "dry run": ["bench", "--dry-run"],
        "": ["bench", "--slo", "request_latency:p50:le:900", "--baseline", "main", "--max-regression", "5%"],
    },
    "bench ab": {
        "": ["bench", "ab", "one.yaml", "two.yaml", "--max-regression", "5%"],
        "no gate": ["bench", "ab", "one.yaml", "two.yaml"],
        "dry run": ["bench", "ab", "one.yaml", "two.yaml", "--dry-run"],
    },
    "bench reproduce": {"": REPRODUCE, "dry run": [*REPRODUCE, "--dry-run"]},
    "eval": {
        "agg": ["eval", "--tasks", "trtx", "--mode", "agg", *TLS],
        "disagg": ["eval", "--tasks", "trtx", "--mode", "disagg"],
        "no GPU": ["eval", "--tasks", "trtx", "--engine", "paced"],
        "resume": ["eval", "--resume", "no-such-run"],
        "attach": ["eval", "--tasks", "trtx", "--url", "http://127.0.0.1:9"],
        "serve": ["eval", "--tasks", "trtx"],
        "no baseline": ["eval", "--tasks", "trtx"],
        "no needle": ["eval", "--tasks", "trtx"],
        "no perplexity": ["eval", "--tasks", "trtx"],
        "no schemas": ["eval", "--tasks", "trtx"],
        "": [
            "eval",
            "--tasks",
            "needle,perplexity,schemas",
            "--text",
            "a.txt",
            "--schemas",
            "a.jsonl",
            "--baseline",
            "run",
        ],
    },
    "eval fidelity": {
        "agg": ["eval", "fidelity", "--mode", "agg", *TLS],
        "disagg": ["eval", "fidelity", "--mode", "disagg"],
        "resume": ["eval", "fidelity", "--resume", "no-such-run"],
        "attach": ["eval", "fidelity", "--url", "http://127.0.0.1:9", "--reference", "synthetic:tiny"],
        "serve": ["eval", "fidelity", "--reference", "synthetic:tiny"],
    },
    "eval parity": {
        "": ["eval", "parity"],
        "resume": ["eval", "parity", "--resume", "no-such-run"],
        "serve": ["eval", "parity"],
        "no routes": ["eval", "parity", "--url", "http://127.0.0.1:9", "--against", "http://127.0.0.1:8"],
        "no against": ["eval", "parity"],
        "attach": ["eval", "parity", "--url", "http://127.0.0.1:9", "--against", "http://127.0.0.1:8"],
        "against a model": ["eval", "parity", "--url", "http://127.0.0.1:9", "--against", "synthetic:tiny"],
        "no GPU": ["eval", "parity", "--engine", "paced"],
        "no disagg": ["eval", "parity", "--routes", "agg,kv"],
        "one worker": ["eval", "parity", "--routes", "disagg,chunked"],
        "no chunks": ["eval", "parity", "--routes", "kv,disagg"],
    },
    "build": {
        "build": ["build", "synthetic:tiny", "--quant", "fp8"],
        "none": ["build", "synthetic:tiny", "--quant", "none"],
        "tensorrt": ["build", "synthetic:tiny", "--quant", "fp8", "--backend", "tensorrt"],
        "check": ["build", "--check", "--recipe", "qwen3"],
        "check all": ["build", "--check", "--all"],
    },
    "export slurm": {
        "": ["export", "slurm", "--container-image", "image"],
        "agg": ["export", "slurm", "--mode", "agg"],
        "disagg": ["export", "slurm", "--mode", "disagg"],
        "no GPU": ["export", "slurm", "--engine", "paced"],
        "no container": ["export", "slurm"],
        "dry run": ["export", "slurm", "--dry-run"],
    },
    "export kubernetes": {
        "agg": ["export", "kubernetes", "--image", "reg/trtx:1.4.2", "--mode", "agg"],
        "disagg": ["export", "kubernetes", "--image", "reg/trtx:1.4.2", "--mode", "disagg"],
        "no GPU": ["export", "kubernetes", "--image", "reg/trtx:1.4.2", "--engine", "paced"],
        "dry run": ["export", "kubernetes", "--image", "reg/trtx:1.4.2", "--dry-run"],
    },
    "compare": {
        "": ["compare", "main", "other", "--max-regression", "5%"],
        "no gate": ["compare", "main", "other"],
    },
    "baseline": {
        "list": ["baseline", "list"],
        "show": ["baseline", "show", "main"],
        "save": ["baseline", "save", "run", "main"],
        "promote": ["baseline", "promote", "main"],
        "expire": ["baseline", "expire"],
    },
    "export nginx": {
        "": ["export", "nginx", *TLS, "--listen-cert", "own.pem", "--listen-key", "own.key"],
        "hosts": ["export", "nginx", "--hosts", HOSTS.format("hosts")],
    },
    "export prometheus": {
        "runs": ["export", "prometheus", "other"],
        "kubernetes": ["export", "prometheus", "--kubernetes", "pods"],
    },
    "export grafana": {"": ["export", "grafana", "other"]},
    "report": {"": ["report", "run"]},
    "sleep": {"": ["sleep", "run"]},
    "wake": {"": ["wake", "run"]},
    "update": {"": ["update", "run", "synthetic:tiny"]},
    "explain": {"": ["explain", "run"]},
    "doctor": {"": ["doctor", "--hosts", HOSTS.format("hosts")], "no hosts": ["doctor"]},
}
# A value that no call above has and no option has unasked. Where none stands here: 2.
VALUES = {
    "MODEL": "synthetic:tiny-trained", "--model": "synthetic:tiny", "--served-model-name": "other", "--engine": "torch",
    "--config": "agg=a.yaml", "--recipe": "llama4", "--set": "max_batch_size=1", "--mode": "agg", "--gpus": "1",
    "--router-mode": "kv", "--router-args": "--router-temperature 0.5", "--host": "localhost", "--output": "elsewhere",
    "--sweep": "sweep.yaml", "--url": "http://127.0.0.1:8", "--tokenizer": "here", "--resume": "other-run",
    "--quant": "int8_sq", "--kv-dtype": "fp8", "--calib": "text.jsonl", "--backend": "tensorrt", "--role": "decode",
    "--gpu": "H100", "--trtllm-version": "1.2.1", "--arrival": "constant", "--axis": "overrides.max_batch_size=1,2",
    "--max-cells": "99", "SWEEP_FILE": "sweep.yaml", "--prompt-corpus": "coding", "--image-format": "jpeg",
    "--image-source": "assets", "--input-file": "sweep.yaml", "--chat-template": "chat.jinja",
    "--public-dataset": "sharegpt", "--custom-dataset-type": "single_turn", "--extra-inputs": "seed:1",
    "--aiperf-args": "--slice-duration 2",
    "--slo": "time_to_first_token:p99:le:500", "--max-error-rate": "1%", "--max-regression": "7%", "--metrics":
    "request_latency:p50", "--tasks": "trtx_json", "--task-dir": "elsewhere", "--endpoint-type": "chat",
    "--min-score": "trtx_json:exact_match:0.5", "--text": "b.txt", "--schemas": "b.jsonl", "--window": "steady",
    "--structured-output": "both",
    "--reference": "synthetic:tiny-trained", "--prompts": "12", "--max-kl": "0.5", "--min-agreement": "0.5",
    "--allow-different": "machine.cpu", "--baseline-dir": "elsewhere", "--save-baseline": "next",
}  # fmt: skip
VALUES_IN = {("--mode", "agg"): "disagg", ("--mode", "no GPU"): "disagg", ("--config", "disagg"): "decode=a.yaml"}
VALUES_IN |= {
    ("--mode", use): "disagg" for use in {*USES["bench"], *USES["eval"]} if use not in ("agg", "disagg", "no GPU")
}
VALUES_IN |= {("--backend", "tensorrt"): "pytorch", ("--tasks", ""): "perplexity,schemas"}
VALUES |= {
    "--prompts": "99", "--isl": "99", "--max-num-tokens": "99", "--routes": "agg,disagg,kv,chunked",
}  # fmt: skip
VALUES_IN |= {
    ("--max-num-tokens", ""): "99",
    ("--workers", ""): "3",
    ("--workers", "serve"): "3",
    ("--workers", "no against"): "3",
}
VALUES_IN |= {("--mode", "no container"): "disagg", ("--mode", "no hosts"): "disagg"}
VALUES |= {f"--{of}-cert": "other.pem" for of in ("tls", "listen")} | {
    f"--{of}-key": "other.key" for of in ("tls", "listen")
}
VALUES |= {"--listen": "127.0.0.1:8081", "--session-turns-mean": "2"}
VALUES |= {"--against": "http://127.0.0.1:7", "--dtype": "bfloat16", "--decode-memory-bytes": "99999999"}
VALUES |= {"--media-memory-bytes": "99999999", "--max-image-pixels": "99999999", "--max-images": "9"}
VALUES |= {"--decode-processes": "3", "--max-videos": "3", "--max-media-bytes": "9999999"}
VALUES |= {
    "--hosts": HOSTS.format("roles"),
    "--etcd": "http://127.0.0.1:8",
    "--name": "other",
    "--nats-auth": "token_file=a",
}
VALUES |= {"--etcd-auth": "username=a,password_file=b"}
VALUES_IN |= {("--hosts", "roles"): HOSTS.format("hosts"), ("--mode", "roles"): "disagg", ("--mode", "hosts"): "disagg"}
VALUES |= {"ACTION": "expire", "A": "three.yaml", "B": "three.yaml", "--rounds": "3"}
VALUES_IN |= {("ACTION", "expire"): "list", ("--mode", ""): "disagg"}
VALUES |= {
    "--time": "00:05:00", "--sbatch": "--qos=high", "--interface": "eth1", "--first-port": "17100", "--model-dir": "/m",
    "--local-dir": "/scratch", "--lease-ttl-s": "60", "--container-mounts": "/a:/b",
    "--image": "reg/trtx:1.4.1", "--name": "other", "--namespace": "other", "--model-claim": "models", "--hub-secret":
    "hub", "--image-pull-secret": "registry", "--tls-secret": "front-door", "--nats": "nats://nats:4222",
    "--ucx-devices": "eth1", "--resource": "rdma/ib=1", "--node-selector": "pool=gpu", "--memory": "64Gi",
    "--shared-memory": "8Gi", "--decode-processes": "3", "--bench": "--concurrency 1",
}  # fmt: skip
# What stands in the calls above in the place of an argument.
POSITIONAL = {
    "MODEL": ("synthetic:tiny",), "ACTION": tuple(CALLS["baseline"]), "WORDS": ("main",), "RUN": ("run",),
    "RUNS": ("other",), "A": ("one.yaml",), "B": ("two.yaml",),
}  # fmt: skip
# What changes nothing that the engine room is asked for, and the file of the test that sees what it does.
SEEN_ELSEWHERE = {
    ("bench", "--custom-dataset-type"): "tests/unit/bench/test_datasets.py",  # beside --fixed-schedule, of one kind
    ("export kubernetes", "--output"): "tests/unit/export/test_kubernetes.py",
    ("export kubernetes", "--allowed-media-path"): "tests/unit/export/test_kubernetes.py",
    ("serve", "--dry-run"): "tests/unit/cli/test_serve.py",
    ("export slurm", "--dry-run"): "tests/unit/export/test_over_nodes.py",
    ("export kubernetes", "--dry-run"): "tests/unit/export/test_over_nodes.py",
    ("serve", "--this-host"): "tests/unit/cli/test_serve_hosts.py",
    ("bench", "--json"): "tests/integration/test_bench_resume.py",
    ("eval", "--json"): "tests/integration/test_eval.py",
    ("eval fidelity", "--json"): "tests/integration/test_fidelity.py",
    ("bench ab", "--json"): "tests/integration/test_bench_ab.py",
    ("eval parity", "--json"): "tests/integration/test_parity.py",
    ("bench reproduce", "LOCK"): "tests/unit/cli/test_reproduce.py",
    ("bench reproduce", "--exact"): "tests/unit/cli/test_reproduce.py",
    ("bench reproduce", "--json"): "tests/integration/test_bench.py",
    ("doctor", "--json"): "tests/unit/cli/test_doctor.py",
    ("compare", "--json"): "tests/unit/cli/test_compare.py",
    ("baseline", "--json"): "tests/unit/cli/test_baseline.py",
    ("report", "--json"): "tests/unit/cli/test_report.py",
    ("explain", "--json"): "tests/unit/cli/test_explain.py",
    ("export slurm", "--output"): "tests/unit/export/slurm/test_slurm_spec.py",
    ("export nginx", "--output"): "tests/integration/test_nginx.py",
    ("export prometheus", "--output"): "tests/unit/export/test_monitoring.py",
    ("export grafana", "--output"): "tests/unit/export/test_monitoring.py",
}
# Where a verb hands over what it was asked.
ROOMS = (
    "trtx.launch.prepare", "trtx.cli.serving.prepare_hosts", "trtx.launch.join_share", "trtx.export.nginx.export",
    "trtx.experiment.run", "trtx.experiment.resume", "trtx.experiment.plan_only",
    "trtx.experiment.evaluate", "trtx.experiment.resume_evaluation", "trtx.experiment.parity.run.check_parity",
    "trtx.experiment.parity.run.resume_parity",
    "trtx.experiment.fidelity.run_fidelity", "trtx.experiment.fidelity.resume_fidelity",
    "trtx.build.build", "trtx.cli.check.check", "trtx.doctor.examine",
    "trtx.export.kubernetes.export",
    "trtx.cli.compare.answer", "trtx.cli.baseline.answer", "trtx.cli.report.rendered",
    "trtx.cli.explain.answer", "trtx.cli.memory_options.change",
    "trtx.export.slurm.export",
    "trtx.export.monitoring.exported.prometheus_files", "trtx.export.monitoring.exported.grafana_file",
)  # fmt: skip


FIELDS = {name: field for one in (LoadSpec, TopologySpec, MediaLimits) for name, field in one.model_fields.items()}
TOLD_BY_TYPES = {name: str(value) for name, field in FIELDS.items() if (value := another(name, field)) is not None}


def parameters(verb: str) -> list[Any]:
    command = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    assert isinstance(command, Verb)  # which refuses empty and repeated values
    return [parameter for parameter in command.params if parameter.name != "help"]


OPTIONS = [(verb, option_name(one), one) for verb in app.VERBS for one in parameters(verb)]


def options(verb: str) -> list[tuple[str, Any]]:
    return [(option, parameter) for one, option, parameter in OPTIONS if one == verb]


def with_option(call: list[str], parameter: Any, use: str) -> list[str] | None:
    """``call`` with a value of this option, or another one where it has one; None for a flag that it has."""
    name = option_name(parameter)
    value = VALUES_IN.get((name, use)) or VALUES.get(name) or TOLD_BY_TYPES.get(parameter.name, "2")
    if getattr(parameter, "is_flag", False):
        return None if name in call else [*call, name]
    if not name.startswith("--"):
        places = [place for place, word in enumerate(call) if word in POSITIONAL.get(name, ())]
        at = places[0] if places else len(call)
        return [*call[:at], value, *call[at + 1 :]]
    if name in call:
        at = call.index(name) + 1
        return [*call[:at], value, *call[at + 1 :]]
    return [*call, name, value]


def test_every_use_refuses_options_of_its_verb() -> None:
    assert USES.keys() == app.VERBS.keys() == CALLS.keys()
    for verb, uses in USES.items():
        names = {option for option, _ in options(verb)}
        for use in uses.values():
            strangers = sorted({*use.options.split(), *(use.all_but or "").split()} - names)
            assert not strangers, f"trtx {verb} has no {strangers}: take them out of USES of trtx/cli/placement.py"
        used = {use for option in names for use in uses_that_ignore(verb, option)}
        assert used == uses.keys(), (
            f"{sorted(uses.keys() - used)} of trtx {verb} refuse no option: name some in USES of trtx/cli/placement.py "
            "or in ignored= of a field's record, or take the use out"
        )
        assert used == CALLS[verb].keys() - {""}, (
            f"give each use of trtx {verb} a command line in CALLS of {Path(__file__).name}: "
            f"{sorted(used ^ CALLS[verb].keys())}"
        )


def test_every_use_that_a_record_names_is_one_of_a_verb() -> None:
    known = {name for uses in USES.values() for name in uses}
    strangers = [
        f"{model.__name__}.{name}: {use}"
        for model in (LoadSpec, TopologySpec, MediaLimits)
        for name, field in model.model_fields.items()
        for use in getattr(record_of(field), "ignored", ())
        if use not in known
    ]
    assert not strangers, f"USES of trtx/cli/placement.py has no such use: correct ignored= of {strangers}"


MODELS = (LoadSpec, TopologySpec, GateSpec, ExperimentSpec)
DEFAULTS = {
    name: field.get_default(call_default_factory=True) for one in MODELS for name, field in one.model_fields.items()
}
TOLD_OTHERWISE = {"modes", "port", "metrics"}  # of these, help tells what the default leads to


def test_the_default_that_help_tells_is_the_fields() -> None:
    others = []
    for verb, option, parameter in OPTIONS:
        found = re.search(r"Default: (.+?)\.$", getattr(parameter, "help", None) or "")
        default = DEFAULTS.get(parameter.name)
        if found is None or default is None or parameter.name in TOLD_OTHERWISE or verb not in ("serve", "bench"):
            continue
        values = default if isinstance(default, tuple) else (default,)
        told = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
        if found[1] != told:
            others.append(
                f"trtx {verb} {option} --help says Default: {found[1]}, and its field's default is {told}: say that in "
                "trtx/cli (gate_options.py, topology_options.py), or, where it leads to "
                f"something else, name the field in TOLD_OTHERWISE of {Path(__file__).name}"
            )
    assert not others, "\n".join(others)


def ignored(verb: str) -> Iterator[tuple[Any, str]]:
    for option, parameter in options(verb):
        for use in uses_that_ignore(verb, option):
            yield parameter, use


@pytest.mark.parametrize("verb", CALLS)
def test_an_option_that_its_use_would_ignore_is_refused(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for parameter, use in ignored(verb):
        asked = with_option(CALLS[verb][use], parameter, use)
        assert asked is not None and app.run(asked) == 2, f"trtx {verb} takes {option_name(parameter)} in {use}"
        said = capsys.readouterr().err
        assert said.startswith(f"trtx: {spoken_name(parameter)} has no effect ") and said.count("\n") == 1
        assert USES[verb][use].where in said
    assert list(tmp_path.iterdir()) == []


class Asked(BaseException):
    """What a room would have been asked for; not an Exception, which the command line would take for a bug."""


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rooms that do nothing but tell what they are asked."""

    def teller(name: str) -> Any:
        def tell(
            *arguments: object,
            run_dir: Path | None = None,
            listener: object = None,
            on_progress: object = None,
            **named: object,
        ) -> None:
            raise Asked(f"{name} {arguments} {named} {run_dir and run_dir.parent}")

        return tell

    for name in ROOMS:
        monkeypatch.setattr(name, teller(name))
    monkeypatch.setattr("trtx.experiment.differences_here", lambda locked: ())  # or this machine would be looked at
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text("load: {seed: 99}\n")
    for number, name in enumerate(("one", "two", "three"), 1):
        Path(f"{name}.yaml").write_text(f"topology: {{workers: {number}}}\n")
    Path("a.yaml").write_text("max_batch_size: 1\n")
    Path("chat.jinja").write_text("{{ messages }}")
    own = make(tmp_path, "own", ["localhost"])
    make(tmp_path, "other", ["localhost"], private=own.private)


def asked_for(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """None where something that was typed has no effect with the rest."""
    try:
        code = app.run(argv)
    except Asked as asked:
        return str(asked)
    said = capsys.readouterr().err
    assert code == 2 and " has no effect " in said, (
        f"trtx {' '.join(argv)} ended with {code}: {said}expected a value that passes (in VALUES), and a field "
        "of the option's name in LoadSpec, Attach or TopologySpec"
    )
    return None


@pytest.mark.usefixtures("rooms")
@pytest.mark.parametrize("verb", CALLS)
def test_the_same_call_asks_for_the_same(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for call in {tuple(call): call for call in CALLS[verb].values()}.values():
        assert asked_for(call, capsys) == asked_for(call, capsys), (
            "what is new in each call does not belong into tell()"
        )


def is_of_share(number: int, place: int, share: int) -> bool:
    """Whether this option of a verb is tried in this use of it. Over all options, each use is tried as often."""
    return (number + place) % share == 0


def source_of(verb: str) -> str:
    """The file of a verb: that of ``bench ab`` is ab.py, that of ``export slurm`` export_slurm.py."""
    names = (verb.replace(" ", "_"), verb.rpartition(" ")[2])
    paths = [f"trtx/cli/{name}.py" for name in names]
    (found,) = {path for path in paths if (Path(__file__).parents[3] / path).is_file()}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("rooms")
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("share", first_of(1, [6, 1]), ids=["a sixth of the uses", "all uses"])
def test_an_option_changes_what_is_asked_for_wherever_it_is_not_refused(
    verb: str, share: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[tuple[str, ...], str | None] = {}  # command line -> what it asks for; several uses may have the same

    def outcome(argv: list[str]) -> str | None:
        if tuple(argv) not in seen:
            seen[tuple(argv)] = asked_for(argv, capsys)
        return seen[tuple(argv)]

    wrong = []
    for number, (option, parameter) in enumerate(options(verb)):
        if (verb, option) in SEEN_ELSEWHERE:
            file = SEEN_ELSEWHERE[verb, option]
            assert f'"{option}"' in (Path(__file__).parents[3] / file).read_text(), f"{file} does not type {option}"
            continue
        has_meant_something = False
        for place, (use, call) in enumerate(CALLS[verb].items()):
            if use in uses_that_ignore(verb, option) or (has_meant_something and not is_of_share(number, place, share)):
                continue
            without = outcome(call)
            assert without is not None
            if (changed := with_option(call, parameter, use)) is None:  # this flag is what makes the use
                has_meant_something = True
                continue
            with_it = outcome(changed)
            has_meant_something |= with_it is not None
            if with_it == without:
                wrong.append(
                    f"trtx {verb} takes {option} and does nothing with it {USES[verb][use].where if use else ''}: hand "
                    f"it on in {source_of(verb)} (fields of LoadSpec, Attach and TopologySpec get what is typed under "
                    "their names), or refuse it there: name the option in the use, in USES of "
                    "trtx/cli/placement.py, or the use in ignored= of the field's record"
                )
        if not has_meant_something:
            wrong.append(
                f"trtx {verb} {option} is refused in every use of CALLS in {Path(__file__).name}: take it out of a use "
                "in USES of trtx/cli/placement.py, or give the use in which it means something a command line there"
            )
    assert not wrong, "\n".join(wrong)


# Uses in which a verb hands over what was typed, and the room that gets it makes nothing of it.
IGNORED_BY_THE_ROOM = {
    *((verb, use) for verb in ("serve", "bench", "eval") for use in ("agg", "disagg", "no GPU")),
    *(("serve", use) for use in ("hosts", "roles")),
    *(("eval parity", use) for use in ("no GPU", "no disagg", "one worker", "no chunks", "no against")),
    ("eval parity", "against a model"),
    *(("eval", use) for use in ("no baseline", "attach")),
    *(("eval fidelity", use) for use in ("agg", "disagg", "attach")),
    *(("export kubernetes", use) for use in ("agg", "disagg", "no GPU")),
    *(("build", use) for use in ("none", "tensorrt", "check all")),
    *(("baseline", use) for use in ("list", "show", "save", "promote")),
    ("compare", "no gate"),
    *(("export slurm", use) for use in ("agg", "disagg", "no GPU", "no container")),
    ("export prometheus", "kubernetes"),
    ("export nginx", "hosts"),  # but for the command that it says the frontends are started by
}


@pytest.mark.slow
@pytest.mark.usefixtures("rooms")
@pytest.mark.parametrize("verb", CALLS)
def test_an_option_is_refused_only_where_it_would_change_nothing(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtx.cli.placement.uses_that_ignore", lambda verb, option: ())

    @functools.cache
    def outcome(*argv: str) -> str:
        try:
            code = app.run(list(argv))
        except Asked as asked:
            return str(asked)
        capsys.readouterr()
        return f"exit {code}"

    wrong = []
    for parameter, use in ignored(verb):
        if (verb, use) in IGNORED_BY_THE_ROOM:
            continue
        call = CALLS[verb][use]
        changed = with_option(call, parameter, use)
        assert changed is not None
        if outcome(*changed) not in (outcome(*call), "exit 2"):
            wrong.append(
                f"trtx/cli/placement.py refuses {option_name(parameter)} {USES[verb][use].where}, and without that "
                f"trtx {verb} does something with it there: take the option out of the use, or, where the room makes "
                f"nothing of it, name it in IGNORED_BY_THE_ROOM of {Path(__file__).name}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench", "--dry-run", "--prefill", "2"], ["--prefill", "--mode agg"]),  # the mode that is served unasked
        (["bench", "--dry-run", "--sweep", "disagg.yaml", "--workers", "2"], ["--workers", "--mode disagg"]),
        (["bench", "--dry-run", "--sweep", "attached.yaml", "--engine", "torch"], ["attach", "topology"]),
        (["serve", "--dry-run", "--recipe", "qwen3", "--config", "agg=a.yaml"], ["--recipe 'qwen3'", "--config"]),
        (["build", "--check", "--recipe", "tiny", "--mode", "agg", "--config", "agg=a.yaml"], ["--recipe", "--config"]),
        (["serve", "--dry-run", "--config", "agg=a.yaml", "--config", "agg=b.yaml"], ["--config names agg twice"]),
        (["serve", "--dry-run", "--set", "max_batch_size="], ["--set 'max_batch_size='", "no value", "null"]),
        (["serve", "--dry-run", "--set", "agg=1"], ["--set 'agg=1'", "role.a.b=value"]),
        (["serve", "--dry-run", "--set", "kv_cache_config={x: 1, x: 2}"], ["--set", "'x' occurs twice"]),
        (["build", "--check", "--recipe", "qwen3", "--gpu", "H1000"], ["'H1000'", "Known"]),
        (["build", "synthetic:tiny", "--quant", "fp8", "--kv-dtype", "fp8", "--set", "kv_cache_config.dtype=auto"],
         ["--kv-dtype fp8", "--set 'kv_cache_config.dtype=auto'"]),
        (["serve", "--dry-run", "--workers", "99999"], ["--workers 99999", "256"]),
        (["eval", "--tasks", "needle", "--needle-lengths", "1k,2k"], ["--needle-lengths '1k,2k'", "whole numbers"]),
        (["eval", "--tasks", "trtx,perplexity"], ["--text is needed", "perplexity"]),
    ],
)  # fmt: skip
def test_what_would_be_dropped_is_refused(
    argv: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disagg.yaml").write_text("modes: [disagg]\n")
    Path("attached.yaml").write_text("attach: {url: 'http://127.0.0.1:9'}\n")
    Path("a.yaml").write_text("max_batch_size: 1\n")
    assert app.run(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    for word in words:
        assert word in said


def test_a_refusal_by_typer_itself_is_one_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--mode", "both"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trtx: ") and said.count("\n") == 1
    assert "--mode" in said and "agg" in said and "see trtx serve --help" in said


def test_a_long_message_loses_its_middle_and_nothing_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "x" * 5000, "\x1b[31m"]) == 2
    said = capsys.readouterr().err
    assert len(said) < 1000 and " ... " in said and "\x1b" not in said


@pytest.mark.parametrize(("request_type", "where"), [(BuildRequest, "trtx/build"), (CheckRequest, "trtx/cli/check.py")])
def test_a_room_reads_each_field_of_what_build_is_asked(request_type: Any, where: str) -> None:
    place = Path(__file__).parents[3] / where
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    read = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {field.name for field in fields(request_type)} - read
    assert not unread, f"nothing under {where} reads {sorted(unread)} of {request_type.__name__}: act on it there"
