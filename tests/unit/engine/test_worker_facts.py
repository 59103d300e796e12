"""What a worker publishes is one class: what it writes, the frontend shows and a bench reads, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.engine import ENGINE_KINDS
from trtx.engine.worker_facts import KEY, PublishedWorker, Role, WorkerFacts, of_body, to_body

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.none() | st.integers(0, 2**40)
FACTS = st.builds(
    WorkerFacts,
    name=NAMES,
    role=st.sampled_from(get_args(Role)),
    engine=st.sampled_from(ENGINE_KINDS),
    versions=st.dictionaries(NAMES, NAMES, max_size=3),
    gpu_names=st.none() | st.lists(NAMES, max_size=3).map(tuple),
    tensor_parallel_size=st.integers(1, 64),
    context_length=st.integers(1, 2**30),
    max_batch_size=NUMBER,
    max_num_tokens=NUMBER,
    kv_block_size=NUMBER,
    kv_blocks=NUMBER,
    metrics_port=NUMBER,
    gpu_uuids=st.none() | st.lists(NAMES, max_size=3).map(tuple),
)
WRONG: dict[str, Any] = {  # of each field, a value of another type
    "name": 7,
    "role": "frontend",
    "engine": "vllm",
    "versions": ["trtx"],
    "gpu_names": "H100",
    "tensor_parallel_size": "2",
    "context_length": None,
    "max_batch_size": 1.5,
    "max_num_tokens": "many",
    "kv_block_size": [],
    "kv_blocks": "99",
    "metrics_port": "9",
    "deterministic": 1,
    "gpu_uuids": "GPU-1",
    "schema": 2,
}


@settings(max_examples=examples(50), derandomize=True, deadline=None)
@given(facts=FACTS, worker_id=st.integers(0, 2**64 - 1))
def test_what_is_written_is_what_is_read(facts: WorkerFacts, worker_id: int) -> None:
    card = json.loads(json.dumps({"other": 1, **facts.to_runtime_data()}))  # as it passes through Dynamo
    assert card[KEY].keys() == {field.name for field in dataclasses.fields(WorkerFacts)}
    assert WorkerFacts.of_runtime_data(card) == facts
    worker = PublishedWorker(worker_id, "tiny", facts)
    assert of_body(json.dumps(to_body([worker, worker])).encode()) == (worker, worker)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WorkerFacts)])
def test_another_form_is_nobodys_facts(field: str) -> None:
    assert field in WRONG, f"add a value that {field} can't have to WRONG"
    facts = WorkerFacts("agg-0", "agg", "paced", {}, (), 1, 8, None, None, None, None)
    published = facts.to_runtime_data()[KEY] | {field: WRONG[field]}
    assert WorkerFacts.of_runtime_data({KEY: published}) is None
    worker = {"worker_id": 1, "model": "tiny", "facts": published}
    assert of_body(json.dumps([worker]).encode()) is None


@pytest.mark.parametrize("other", [None, {}, [], "trtx", {"spec_decode": {"nextn": 1}}, {KEY: None}, {KEY: []}])
def test_a_worker_of_others_has_none(other: Any) -> None:
    assert WorkerFacts.of_runtime_data(other) is None
