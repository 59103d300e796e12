"""Each field of what a run is asked does something: aiperf is called otherwise, or another topology is planned."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtx.bench import LoadSpec, Target
from trtx.bench.aiperf import command
from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.experiment import Attach
from trtx.experiment.targets import attached_target
from trtx.launch import preparation
from trtx.topology import Gpu, Machine

# Other values than the defaults. A new field gets one here, and acts where the assertion says.
LOADS: dict[str, Any] = {
    "concurrency": (2, 4), "isl": 99, "osl": 99, "request_count": 99, "warmup_request_count": 99, "trials": 2,
    "seed": 99, "streaming": False, "ignore_eos": False, "request_timeout_s": 99.0, "extra_inputs": {"top_p": 0.5},
}  # fmt: skip
TOPOLOGIES: dict[str, Any] = {
    "model": "synthetic:tiny", "served_model_name": "other", "mode": "disagg", "workers": 2, "prefill": 2, "decode": 2,
    "tp": 2, "engine": "torch", "gpus": (1,), "host": "localhost", "port": "free", "router_mode": "kv",
    "router_args": ("--router-temperature", "0.5"), "engine_configs": "own", "overrides": ("max_batch_size=3",),
}  # fmt: skip
ATTACHED: dict[str, Any] = {"model": "b", "tokenizer": "other", "gpu_count": 4}
FOUR_GPUS = Machine(tuple(Gpu(index, f"GPU-{index}", "NVIDIA H100 80GB HBM3", 80 * 2**30) for index in range(4)), 16)


@pytest.mark.parametrize("field", LoadSpec.model_fields)
def test_a_field_of_a_load_changes_what_aiperf_is_called_with(field: str) -> None:
    assert field in LOADS, f"give {field} of LoadSpec another value than its default in LOADS"

    def called(spec: LoadSpec) -> tuple[str, ...]:
        return command(Target("http://h", "m", Path("t"), "agg"), spec, spec.loads, Path("staging"))

    assert called(LoadSpec()) != called(LoadSpec(**{field: LOADS[field]})), (
        f"LoadSpec.{field} reaches no request: act on it in command() of trtx/bench/aiperf.py, or in LoadSpec.loads or "
        "LoadSpec.request_body"
    )


@pytest.mark.parametrize("field", TopologySpec.model_fields)
def test_a_field_of_a_topology_changes_its_plan_or_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert field in TOPOLOGIES, f"give {field} of TopologySpec another value than its default in TOPOLOGIES"
    given = TOPOLOGIES[field]
    if field == "engine_configs":
        (tmp_path / "agg.yaml").write_text("max_batch_size: 3\n")
        given = {"agg": tmp_path / "agg.yaml"}
    elif field == "port":
        given = preparation.HOLDER.hold("127.0.0.1", 0)
    on_gpus = field in ("tp", "gpus")
    monkeypatch.setattr(preparation, "probe", lambda: FOUR_GPUS if on_gpus else Machine(cpu_cores=4))

    def planned(**fields: Any) -> str:
        spec = TopologySpec(
            **{"engine": "torch" if on_gpus else "paced", "mode": mode, "port": 0, "model": "synthetic:tiny-trained"}
            | fields
        )
        try:
            plan = preparation.prepare(spec, run_dir=tmp_path / "run")
        except UsageError as refusal:
            assert on_gpus and "torch" in str(refusal)
            return str(refusal)
        preparation.HOLDER.release((plan.port, *plan.internal_ports))
        text = re.sub(r"trtx-[0-9a-f]{8}", "NAME", json.dumps(plan.to_json()))
        for number in (*plan.internal_ports, *(() if "port" in fields else (plan.port,))):
            text = re.sub(rf"\b{number}\b", "PORT", text)
        return text

    mode = "disagg" if field in ("prefill", "decode") else "agg"
    usual = planned()
    assert usual == planned()
    assert usual != planned(**{field: given}), (
        f"TopologySpec.{field} changes no plan: act on it in trtx/topology (planner.py, commands.py) or in "
        "trtx/launch/preparation.py"
    )


@pytest.fixture(scope="module")
def models() -> Iterator[str]:
    """A server that lists two models."""

    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "a"}, {"id": "b"}]}')

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("field", sorted(Attach.model_fields.keys() - {"url"}))
def test_a_field_of_an_attachment_changes_whom_the_load_meets(field: str, models: str) -> None:
    assert field in ATTACHED, f"give {field} of Attach another value than its default in ATTACHED"
    tokenizers = {name: str(resolve_checkpoint(f"synthetic:{name}").path) for name in ("tiny", "tiny-trained")}
    given = tokenizers["tiny"] if field == "tokenizer" else ATTACHED[field]
    usual = {"url": models, "model": "a", "tokenizer": tokenizers["tiny-trained"]}
    assert attached_target(Attach(**usual)) != attached_target(Attach(**usual | {field: given})), (
        f"Attach.{field} changes no Target: act on it in attached_target() of trtx/experiment/targets.py"
    )
