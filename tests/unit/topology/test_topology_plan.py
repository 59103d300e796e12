"""Planning: placement, ports, commands. Pure, so every claim is checked on values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_topologies import machine, plan_of

from trtx.config import TopologySpec
from trtx.config.topology import MAX_WORKERS
from trtx.errors import UsageError
from trtx.topology import Machine, Plan, check_size


@st.composite
def askable(draw: st.DrawFn) -> tuple[Machine, dict[str, Any]]:
    """A machine with some NVLink pairs, and a topology that fits on it."""
    count = draw(st.integers(1, 8))
    pairs = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] < p[1])))
    if draw(st.booleans()) or count == 1:
        spec: dict[str, Any] = {"mode": "agg", "workers": draw(st.integers(1, count))}
    else:
        prefill = draw(st.integers(1, count - 1))
        spec = {"mode": "disagg", "prefill": prefill, "decode": draw(st.integers(1, count - prefill))}
    return machine(count, tuple(sorted(pairs))), spec


@given(askable())
def test_no_gpu_serves_two_workers_and_no_port_is_used_twice(asked: tuple[Machine, dict[str, Any]]) -> None:
    there, spec = asked
    made = plan_of(there, **spec)
    used = [index for worker in made.workers for index in worker.gpu_indices]
    assert len(used) == len(set(used)) == made.gpu_count == made.worker_count
    ports = [made.port, *made.internal_ports]
    assert len(ports) == len(set(ports))
    assert {worker.system_port for worker in made.workers} < set(made.internal_ports)
    assert len({process.name for process in made.processes}) == len(made.processes)


@given(askable())
def test_the_same_arguments_give_the_same_plan_and_it_survives_json(asked: tuple[Machine, dict[str, Any]]) -> None:
    there, spec = asked
    made = plan_of(there, **spec)
    assert made == plan_of(there, **spec)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"mode": "agg", "encode": 2}, {"encode": 2, "agg": 1}),
        ({"mode": "disagg", "encode": 1}, {"encode": 1, "prefill": 1, "decode": 1}),
        ({"mode": "agg"}, {"agg": 1}),
    ],
)
def test_encode_workers_have_gpus_of_their_own_in_either_mode(spec: dict[str, Any], expected: dict[str, int]) -> None:
    made = plan_of(machine(4), **spec)
    assert made.expected_workers() == expected  # of which the topology waits for every one
    used = [index for worker in made.workers for index in worker.gpu_indices]
    assert len(used) == len(set(used)) == sum(expected.values())
    encoders = [worker for worker in made.workers if worker.role == "encode"]
    assert [worker.name for worker in encoders] == [f"encode-{index}" for index in range(expected.get("encode", 0))]
    assert all(("--role", "encode") in zip(one.argv, one.argv[1:], strict=False) for one in encoders)


@pytest.mark.parametrize(
    ("spec", "gpus", "beside"),
    [
        ({"mode": "agg", "encode_shared": 1}, 1, {"encode-0": "agg-0"}),
        ({"mode": "agg", "workers": 2, "encode_shared": 3}, 2,
         {"encode-0": "agg-0", "encode-1": "agg-1", "encode-2": "agg-0"}),
        ({"mode": "disagg", "prefill": 2, "encode": 1, "encode_shared": 2}, 4,
         {"encode-1": "prefill-0", "encode-2": "prefill-1"}),
    ],
)  # fmt: skip
def test_encode_workers_that_share_are_with_who_takes_embeddings(
    spec: dict[str, Any], gpus: int, beside: dict[str, str]
) -> None:
    made = plan_of(machine(4), **spec)
    by_name = {worker.name: worker for worker in made.workers}
    assert made.gpu_count == gpus == len({index for worker in made.workers for index in worker.gpu_indices})
    assert made.expected_workers()["encode"] == spec.get("encode", 0) + spec["encode_shared"]
    for name, other in beside.items():
        assert by_name[name].gpu_indices == by_name[other].gpu_indices
        assert by_name[name].env["CUDA_VISIBLE_DEVICES"] == by_name[other].env["CUDA_VISIBLE_DEVICES"] != ""
        assert by_name[name] in made.sharers(by_name[other])
        assert any(
            r.startswith(f"{name} on ") and r.endswith(f"--encode-shared, together with {other}") for r in made.reasons
        )
    lonely = [worker for worker in made.workers if worker.name not in {*beside, *beside.values()}]
    assert not [worker.name for worker in lonely if made.sharers(worker)]
    assert all(
        ("--encoders", "remote") in zip(one.argv, one.argv[1:], strict=False)
        for one in made.workers
        if one.role != "encode"
    )
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_without_gpus_an_encode_worker_that_shares_is_one_like_any_other() -> None:
    made = plan_of(machine(0), mode="disagg", encode=1, encode_shared=1)
    assert made.expected_workers() == {"encode": 2, "prefill": 1, "decode": 1}
    assert not any(made.sharers(worker) for worker in made.workers)


@pytest.mark.parametrize("engine", ["paced", "simulated"])
def test_an_engine_whose_workers_take_no_images_has_no_encode_workers(engine: str) -> None:
    with pytest.raises(UsageError, match=f"--encode 1 has no effect with --engine {engine}, wh.*leave it out"):
        plan_of(machine(2), engine=engine, encode=1)


@pytest.mark.parametrize(
    ("largest", "body_mib", "says"),
    [
        (1 << 20, 45, None),
        (32 << 20, 45, None),
        (100_000_000, 130, "bodies of up to 130 MiB because a data: URL of --max-media-bytes 100000000"),
        (199753728, 256, "bodies of up to 256 MiB"),
        (4 << 30, 256, "at most 199753728 bytes, because"),
    ],
)
def test_a_body_holds_the_largest_medium_in_base64_and_a_message_holds_the_body(
    largest: int, body_mib: int, says: str | None
) -> None:
    made = plan_of(machine(1), media={"max_media_bytes": largest, "media_memory_bytes": 8 << 30})
    frontend = next(process for process in made.processes if process.role == "frontend")
    assert frontend.env["DYN_HTTP_BODY_LIMIT_MB"] == str(body_mib)
    assert int(frontend.env["DYN_TCP_REQUEST_TIMEOUT"]) > 60, "a worker that is slow to read a body is not a dead one"
    inline = min(largest, 199753728)
    assert (inline + 2) // 3 * 4 + (1 << 20) <= body_mib << 20
    for process in made.processes:
        assert 5 * body_mib << 20 < int(process.env["DYN_TCP_MAX_MESSAGE_SIZE"]) < 1 << 32
    told = [reason for reason in made.reasons if "--max-media-bytes" in reason]
    assert len(told) == (says is not None) and all(str(says) in reason for reason in told)


def test_children_see_their_gpus_by_uuid() -> None:
    made = plan_of(machine(2), mode="agg", workers=2)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["GPU-0000", "GPU-0001"]


def test_a_prefill_and_its_decode_worker_are_nvlink_neighbours() -> None:
    made = plan_of(machine(4, ((0, 2), (1, 3))), mode="disagg", prefill=2, decode=2)
    gpus = {worker.name: worker.gpu_indices[0] for worker in made.workers}
    assert {gpus["prefill-0"], gpus["decode-0"]} == {0, 2}
    assert {gpus["prefill-1"], gpus["decode-1"]} == {1, 3}


def test_tensor_parallel_groups_are_nvlink_neighbours() -> None:
    made = plan_of(machine(4, ((0, 3), (1, 2))), engine="tensorrt-llm", mode="agg", workers=2, tp=2)
    assert [set(worker.gpu_indices) for worker in made.workers] == [{0, 3}, {1, 2}]
    assert made.engine_configs["agg"]["tensor_parallel_size"] == 2


def test_gpus_are_indices_into_what_the_caller_sees() -> None:
    made = plan_of(machine(4), mode="agg", workers=2, gpus=(3, 1))
    assert [worker.gpu_indices for worker in made.workers] == [(3,), (1,)]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"mode": "disagg", "prefill": 2, "decode": 2}, ("4 GPUs", "2 are visible", "--prefill 1 --decode 1")),
        ({"mode": "agg", "workers": 3}, ("3 GPUs", "2 are visible", "--workers 2")),
        ({"mode": "agg", "gpus": (0, 5)}, ("no GPU 5", "0,1, which are visible")),
        ({"mode": "agg", "gpus": (1, 1)}, ("twice",)),
        ({"mode": "disagg", "gpus": (1,)}, ("2 GPUs", "1 are named by --gpus", "--mode agg")),
        ({"mode": "agg", "workers": 2, "tp": 2}, ("2 agg of 2 GPUs each", "4 GPUs", "2 are visible", "--workers 1")),
        ({"mode": "disagg", "tp": 2}, ("1 prefill + 1 decode of 2 GPUs each", "4 GPUs", "2 are visible")),
        (
            {"mode": "disagg", "encode": 1},
            ("1 encode + 1 prefill + 1 decode", "3 GPUs", "leave --encode out", "--encode-shared 1 in its place"),
        ),
        ({"mode": "disagg", "prefill": 2, "encode_shared": 1}, ("2 prefill + 1 decode of", "3 GPUs")),
        ({"mode": "agg", "workers": 3, "encode": 1}, ("1 encode + 3 agg", "leave --encode out", "ask for fewer")),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_a_way_out(spec: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(machine(2), **spec)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "context_parallel_size"])
def test_the_torch_engine_splits_layers_alone(name: str) -> None:
    with pytest.raises(
        UsageError, match="only splits layers, not the model into stages or the sequences.*use --tp alone"
    ):
        plan_of(machine(4), values={name: 2})


def test_ranks_of_the_torch_engine_share_the_cpu_where_no_gpu_is_visible() -> None:
    (worker,) = plan_of(machine(0, cores=8), mode="agg", tp=2).workers
    assert (worker.env["OMP_NUM_THREADS"], worker.gpu_indices) == ("4", ())


def test_gpus_on_a_machine_without_any_are_refused() -> None:
    with pytest.raises(UsageError, match="no GPU is visible"):
        plan_of(machine(0), mode="agg", gpus=(0,))


def test_without_gpu_half_the_cores_are_shared_and_no_gpu_is_visible() -> None:
    made = plan_of(machine(0, cores=9), mode="disagg", prefill=1, decode=1)
    for worker in made.workers:
        assert worker.env["OMP_NUM_THREADS"] == "2"
        assert worker.env["CUDA_VISIBLE_DEVICES"] == ""
    assert made.gpu_count == 0
    crowded = plan_of(machine(0, cores=2), mode="agg", workers=3)
    assert {worker.env["OMP_NUM_THREADS"] for worker in crowded.workers} == {"1"}


def test_the_simulated_engine_takes_its_limits_from_the_engine_config_and_no_gpu() -> None:
    values = {"max_batch_size": 16, "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 1024}, "speedup_ratio": 9}
    made = plan_of(machine(1), engine="simulated", values=values, mode="disagg", prefill=2, decode=2)
    assert made.gpu_count == 0
    argv = " ".join(made.workers[0].argv)
    assert "-m dynamo.mocker --engine-type trtllm --disaggregation-mode prefill" in argv
    for flag in ("--max-num-seqs 16", "--block-size 16", "--num-gpu-blocks-override 64", "--speedup-ratio 9"):
        assert flag in argv


def test_every_process_of_a_topology_shares_its_planes_and_listens_on_loopback() -> None:
    made = plan_of(machine(0), mode="disagg")
    for process in made.processes:
        assert process.env["DYN_NAMESPACE"] == "trtx-test"
        assert process.env["DYN_FILE_KV"] == "/scratch/kv"
        assert process.env["DYN_TCP_RPC_HOST"] == "127.0.0.1"
        assert "tcp://127.0.0.1:9000" in process.env["DYN_ZMQ_BROKER_URL"]
        assert f"{made.marker}".split("=")[0] in process.env
    assert all(worker.env["DYN_SYSTEM_HOST"] == "127.0.0.1" for worker in made.workers)


def test_an_open_host_is_said_and_local_clients_still_use_loopback() -> None:
    made = plan_of(machine(0), mode="agg", host="0.0.0.0")
    assert not made.is_local
    assert made.url == "http://127.0.0.1:8000"
    assert any("0.0.0.0" in reason for reason in made.reasons)


def test_a_plan_of_another_schema_version_is_refused() -> None:
    document = plan_of(machine(0), mode="agg").to_json() | {"schema_version": 99}
    with pytest.raises(ValueError, match="99"):
        Plan.from_json(document)


def test_a_worker_gets_a_gpu_for_each_rank_of_its_world() -> None:
    values = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "context_parallel_size": 2}
    made = plan_of(machine(8), engine="tensorrt-llm", values=values)
    assert len(made.workers[0].gpu_indices) == 8
    assert made.engine_configs["agg"]["tensor_parallel_size"] == 2


def test_tp_becomes_autodeploys_world_size() -> None:
    made = plan_of(machine(4), engine="tensorrt-llm", values={"backend": "_autodeploy"}, tp=4)
    assert made.engine_configs["agg"] == {"backend": "_autodeploy", "world_size": 4}
    assert len(made.workers[0].gpu_indices) == 4


def test_tp_beside_pipeline_stages_is_the_tensor_parallel_size_alone() -> None:
    made = plan_of(machine(4), engine="tensorrt-llm", values={"pipeline_parallel_size": 2}, tp=2)
    assert made.engine_configs["agg"] == {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    assert len(made.workers[0].gpu_indices) == 4


@pytest.mark.parametrize(
    ("gpus", "values", "version", "spec", "words"),
    [
        (0, {}, "1.3.0rc22", {}, ("engine tensorrt-llm needs a GPU",)),
        (
            4,
            {"tensor_parallel_size": 4, "gpus_per_node": 2},
            "1.3.0rc22",
            {},
            ("asks for 4 GPUs", "gpus_per_node is 2"),
        ),
        (
            2,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "1.3.0rc22",
            {},
            ("need 4 GPUs, but 2 are visible",),
        ),
        (4, {"pipeline_parallel_size": 2}, "1.2.1", {"mode": "disagg"}, ("prefill", "1.2.1", "1.3.0rc10")),
        (
            8,
            {"tensor_parallel_size": 4},
            None,
            {"gpus": (0, 1)},
            ("1 agg of 4 GPUs each need 4 GPUs, but 2 are named",),
        ),
    ],
)
def test_a_world_that_the_engine_can_not_have_is_refused_with_numbers(
    gpus: int, values: dict[str, Any], version: str | None, spec: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(machine(gpus), engine="tensorrt-llm", values=values, engine_version=version, **spec)
    for word in words:
        assert word in str(refused.value)


def test_pipeline_stages_on_prefill_are_planned_where_they_work() -> None:
    values = {"pipeline_parallel_size": 2}
    made = plan_of(machine(4), engine="tensorrt-llm", values=values, engine_version="1.3.0rc10", mode="disagg")
    assert [len(worker.gpu_indices) for worker in made.workers] == [2, 2]


def test_a_build_that_needs_no_gpu_is_planned_without_one() -> None:
    made = plan_of(machine(0), engine="tensorrt-llm", engine_version="1.3.0rc22+cpu", mode="disagg")
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["", ""]


def test_the_kv_router_gets_weights_that_routers_of_other_modes_do_not_and_typed_flags_win() -> None:
    def frontend(**spec: Any) -> str:
        return " ".join(plan_of(machine(0), workers=2, **spec).processes[0].argv)

    assert "--router-prefill-load-scale" not in frontend()
    assert frontend(router_mode="kv").count("--router-prefill-load-scale") == 1
    # argparse takes the last
    assert frontend(router_mode="kv", router_args=("--router-prefill-load-scale", "1")).endswith("-load-scale 1")


def test_a_policy_of_prefill_on_decode_workers_is_the_routers_where_there_are_prefill_workers() -> None:
    def flags(**spec: Any) -> list[str]:
        argv = plan_of(machine(0), router_mode="kv", conditional_disagg="isl_bounding,eff_isl_threshold=9", **spec)
        return [word for word in argv.processes[0].argv if "conditional" in word or "isl" in word]

    settings = '{"policy": "isl_bounding", "eff_isl_threshold": 9}'
    name = "--router-conditional-disagg"
    assert flags(mode="disagg") == [name, f"{name}-config", settings]
    assert flags(mode="agg") == [], "as in a sweep over both modes"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, ("'isl_bounding' has no effect with --router-mode round-robin", "add --router-mode kv")),
        ({"router_mode": "kv", "engine": "paced"}, ("has no effect with --engine paced, which computes no prompts",)),
        (
            {"router_mode": "kv", "values": {"kv_cache_config": {"enable_block_reuse": False}}},
            ("compares what decode workers cache", "enable_block_reuse is false"),
        ),
        (
            {"router_mode": "kv", "router_args": ("--router-conditional-disagg",)},
            ("--router-args has --router-conditional-disagg, which trtx sets itself, from --conditional-disagg",),
        ),
    ],
)
def test_a_policy_that_could_never_take_effect_is_refused(spec: dict[str, Any], words: tuple[str, ...]) -> None:
    engine, values = spec.pop("engine", "torch"), spec.pop("values", None)
    with pytest.raises(UsageError) as refused:
        plan_of(machine(0), engine=engine, values=values, mode="disagg", conditional_disagg="isl_bounding", **spec)
    for word in words:
        assert word in str(refused.value)


def test_temporary_files_of_every_process_go_where_the_topology_ends() -> None:
    found = plan_of(machine(0), workers=2)
    assert {process.env["TMPDIR"] for process in found.processes} == {str(found.scratch_dir)}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--http-host", "0.0.0.0"), "--http-host, which trtx sets itself, from --host"),
        (("--http-port=9",), "--http-port, which trtx sets itself, from --port"),
        (("--http-po", "9"), "--http-po (--http-port)"),
        (("--router-temperature", "0.5", "--router-mode", "kv"), "--router-mode"),
        (("--namesp", "x"), "--namesp (--namespace)"),
        (("--discovery-backend", "etcd"), "isolate topologies from each other"),
        (("--tls-cert-path=cert.pem",), "from --tls-cert"),
        (("-i",), "would serve no HTTP"),
        (("--help",), "exits at once"),
    ],
)
def test_flags_of_the_frontend_that_are_trtxs_own_are_refused(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(machine(0), router_args=words)
    assert named in str(refused.value)
    assert "leave it out" in str(refused.value)


def test_a_flag_that_only_begins_like_one_of_trtxs_own_is_handed_on() -> None:
    argv = plan_of(machine(0), router_args=("--router-temperature", "0.5", "--migration-limit", "1")).processes[0].argv
    assert argv[-4:] == ("--router-temperature", "0.5", "--migration-limit", "1")


def test_more_workers_than_a_topology_can_have_are_refused_with_the_limit() -> None:
    with pytest.raises(
        UsageError, match=f"--prefill 200 and --decode 57: a topology has at most {MAX_WORKERS} workers"
    ):
        check_size(TopologySpec(mode="disagg", prefill=200, decode=57))
    check_size(TopologySpec(workers=MAX_WORKERS))


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x1b[31mred", "a\u2028b"])
def test_a_name_with_control_characters_is_no_models_name(name: str) -> None:
    with pytest.raises(UsageError, match="expected only printable characters") as refused:
        plan_of(machine(0), served_model_name=name)
    assert str(refused.value).isprintable()
    assert plan_of(machine(0), served_model_name="Qwen/Qwen3-0.6B é").model == "Qwen/Qwen3-0.6B é"


@pytest.mark.parametrize("mode", ["agg", "disagg"])
@pytest.mark.parametrize(("engine", "module"), [("torch", "trtx.worker"), ("simulated", "trtx.worker.simulated")])
def test_parsers_and_the_chat_template_reach_every_worker_and_the_maker_of_prompts(
    mode: str, engine: str, module: str
) -> None:
    asked = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "chat_template": Path("/mine.jinja")}
    made = plan_of(machine(0), engine=engine, mode=mode, **asked)
    file = "/runs/one/serve/configs/chat_template.jinja"
    for worker in made.workers:
        argv = " ".join(worker.argv)
        assert worker.argv[2] == module
        assert f"--tool-call-parser hermes --reasoning-parser qwen3 --chat-template {file}" in argv
    assert f"--prompts-template {file}" in " ".join(made.frontends[0].argv)


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_a_worker_without_parsers_has_no_flag_of_them(parser: str) -> None:
    made = plan_of(machine(0), engine="simulated", tool_call_parser=parser, reasoning_parser=parser)
    assert made.workers[0].argv[2] == "dynamo.mocker"
    flags = {word for process in made.processes for word in process.argv if word.startswith("--")}
    assert not flags & {"--tool-call-parser", "--reasoning-parser", "--chat-template", "--prompts-template"}
