"""Faults that tests ask of the stand-in: each in a process of its own, as an engine's death is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("only_standin")

FATAL = """
import json, os, psutil
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.utils import RequestError
llm = LLM(MODEL, tensor_parallel_size=2, max_batch_size=2, enable_attention_dp=True, enable_iter_perf_stats=True,
          kv_cache_config={"event_buffer_max_size": 100})
ranks = [p for p in psutil.Process().children() if "tensorrt_llm-rank" in p.cmdline()]
names = {p.pid: p.cmdline()[-1] for p in ranks}
params = SamplingParams(max_tokens=2)
llm.generate([7] * 40, params)
rows, events = llm.get_stats(1), llm.get_kv_cache_events(1)
said = []
endless = SamplingParams(max_tokens=100_000, ignore_eos=True)  # it can't end before its engine does
for _ in range(2):
    try:
        llm.generate("7", endless)
    except RequestError:
        raise
    except RuntimeError as error:
        said.append(str(error))
health, fatal = llm._check_health(), str(llm._executor._fatal_error)
llm.shutdown()
left = [p.pid for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
print(json.dumps({"said": said, "health": health, "fatal": fatal, "names": sorted(names.values()), "left": left,
                  "rows": [[row["attentionDpRank"], row["numActiveRequests"]] for row in rows[:2]],
                  "events": [[e["attention_dp_rank"], e["event_id"], e["data"]["type"]] for e in events]}))
"""
REFUSING = """
import json, os, psutil, threading
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.utils import RequestError
llm = LLM(MODEL, max_batch_size=2, kv_cache_config={"event_buffer_max_size": 100})
llm.generate([5] * 70, SamplingParams(max_tokens=200, ignore_eos=True))
ids = [event["event_id"] for event in llm.get_kv_cache_events(1)]
engine = [p for p in psutil.Process().children() if "trtx.torch_engine.core.process" in p.cmdline()][0]
running = llm.generate_async([5] * 70, SamplingParams(max_tokens=100_000, ignore_eos=True))
try:
    llm.generate("7")
    said = None
except RequestError as error:
    said = str(error)
health = llm._check_health()
engine.kill()
try:
    running.result()
    killed = None
except RuntimeError as error:
    killed = type(error).__name__
after = llm._check_health()
ending = threading.Thread(target=llm.shutdown, daemon=True)
ending.start()
ending.join(0.3)
print(json.dumps({"ids": ids, "said": said, "health": health, "killed": killed, "after": after,
                  "hangs": ending.is_alive()}), flush=True)
os._exit(0)
"""
OLD = """
import json
from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.auto_deploy import LLM
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import DisaggregatedParams
llm = LLM(MODEL, max_batch_size=2, world_size=1, kv_cache_config={"event_buffer_max_size": 100})
try:
    llm.get_kv_cache_events(0)
    said = None
except AssertionError as error:
    said = str(error)
output = llm.generate("7", disaggregated_params=DisaggregatedParams(request_type="context_and_generation"))
found = {"said": said, "finished": output.finished, "events": len(llm.get_kv_cache_events(0)),
         "capacity": hasattr(llm, "get_kv_cache_capacity"), "backend": llm.args.backend}
try:
    llm.generate("7", disaggregated_params=DisaggregatedParams(request_type="context_only"))
except RequestError:
    raise
except RuntimeError as error:
    found["without_transceiver"] = str(error)
found["fatal"] = type(llm._executor._fatal_error).__name__
llm.shutdown()
print(json.dumps(found))
"""


@pytest.mark.proof
def test_a_fatal_error_on_two_attention_dp_ranks_and_a_rank_that_stays(in_child: Callable[..., Any]) -> None:
    found = in_child(FATAL, STANDIN_TRTLLM_FAULT="fatal-after:2,leave-rank", CUDA_VISIBLE_DEVICES="0,1")
    for pid in found["left"]:
        psutil.Process(pid).kill()
    assert "illegal memory access" in found["said"][0]
    assert found["said"][1] == "LLM is shutting down"
    assert "illegal memory access" in found["fatal"]
    assert not found["health"]
    assert found["names"] == ["1/2", "left"]
    assert len(found["left"]) == 1
    assert [rank for rank, _ in found["rows"]] == [0, 1]
    assert found["events"] == [[0, 0, "created"], [1, 0, "created"], [0, 1, "stored"]]


def test_refused_requests_lost_events_and_a_shutdown_that_hangs(in_child: Callable[..., Any]) -> None:
    found = in_child(REFUSING, STANDIN_TRTLLM_FAULT="request-error-after:3,drop-events,hang-on-shutdown")
    assert "request 3 is refused" in found["said"]
    assert found["health"]
    assert (found["killed"], found["after"]) == ("RuntimeError", False)
    assert found["hangs"]
    assert sorted(set(range(found["ids"][-1] + 1)) - set(found["ids"])) == list(range(4, found["ids"][-1] + 1, 5))


@pytest.fixture(scope="module")
def old(in_child: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = in_child(OLD, STANDIN_TRTLLM_VERSION="1.2.1")
    return found


def test_autodeploy_on_an_old_version(old: dict[str, Any]) -> None:
    assert "not properly instantiated" in old["said"]
    assert old["finished"]
    assert old["events"] >= 1
    assert not old["capacity"]
    assert old["backend"] == "_autodeploy"


def test_a_context_without_a_transceiver_ends_the_engine(old: dict[str, Any]) -> None:
    assert "kv_cache_transceiver is disabled" in old["without_transceiver"]
    assert old["fatal"] == "AssertionError"


def test_an_unknown_fault_is_refused(in_child: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match="STANDIN_TRTLLM_FAULT has 'explode'; expected fatal-after"):
        in_child("import tensorrt_llm", STANDIN_TRTLLM_FAULT="explode")
