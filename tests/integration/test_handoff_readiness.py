"""A split topology of real workers is ready, and whole again, only where KV really moves between each pair of them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from processes import HTTP
from topology_clients import trtx_serve, wait_until

from trtx.config import TopologySpec
from trtx.errors import LaunchError
from trtx.launch import prepare, serve

SMALL = ("max_seq_len=256", "max_batch_size=4", "kv_cache_config.max_tokens=2048")


def test_workers_whose_kv_does_not_fit_each_other_are_not_ready_and_the_pair_is_named(tmp_path: Path) -> None:
    """As two hosts with other files: one plan for both would have been refused before anything started."""
    spec = TopologySpec(model="synthetic:tiny", engine="torch", mode="disagg", port=0, overrides=SMALL)
    plan = prepare(spec, run_dir=tmp_path / "run")
    other = {**plan.engine_configs["decode"]["kv_cache_config"], "tokens_per_block": 64}
    configs = {**plan.engine_configs, "decode": {**plan.engine_configs["decode"], "kv_cache_config": other}}
    with (
        pytest.raises(LaunchError) as refused,
        serve(replace(plan, engine_configs=configs), on_event=lambda event: None),
    ):
        raise AssertionError("it is said to be ready")
    for words in ("is not ready", "no KV came from prefill-0", "to decode-0", "tokens_per_block is ", "64 on decode"):
        assert words in str(refused.value)


@pytest.mark.proof
def test_a_topology_is_whole_again_once_kv_came_to_the_worker_that_was_started_again() -> None:
    arguments = [word for one in SMALL for word in ("--set", one)]
    with trtx_serve("--engine", "torch", "--model", "synthetic:tiny", "--mode", "disagg", *arguments) as serving:
        plan = serving.wait_ready()
        assert "and KV in its pair of workers" in serving.text()
        config = plan.config_path("decode")
        right = config.read_text()
        values = yaml.safe_load(right)
        values["kv_cache_config"]["tokens_per_block"] = 64
        config.write_text(yaml.safe_dump(values))
        os.kill(serving.pid_of("decode-0"), signal.SIGKILL)
        unproved = "every process is up again, but "
        wait_until(lambda: unproved in serving.text(), 60, "told of the new worker")
        assert f"{unproved}no KV came from prefill-0" in serving.text()
        assert "whole again" not in serving.text()

        config.write_text(right)
        os.kill(serving.pid_of("decode-0"), signal.SIGKILL)
        again = "the topology is whole again: a request went through, and KV in its pair of workers"
        wait_until(lambda: again in serving.text(), 60, "whole again")
        decode = next(worker for worker in plan.workers if worker.role == "decode")
        metrics = HTTP.get(f"http://127.0.0.1:{decode.system_port}/metrics").text
        (read,) = (line for line in metrics.splitlines() if "trtx_pair_handoffs_total" in line and '"read"' in line)
        assert 'prefill="prefill-0"' in read and float(read.rpartition(" ")[2]) >= 1
