"""From a worker's options to an engine that runs, here the paced one, and what the worker knows of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.engine.tensorrt_llm.arguments import world_size
from trtx.errors import UsageError
from trtx.worker.loading import LoadedEngine, engine_arguments, load, probe_token_id, worker_facts
from trtx.worker.options import WorkerOptions, parse
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import parse as parse_request

MODEL = resolve_checkpoint("synthetic:tiny").path


def options(tmp_path: Path, *flags: str, model: Path = MODEL, role: str = "agg", **config: Any) -> WorkerOptions:
    file = tmp_path / "engine.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    argv = ["--role", role, "--engine", "paced", "--model", str(model), "--served-model-name", "tiny"]
    return parse([*argv, "--engine-config", str(file), *flags])


@contextmanager
def loaded(asked: WorkerOptions) -> Iterator[LoadedEngine]:
    found = load(asked)
    try:
        yield found
    finally:
        assert found.shutdown()


def test_a_worker_knows_of_its_engine_what_it_registers(tmp_path: Path) -> None:
    with loaded(options(tmp_path, max_seq_len=48, max_batch_size=3)) as found:
        facts = found.engine.facts
        assert (facts.context_length, facts.max_batch_size, facts.block_size) == (48, 3, 32)
        assert not found.kv_event_buffer, "a buffer for events is asked of every engine, and this one has no KV"
        assert found.load_seconds >= 0
        assert found.shutdown_seconds == found.api.shutdown_seconds
    with loaded(options(tmp_path, "--shutdown-seconds", "3")) as found:
        assert found.shutdown_seconds == 3


@pytest.mark.parametrize("flag", ["--drain-seconds", "--shutdown-seconds", "--stall-seconds"])
def test_seconds_are_a_number_that_can_be_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    for given in ("nan", "inf", "-inf", "-1", "1e300", "abc"):
        with pytest.raises(SystemExit) as refused:
            options(tmp_path, f"{flag}={given}")
        assert refused.value.code == 2
        assert f"argument {flag}: it is {given}, expected seconds from 0 to 86400\n" in capsys.readouterr().err


def test_a_worker_publishes_what_its_engine_resolved_and_the_gpus_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(tmp_path, "--name", "decode-1", role="decode", max_batch_size=3, max_num_tokens=99)
    given: dict[str | None, tuple[str, ...] | None] = {"": (), " , ": (), None: None, "GPU-of-another-machine": None}
    with loaded(asked) as found:
        for visible, names in given.items():
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
            if visible is None:
                monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
            facts = worker_facts(asked, found.api, found.engine.facts)
            assert facts.gpu_names == facts.gpu_uuids == names, f"CUDA_VISIBLE_DEVICES is {visible!r}"
    assert (facts.name, facts.role, facts.engine) == ("decode-1", "decode", "paced")
    assert (facts.max_batch_size, facts.max_num_tokens, facts.kv_block_size) == (3, 99, 32)
    assert facts.versions.keys() == {"trtx", "ai-dynamo"}, "the paced engine computes with nothing else"


def test_of_an_engine_over_nodes_nobody_takes_one_nodes_gpus_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"GPU {handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with loaded(options(tmp_path)) as found:
        api = replace(found.api, gpus_of=world_size)  # as the engine has it that runs over nodes
        for sizes, names in (((2, 1), ("GPU 0", "GPU 1")), ((2, 2), None), ((4, 1), None)):
            asked = options(tmp_path, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
            facts = worker_facts(asked, api, found.engine.facts)
            assert facts.gpu_names == names
            assert facts.gpu_uuids == (names and ("GPU-0", "GPU-1"))


@pytest.mark.parametrize(
    ("role", "config", "expected"),
    [
        ("agg", {}, {"enable_iter_perf_stats": True, "kv_cache_config": {"event_buffer_max_size": 100_000}}),
        ("prefill", {}, {"cache_transceiver_config": {"backend": "NIXL"}}),
        ("decode", {"cache_transceiver_config": {"backend": "UCX"}}, {"cache_transceiver_config": {"backend": "UCX"}}),
        ("agg", {"enable_iter_perf_stats": False}, {"enable_iter_perf_stats": False}),
        (
            "agg",
            {"kv_cache_config": {"event_buffer_max_size": 7}},
            {"kv_cache_config": {"event_buffer_max_size": 7}},
        ),
        (
            "agg",
            {"kv_cache_config": {"enable_block_reuse": False}},
            {"kv_cache_config": {"enable_block_reuse": False}},
        ),
    ],
)
def test_what_a_worker_needs_is_switched_on_where_the_config_is_silent(
    tmp_path: Path, role: str, config: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    arguments = engine_arguments(options(tmp_path, role=role, **config))
    assert {name: arguments.get(name) for name in expected} == expected
    assert ("cache_transceiver_config" in arguments) is (role != "agg")


def test_an_engine_without_a_vision_encoder_is_named_with_one_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="engine paced has no vision encoder; use --engine torch"):
        load(options(tmp_path, role="encode"))


def test_stop_strings_are_refused_where_nothing_finds_them_and_all_else_is_served(tmp_path: Path) -> None:
    with loaded(options(tmp_path)) as found:
        request = parse_request({"token_ids": [5], "stop_conditions": {"stop": ["END"]}}, context_length=10)
        assert found.text_of(request).feed([5], is_last=True).stop is None
        without = LoadedEngine(found.api, found.engine, None, 0, 0.0, 1.0)
        with pytest.raises(InvalidRequest, match="stop strings need a fast tokenizer"):
            without.text_of(request)


@pytest.mark.parametrize(("stated", "token_id"), [(3, 3), (0, 0), (None, 1), ([4, 5], 1)])
def test_a_canarys_token_is_the_checkpoints_beginning_of_text(tmp_path: Path, stated: Any, token_id: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "bos_token_id": stated}))
    assert probe_token_id(tmp_path) == token_id
