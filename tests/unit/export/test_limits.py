"""Limits of an export that bound the same thing agree: whoever waits longest is the last to give up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from exported_manifests import ASKED, pods

from trtx.cli.app import run
from trtx.config import TopologySpec
from trtx.export.kubernetes.other_manifests import _WAIT_S
from trtx.export.nginx import Gateway
from trtx.export.nginx import export as export_nginx
from trtx.export.slurm import JobSpec
from trtx.export.slurm.script import _RUNTIME
from trtx.topology.commands import frontend_environment
from trtx.worker.options import DRAIN_SECONDS

pytestmark = pytest.mark.slow

SLURM = ("export", "slurm", "--model", "synthetic:tiny-trained", "--engine", "torch", "--gpus-per-node", "0")
LONGEST_SHUTDOWN_S = 60  # of a worker whose engine is TensorRT-LLM


def seconds(probe: dict[str, Any]) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("name", [name for name in ASKED if name.startswith("plain")])
def test_a_pod_is_killed_after_its_worker_has_drained_and_probed_by_requests_that_end_before_the_next(
    name: str,
) -> None:
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe := container.get(kind):
                assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        if "terminationGracePeriodSeconds" in pod["spec"]:
            assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN_SECONDS + LONGEST_SHUTDOWN_S
            assert _WAIT_S >= seconds(container["startupProbe"]) > seconds(container["livenessProbe"])


def test_nginx_gives_up_on_an_answer_after_its_frontend_has() -> None:
    gateway = Gateway(("127.0.0.1", 8080), (("127.0.0.1", 8000),), body_mib=45)
    (hours,) = re.findall(r"proxy_read_timeout (\d+)h;", export_nginx(gateway, started_by="trtx serve").text)
    silent_s = int(frontend_environment(TopologySpec().media)["DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"])
    assert int(hours) * 3600 > silent_s


@pytest.mark.parametrize("drain_s", [1, 15, 600])
def test_a_job_is_told_to_end_early_enough_for_all_that_it_stops(drain_s: int) -> None:
    """Frontends drain while workers still compute for them, so their bound is within that of the workers."""
    told = _RUNTIME.read_text().partition("stop_all() {")[2].partition("\n}")[0]
    waits = re.findall(r'^  stop "?(?:\$\(\()?\$?([A-Z_]*(?: \+ )?\d*)', told, re.MULTILINE)
    assert waits == ["10", "DRAIN_SECONDS", "DRAIN_SECONDS + 30", "10"]
    assert JobSpec(drain_s=drain_s).lead_s >= 10 + (drain_s + 30) + 10


@pytest.mark.parametrize(
    ("time", "drain_s", "most"), [("00:10:00", 15, 435), ("10", 60, 390), ("1-00", 15, 86_235), ("00:02:46", 15, 1)]
)
def test_the_wait_until_a_job_serves_ends_before_the_job(
    time: str, drain_s: int, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    call = [*SLURM, "--time", time, "--drain-s", str(drain_s)]
    assert run([*call, "--ready-timeout-s", str(most)]) == 0
    assert f"READY_SECONDS={most}\n" in capsys.readouterr().out
    assert run([*call, "--ready-timeout-s", str(most + 1)]) == 2
    told = capsys.readouterr().err
    assert f"--ready-timeout-s {most + 1} is longer than the job" in told and f"--time {time}" in told
    assert run(call) == 0
    assert f"READY_SECONDS={min(1800, most)}\n" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [SLURM, ("export", "kubernetes", "--image", "r.example/t:1.4.2", *SLURM[2:])])
@pytest.mark.parametrize("typed", [("--encode", "1"), ("--encode-shared", "2"), ("--encode", "1", "--mode", "disagg")])
def test_encode_workers_are_refused_where_they_share_no_directory(
    verb: tuple[str, ...], typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*verb, *typed]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert f"{typed[0]} {typed[1]} can't be exported: encode workers hand embeddings over in files" in said.err
