"""``benchmarks/user_loads.py`` and ``peer_servers.py``: what they take is honoured or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_benchmark_commands import BENCHMARKS

from trtx.bench.load import LoadSpec

sys.path.insert(0, str(BENCHMARKS))
from peer_servers import kind_of, peers_of, version_in
from user_loads import KINDS, OPTIONS, user_loads


def test_every_kind_is_a_load_of_trtx_bench() -> None:
    for load in user_loads(list(KINDS), {"temperature": "0"}):
        assert load.options.keys() <= OPTIONS
        fields = {name.replace("-", "_"): value for name, value in load.options.items() if name != "temperature"}
        if "extra_inputs" in fields:
            fields["extra_inputs"] = json.loads(fields["extra_inputs"])
        lists = {name: [float(value)] for name, value in fields.items() if name in ("concurrency", "request_rate")}
        assert LoadSpec.model_validate({**fields, **lists, "isl": [fields["isl"]], "osl": [fields["osl"]]})


def test_options_are_fields_of_a_load() -> None:
    sampling = {"temperature", "top-p", "top-k"}
    assert {name.replace("-", "_") for name in OPTIONS - sampling} <= LoadSpec.model_fields.keys()


def test_what_is_said_takes_the_place_of_the_kinds_own_and_each_load_has_prompts_of_its_own() -> None:
    kind, other, rate = user_loads(["drawn", "drawn:concurrency=16,isl=900,seed=3", "drawn:request-rate=2"], {})
    assert other.options == {**KINDS["drawn"], "concurrency": "16", "isl": "900", "seed": "3"}
    assert "concurrency" not in rate.options and rate.options["request-rate"] == "2"
    assert kind.options["seed"] != rate.options["seed"]
    assert kind.options["seed"] == user_loads(["long", "drawn"], {})[1].options["seed"]  # whatever is beside it
    assert kind.words()[:2] == ["--seed", kind.options["seed"]]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["burst"], "no load 'burst'; there are fixed"),
        (["fixed:lenght=3"], "'lenght=3' of load"),
        (["fixed:isl"], "'isl' of load"),
        (["fixed:isl="], "'isl=' of load"),
        (["fixed:url=http://x"], "is no option=value"),
        (["fixed:isl=3,isl=4"], "says isl twice"),
        (["fixed", "fixed"], "is named twice"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused(asked: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        user_loads(asked, {})


def test_peers_are_named_by_kind_and_two_versions_are_two_peers(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    info = tmp_path / "vllm-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.2\n")
    found = peers_of([f"vllm={tmp_path}", f"vllm-0.1={tmp_path}"])
    assert [kind_of(name) for name in found] == ["vllm", "vllm"]
    assert version_in(tmp_path, "vllm") == "0.1.2" and version_in(tmp_path, "sglang") == "–"
    for asked, why in (
        ([f"vllm={tmp_path}"] * 2, "twice"),
        ([f"sglang={tmp_path}"], "has no package sglang"),
        (["lmdeploy=."], "NAME is one of vllm, sglang"),
        (["vllm"], "is not NAME=DIR"),
    ):
        with pytest.raises(ValueError, match=why):
            peers_of(asked)


def test_options_of_the_load_without_a_name_are_refused_beside_a_named_one() -> None:
    command = [sys.executable, str(BENCHMARKS / "http_beside_peer.py"), "--load", "drawn", "--isl", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2 and "--isl is for calls without --load" in ended.stderr
