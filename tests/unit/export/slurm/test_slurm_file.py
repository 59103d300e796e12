"""What the batch file holds: bash takes it, and makes of it the very words of the plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trtx.config import TopologySpec, recipe_files
from trtx.errors import UsageError
from trtx.export.slurm import JobSpec, export
from trtx.export.slurm.planning import plan_job
from trtx.export.slurm.quoting import Shell, word
from trtx.export.slurm.stand_ins import ADDRESSES, DEVICE, RUN_DIR, SCRATCH_DIR, variables
from trtx.topology import ProcessSpec

HOSTILE = 'it\'s "$(touch pwned)" `touch pwned` \\ ${HOME} * # é'
NODE = {  # what a step knows on its node
    "LOCAL": "/tmp/local",
    "HEAD": "10.0.0.1",
    "SLURM_JOB_ID": "42",
    "SLURM_SUBMIT_DIR": "/shared",
    "SLURMD_NODENAME": "node1",
    "PATH": os.environ["PATH"],
}


def written(spec: dict[str, Any] | None = None, **job: Any) -> str:
    asked = TopologySpec(**{"model": "synthetic:tiny-trained", "engine": "torch", **(spec or {})})
    (file,) = export(asked, JobSpec(**{"gpus_per_node": 0, **job})).files
    return file.text


def run_bash(text: str, script: str, tmp_path: Path, **environment: str) -> str:
    """``script`` after the definitions of the file, in an empty directory."""
    path = tmp_path / "definitions.sh"
    path.write_text(text.partition("\ncase ${1:-job} in\njob)")[0])
    where = tmp_path / "empty"
    where.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", f'. "{path}"\nADDRESS=10.0.0.7 DEVICE=ib0\n{script}'],
        env={**NODE, **environment},
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(where.iterdir()) == [], "something in the file was run"
    return done.stdout


CASES = {
    "agg": ({}, {}),
    "disagg": ({"mode": "disagg", "prefill": 2, "router_mode": "kv"}, {"nodes": 2, "gpus_per_node": 4, "frontends": 2}),
    "bench": ({}, {"bench": ("--concurrency", "1,8"), "partition": "gpu", "account": "me", "sbatch": ("--qos=a b",)}),
    "container": ({}, {"container_image": HOSTILE, "container_mounts": "/data:/data", "python": "python3"}),
    "several nodes": (
        {"engine": "tensorrt-llm", "mode": "disagg", "tp": 4},
        {
            "gpus_per_node": 2,
            "mpi": "pmi2",
            "interface": "ib0",
            "ucx_devices": "mlx5_0:1,mlx5_1:1",
            "bench": ("--concurrency", "1"),
            "bench_files": (Path("/data/of the job"),),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bash_reads_it_and_nothing_is_left_open(case: str, tmp_path: Path) -> None:
    text = written(*CASES[case][:1], **CASES[case][1])
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False).stderr == ""
    if (shellcheck := shutil.which("shellcheck")) is not None:
        # Functions called by name, A && B || C with nothing in B that fails, a $ that NATS reads, and the device of a
        # node where others were named.
        left_out = "SC2329,SC2317,SC2015,SC2016,SC2034"
        done = subprocess.run([shellcheck, "-s", "bash", "-e", left_out, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    for stand_in in (*ADDRESSES, DEVICE, str(RUN_DIR), str(SCRATCH_DIR)):
        assert not re.search(rf"{re.escape(stand_in)}\b", text), stand_in
    assert not re.search(r"\{\{|\{%|<[A-Z_]+>|TODO|FIXME", text)


@pytest.mark.parametrize("case", CASES)
def test_every_variable_that_it_reads_is_set_somewhere(case: str) -> None:
    text = written(*CASES[case][:1], **CASES[case][1])
    text = text.replace(word(HOSTILE), "").replace(shlex.quote(f"--container-image={HOSTILE}"), "")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    read = set(re.findall(r"\$\{?[#!]?([A-Za-z_][A-Za-z_0-9]*)", code))
    made = set(re.findall(r"(?:^|[\s;(])(?:export |local )?([A-Za-z_][A-Za-z_0-9]*)(?:\+?=|\[)", code, re.MULTILINE))
    made |= set(re.findall(r"(?:local|read -r|read -ra|mapfile -t|for) ([a-zA-Z_ ]+)", code) and " ".join(
        re.findall(r"(?:local|read -r|read -ra|mapfile -t|for|declare -A) ([a-zA-Z_ ]+)", code)).split())  # fmt: skip
    given = {name for name in read if name.startswith(("SLURM", "BASH"))} | {"SECONDS", "PATH"}
    given |= {"DYN_", "ETCD_", "NATS_", "TRTX_"}  # ${!DYN_@}: names that begin so
    in_nats_file = {"NATS_AUTH_USERNAME", "NATS_AUTH_PASSWORD"}
    with_default = set(re.findall(r"\$\{([A-Z_]+):-", code))
    assert read - made - given - in_nats_file - with_default == set()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["disagg", "several nodes"])
def test_the_words_of_each_process_are_those_of_the_plan(case: str, tmp_path: Path) -> None:
    spec, job = CASES[case]
    asked = TopologySpec(**{"model": "synthetic:tiny-trained", "engine": "torch", **spec})
    planned = plan_job(asked, JobSpec(**job))
    text = written(spec, **job)
    script = 'process "$NAME" || exit; for one in "${COMMAND[@]}"; do printf "%s\\0" "$one"; done; printf "\\1"; env -0'
    for step in planned.steps:
        told = run_bash(text, script, tmp_path, NAME=step.name, CUDA_VISIBLE_DEVICES="4,5,6,7")
        words, _, environment = told.partition("\1")
        command = words.split("\0")[:-1]
        for one, expected in zip(command, step.command, strict=True):
            assert isinstance(expected, Shell) or one == expected
        has = dict(one.split("=", 1) for one in environment.split("\0") if "=" in one)
        for name, value in step.environment.items():
            assert name in has and (isinstance(value, Shell) or has[name] == value)
        assert has["DYN_TCP_RPC_HOST"] == "10.0.0.7" and has["ETCD_ENDPOINTS"] == "http://10.0.0.1:17000"
        if step.is_worker:
            assert command[command.index("--engine-config") + 1] == f"/shared/trtx-serve-42/configs/{step.role}.yaml"
            assert command[command.index("--status-file") + 1] == f"/shared/trtx-serve-42/status/{step.name}.json"
            assert has["UCX_NET_DEVICES"] == (job.get("ucx_devices") or "ib0")
            assert has["CUDA_VISIBLE_DEVICES"] == ",".join(str(4 + gpu) for gpu in step.gpus)


@pytest.mark.slow
def test_what_a_person_typed_is_never_run(tmp_path: Path) -> None:
    spec = {"engine": "paced", "served_model_name": HOSTILE}
    text = written(spec, python=HOSTILE, bench=("--extra", HOSTILE), etcd=HOSTILE, container_image=HOSTILE)
    script = 'URL=x; for one in frontend agg-0 bench etcd; do describe "$one"; printf "%s\\0" "${COMMAND[@]}"; done'
    words = run_bash(text, script, tmp_path).split("\0")
    # Python and etcd as programs, the name on the worker's command line and the benchmark's, and its own word.
    assert words.count(HOSTILE) == 3 + 1 + 2 + 1


_TYPED = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=12).filter(str.isprintable)
_PATH = _TYPED.map(lambda text: Path("/" + text))


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=_TYPED,
    bench=st.lists(_TYPED, max_size=4),
    python=_TYPED,
    local=_PATH,
    directory=_PATH,
    image=st.none() | _TYPED,
    shape=st.sampled_from(sorted(CASES)),
)
def test_whatever_is_typed_is_what_bash_has(
    model: str,
    bench: list[str],
    python: str,
    local: Path,
    directory: Path,
    image: str | None,
    shape: str,
    tmp_path: Path,
) -> None:
    spec, job = CASES[shape]
    typed = {"bench": tuple(bench), "python": python, "local_dir": local, "model_dir": directory}
    try:
        text = written({**spec, "served_model_name": model}, **{**job, **typed, "container_image": image})
    except (UsageError, ValidationError):  # what a launcher would expand, or a container can't mount
        assume(False)
    held = 'printf "%s\\0" "$MODEL" "$SERVED" "$PYTHON" "$LOCAL_PARENT" "${CONTAINER[0]:-}" "${BENCH_WORDS[@]}"'
    told = run_bash(text, held, tmp_path).split("\0")[:-1]
    container = "" if image is None else f"--container-image={image}"
    assert told == [str(directory), model, python, str(local), container, *bench]


def test_a_config_in_the_file_is_the_one_that_workers_get(tmp_path: Path) -> None:
    text = written({"overrides": ("max_batch_size=7",)})
    run = tmp_path / "shared" / "trtx-serve-42"
    (run / "configs").mkdir(parents=True)
    run_bash(text, "write_configs", tmp_path, SLURM_SUBMIT_DIR=str(tmp_path / "shared"))
    assert "max_batch_size: 7\n" in (run / "configs" / "agg.yaml").read_text()


def test_an_unknown_variable_of_a_plan_is_an_error_and_not_left_out() -> None:
    process = ProcessSpec(
        name="frontend", role="frontend", argv=("python", "-m", "x"), env={"DYN_NEW": "1"}, log_path=Path("/x")
    )
    with pytest.raises(
        LookupError, match=r"DYN_NEW of the plan has no job= in VARIABLES of trtx/export/plan_variables.py"
    ):
        variables(process, JobSpec())


def test_an_address_of_no_machine_that_would_get_into_the_file_is_an_error() -> None:
    process = ProcessSpec(
        name="frontend",
        role="frontend",
        argv=("python", "-m", "x"),
        env={"DYN_LOG": f"http://{ADDRESSES[0]}"},
        log_path=Path("/x"),
    )
    with pytest.raises(LookupError, match="a stand-in"):
        variables(process, JobSpec())


@pytest.mark.slow
def test_words_are_what_bash_makes_of_them(tmp_path: Path) -> None:
    for text in (HOSTILE, "", "-", "a b", "$X", "\n"):
        done = subprocess.run(["bash", "-c", f"printf %s {word(text)}"], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == text
    assert word(Shell("${A}/b")) == '"${A}/b"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "planned", "chosen"),
    [("0,1,2,3", "2 3", "2,3"), ("", "0 1", "0,1"), ("GPU-a,GPU-b", "1", "GPU-b"), ("5,6", "0", "5")],
)
def test_gpus_are_counted_in_what_slurm_gives(given: str, planned: str, chosen: str, tmp_path: Path) -> None:
    script = f'choose_gpus {planned} && printf %s "$CUDA_VISIBLE_DEVICES"'
    assert run_bash(written(), script, tmp_path, CUDA_VISIBLE_DEVICES=given) == chosen


@pytest.mark.slow
def test_fewer_gpus_than_planned_are_told(tmp_path: Path) -> None:
    told = run_bash(written(), "choose_gpus 2 2>&1 || echo refused", tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert "gives the job 2 GPUs, and GPU 2 was planned" in told and told.endswith("refused\n")


@pytest.mark.slow
def test_secrets_differ_and_begin_with_a_letter(tmp_path: Path) -> None:
    one, two = run_bash(written(), "secret; echo; secret", tmp_path).split()
    assert one != two and re.fullmatch("s[0-9a-f]{48}", one)


def test_what_is_asked_of_slurm_stands_in_its_lines() -> None:
    lines = [line for line in written(*CASES["bench"][:1], **CASES["bench"][1]).splitlines() if "#SBATCH" in line]
    for flag in ("--partition=gpu", "--account=me", "--qos='a b'", "--nodes=1", "--signal=B:TERM@105", "--no-requeue"):
        assert f"#SBATCH {flag}" in lines


def test_engines_larger_than_a_node_get_their_nodes_and_a_task_a_gpu() -> None:
    spec, job = CASES["several nodes"]
    text = written(spec, **job)
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --ntasks-per-node=2\n" in text
    assert "#SBATCH --gpus-per-node=2\n" in text
    assert '  start prefill-0 "${NODES[0]},${NODES[1]}" 2 "--mpi=$MPI"' in text
    assert '  start decode-0 "${NODES[2]},${NODES[3]}" 2 "--mpi=$MPI"' in text
    assert text.count("gpus_per_node: 2\n") == 2
    planned = plan_job(TopologySpec(model="synthetic:tiny-trained", **spec), JobSpec(**job))
    for step in planned.workers:
        assert step.environment["TRTLLM_EPLB_SHM_NAME"] == f"trtx_eplb_${{SLURM_JOB_ID}}_{step.name}"
        assert step.command[0] == "${LAUNCHER}"


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "told"), [(2, []), (4, ["--gpu-count", "8"])])
def test_the_benchmark_is_told_the_gpus_that_no_worker_knows_all_of(tp: int, told: list[str], tmp_path: Path) -> None:
    """Of an engine over nodes; a worker of one node publishes its own."""
    spec = {"engine": "tensorrt-llm", "mode": "disagg", "tp": tp}
    text = written(spec, gpus_per_node=2, bench=("--concurrency", "1"))
    words = run_bash(text, 'URL=x; describe bench; printf "%s\\0" "${COMMAND[@]}"', tmp_path).split("\0")
    assert words[words.index("--output") + 2 : -1] == [*told, "--concurrency", "1"]


REFUSED = {
    "no GPUs": ({"engine": "tensorrt-llm"}, {"gpus_per_node": 0}, "--gpus-per-node 0: engine tensorrt-llm needs GPUs"),
    "auto": ({"engine": "auto"}, {}, "--engine auto can't be exported"),
    "simulated": ({"engine": "simulated"}, {}, "--engine simulated can't be exported"),
    "no multiple": ({"engine": "tensorrt-llm", "tp": 6}, {"gpus_per_node": 4}, "expected at most 4 or a multiple of 4"),
    "torch": ({"tp": 2}, {"gpus_per_node": 1}, "engine torch runs a worker on one node"),
    "too few nodes": ({"workers": 9}, {"gpus_per_node": 4, "nodes": 2}, "must be at least 3, and --nodes is 2"),
    "idle nodes": ({"workers": 2}, {"gpus_per_node": 4, "nodes": 3}, "more than 2 nodes would have nothing to do"),
    "frontends": ({}, {"frontends": 2}, "--frontends 2: the job has room for 1"),
    "mpi": ({}, {"mpi": "pmi2"}, "--mpi pmi2 has no effect here"),
    "port": ({"port": 0}, {}, "--port 0 means any free port"),
    "space": (
        {"engine": "tensorrt-llm", "tp": 2, "served_model_name": "two words"},
        {"gpus_per_node": 1},
        "'two words' has a space or a wildcard, which",
    ),
    "gpus_per_node": (
        {"engine": "tensorrt-llm", "tp": 4, "overrides": ("gpus_per_node=4",)},
        {"gpus_per_node": 2},
        "agg has gpus_per_node 4 in its engine config, and --gpus-per-node is 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_such_nodes_can_not_serve_is_refused_in_a_sentence(case: str) -> None:
    spec, job, told = REFUSED[case]
    with pytest.raises(UsageError, match=re.escape(told)):
        written(spec, **job)


def test_a_recipe_of_sixteen_ranks_takes_two_nodes_for_each_engine_and_keeps_its_rules(tmp_path: Path) -> None:
    """Attention-DP and wide expert parallelism over nodes, of a model that is not here."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    wide = ("tensor_parallel_size=16", "moe_expert_parallel_size=16")
    asked = {
        "model": str(tmp_path),
        "engine": "tensorrt-llm",
        "mode": "disagg",
        "engine_configs": recipe_files("deepseek-r1-wide-ep"),
        "overrides": wide,
    }
    text = written(asked, gpus_per_node=8, model_dir=Path("/models/deepseek-r1"))
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --ntasks-per-node=8\n" in text
    assert "# decode-0: nodes 2 to 3, GPUs 0,1,2,3,4,5,6,7 of each, 8 ranks on each\n" in text
    assert "\nMODEL=/models/deepseek-r1\n" in text and text.count("\ngpus_per_node: 8\n") == 2
    with pytest.raises(UsageError, match=r"num_slots 290 .* fix: --set decode\.moe_config"):
        overrides = (*wide, "decode.moe_config.load_balancer.num_slots=290")
        written({**asked, "overrides": overrides}, gpus_per_node=8, model_dir=Path("/models/deepseek-r1"))
    with pytest.raises(UsageError, match="lacks tokenizer.json; .*; or say with --model-dir where the nodes have it"):
        written(asked, gpus_per_node=8)
    staged = (*wide, "pipeline_parallel_size=2", "gpus_per_node=8")
    assert "#SBATCH --nodes=8\n" in written(
        {**asked, "overrides": staged}, gpus_per_node=8, model_dir=Path("/models/deepseek-r1")
    )


@pytest.mark.parametrize("text", ["{{ messages }}", "a\n\n'\"$(touch pwned)\\ é\n\n"])
def test_a_job_writes_the_chat_template_to_the_byte_and_its_workers_read_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(text)
    asked = {"chat_template": tmp_path / "chat.jinja", "tool_call_parser": "hermes", "mode": "disagg"}
    run = tmp_path / "run"
    (run / "configs").mkdir(parents=True)
    script = f'TRTX_RUN="{run}"; write_configs; process prefill-0; printf "%s\\n" "${{COMMAND[@]}}"'
    words = run_bash(written(asked), script, tmp_path).splitlines()
    assert (run / "configs" / "chat_template.jinja").read_text() == text
    assert words[words.index("--chat-template") + 1] == str(run / "configs" / "chat_template.jinja")
    assert words[words.index("--tool-call-parser") + 1] == "hermes"
