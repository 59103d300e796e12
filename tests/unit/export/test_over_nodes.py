"""Engines larger than a node: their plan, their rules and both of their exports, from the shipped recipes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import call
from published_models import MODELS

from trtx.config import recipe_files
from trtx.config.families import read_header

pytestmark = pytest.mark.slow

RECIPES = {"deepseek-r1-wide-ep-16": "deepseek-ai/DeepSeek-R1", "llama3.1-405b": "meta-llama/Llama-3.1-405B-Instruct"}
FORMS = {
    "slurm": ("--model-dir", "/models/it"),
    "kubernetes": ("--image", "reg/trtx:1.4.2", "--model-claim", "models/it"),
}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The published config.json of a recipe's model, and no weights: they are on the nodes."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[RECIPES[request.param]]))
    return tmp_path


def export(form: str, model: Path, *typed: str) -> Any:
    return call("export", form, "--model", str(model), "--served-model-name", "it", *FORMS[form], *typed)


def graph_and_configs(out: str) -> tuple[Any, Any]:
    found = {one["kind"]: one for one in yaml.safe_load_all(out)}
    return found["DynamoGraphDeployment"], {
        name: yaml.safe_load(text) for name, text in found["ConfigMap"]["data"].items()
    }


@pytest.mark.parametrize(("model", "recipe"), [(name, name) for name in RECIPES], indirect=["model"])
@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_a_recipe_of_two_nodes_is_two_nodes_in_both_exports(model: Path, recipe: str, mode: str) -> None:
    roles = ("agg",) if mode == "agg" else ("prefill", "decode")
    for role in roles:
        path = recipe_files(recipe)[role]  # type: ignore[index]
        header = read_header(path.read_text(), str(path))
        assert header is not None and header.gpus == 16
    done = export("slurm", model, "--recipe", recipe, "--mode", mode)
    assert done.code == 0, done.err
    assert f"#SBATCH --nodes={2 * len(roles)}\n" in done.out and "#SBATCH --ntasks-per-node=8\n" in done.out
    for place, role in enumerate(roles):
        nodes = f"${{NODES[{2 * place}]}},${{NODES[{2 * place + 1}]}}"
        assert f'  start {role}-0 "{nodes}" 8 "--mpi=$MPI"' in done.out
    assert done.out.count("\ngpus_per_node: 8\n") == len(roles)
    done = export("kubernetes", model, "--recipe", recipe, "--mode", mode)
    assert done.code == 0, done.err
    graph, configs = graph_and_configs(done.out)
    workers = {one["name"]: one for one in graph["spec"]["components"] if one["name"] != "frontend"}
    assert workers.keys() == set(roles)
    for role, component in workers.items():
        assert component["multinode"] == {"nodeCount": 2}
        [main] = component["podTemplate"]["spec"]["containers"]
        assert main["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert configs[f"{role}.yaml"]["gpus_per_node"] == 8
        assert {"name": "TRTLLM_EPLB_SHM_NAME", "value": f"trtx_eplb_it-{mode}_{role}"} in main["env"]


PLANNED = {
    "wide experts": (
        "deepseek-r1-wide-ep-16",
        (),
        [
            "a decode worker is 16 ranks on 2 nodes of 8 GPUs, tensor 16 x pipeline 1 x context 1",
            "each of the 16 ranks of decode requests of its own: max_batch_size 256 is a rank's",
            "experts of decode are over 16 ranks, 18 of 288 slots on each",
        ],
        ["allreduces between nodes", "stages"],
    ),
    "four nodes each": (
        "deepseek-r1-wide-ep-16",
        ("--gpus-per-node", "4"),
        ["a decode worker is 16 ranks on 4 nodes of 4 GPUs"],
        [],
    ),
    "a pipeline": (
        "llama3.1-405b",
        (),
        ["tensor 8 x pipeline 2 x context 1", "the 2 pipeline stages of decode have 8 ranks each, inside a node"],
        ["allreduces between nodes", "attention data parallelism", "experts"],
    ),
    "stages over nodes": (
        "llama3.1-405b",
        ("--gpus-per-node", "4"),
        ["the 2 pipeline stages of decode have 8 ranks each, over 2 nodes", "would keep them inside"],
        [],
    ),
    "tensor parallelism over nodes": (
        "llama3.1-405b",
        ("--set", "tensor_parallel_size=16", "--set", "pipeline_parallel_size=1"),
        ["layers of decode have allreduces between nodes", "tensor_parallel_size 8 and pipeline_parallel_size 2 would"],
        ["stages of"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "case"), [(PLANNED[name][0], name) for name in PLANNED], indirect=["model"])
def test_the_plan_tells_how_ranks_lie_on_nodes(model: Path, case: str, form: str) -> None:
    recipe, typed, told, untold = PLANNED[case]
    asked = ("--recipe", recipe, "--mode", "disagg", *typed)
    done = export(form, model, *asked, "--dry-run")
    assert done.code == 0, done.err
    plan = " ".join(done.out.split())
    assert plan.startswith("Dry run: nothing was written.")
    for part in told:
        assert part in plan, done.out
    assert not [part for part in untold if part in plan.partition("Decided:")[2]]
    for process in ("frontend", "prefill", "decode"):
        assert re.search(rf"^{process}\S*: ", done.out, re.MULTILINE)
    written = export(form, model, *asked).out
    comments = " ".join(line.removeprefix("# ") for line in written.splitlines() if line.startswith("#"))
    assert all(part in comments for part in told), "the file itself says it too"


REFUSED = {
    "GPUs that fill no node": (("--gpus-per-node", "6"), "expected at most 6 or a multiple of 6"),
    "experts beside the ranks": (
        ("--set", "moe_expert_parallel_size=12"),
        "12 does not divide tensor_parallel_size 16",
    ),
    "slots that do not divide": (("--set", "decode.moe_config.load_balancer.num_slots=290"), "num_slots 290"),
    "another orchestrator": (
        ("--set", "orchestrator_type=ray"),
        "orchestrator_type is ray; ranks on several nodes are started by MPI",
    ),
    "AutoDeploy": (("--set", "backend=_autodeploy", "--set", "world_size=16"), "need the backend pytorch"),
    "another gpus_per_node": (("--set", "gpus_per_node=4"), "has gpus_per_node 4 in its engine config"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["deepseek-r1-wide-ep-16"], indirect=True)
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_nodes_can_be_is_refused_in_a_sentence(model: Path, case: str, form: str) -> None:
    typed, told = REFUSED[case]
    done = export(form, model, "--recipe", "deepseek-r1-wide-ep-16", "--mode", "disagg", *typed)
    assert done.code == 2 and done.out == "" and told in done.err, done.err
