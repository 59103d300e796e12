"""Host memory for the KV of all workers is planned, or refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.launch import host_tiers
from trtx.launch.ports import HOLDER
from trtx.launch.preparation import prepare
from trtx.memory import HostMemory
from trtx.topology import Plan

MIB = 1 << 20


def planned(run_dir: Path, size: int, *more: str) -> Plan:
    asked = (f"kv_cache_config.host_cache_size={size}", *more)
    spec = TopologySpec(model="synthetic:tiny", engine="torch", port=0, overrides=asked, mode="disagg", prefill=2)
    made = prepare(spec, run_dir=run_dir)
    HOLDER.release((made.port, *made.internal_ports))
    return made


def test_each_role_says_how_much_it_takes(tmp_path: Path) -> None:
    reasons = planned(tmp_path, 16 * MIB).reasons
    assert "prefill: 32 MiB of host memory for KV because of kv_cache_config.host_cache_size" in reasons
    assert "decode: 16 MiB of host memory for KV because of kv_cache_config.host_cache_size" in reasons
    assert not any("host memory for KV" in reason for reason in planned(tmp_path, 0).reasons)


def test_each_gpu_of_a_worker_takes_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = "decode.tensor_parallel_size=2"
    reasons = planned(tmp_path, 16 * MIB, two).reasons
    assert "decode: 32 MiB of host memory for KV because of kv_cache_config.host_cache_size" in reasons
    monkeypatch.setattr(host_tiers, "host_memory", lambda: HostMemory(60 * MIB, None, None, None))
    with pytest.raises(UsageError, match="of all workers is 64 MiB together"):
        planned(tmp_path, 16 * MIB, two)


def test_less_than_a_block_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"host_cache_size is 1 bytes, and the smallest host tier of this model has \d+ bytes"
    ):
        planned(tmp_path, 1)


def test_more_than_this_machine_can_give_to_all_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tiers, "host_memory", lambda: HostMemory(40 * MIB, None, None, None))
    with pytest.raises(UsageError, match="of all workers is 48 MiB together, and this machine, or this container, can"):
        planned(tmp_path, 16 * MIB)
