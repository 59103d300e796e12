"""``trtx export kubernetes``: what becomes of a plan, what is refused, what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import call
from exported_manifests import ASKED, manifests, pods

from trtx.checkpoint import fetch
from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.export import ExportedFile, write_files
from trtx.export.kubernetes import KubernetesTarget, export
from trtx.export.kubernetes.target import name_of
from trtx.export.kubernetes.variables import FLAGS_DROPPED, arguments, variables
from trtx.topology import ProcessSpec

pytestmark = pytest.mark.slow

TINY = ("--model", "synthetic:tiny-trained", "--engine", "torch", "--gpus-per-node", "0", "--image", "reg/trtx:1.4.2")
LARGE = ("--model", "synthetic:qwen3-0.6b", "--image", "reg/trtx:1.4.2")


def process(**changes: Any) -> ProcessSpec:
    argv = ("/venv/bin/python", "-m", "trtx.worker", "--role", "agg")
    plain = ProcessSpec(name="agg-0", role="agg", argv=argv, env={}, log_path=Path("log"))
    return replace(plain, **changes)


def target(**changes: Any) -> KubernetesTarget:
    return KubernetesTarget(**{"name": "shown", "image": "reg/trtx:1.4.2", **changes})


def main_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod["spec"]["containers"] if one["name"] == "main")


def of_role(name: str, role: str) -> dict[str, Any]:
    return next(pod for pod in pods(name) if pod["metadata"]["labels"]["trtx-role"] == role)


# --- from the plan ---


def test_a_variable_that_nobody_decided_about_is_an_error() -> None:
    with pytest.raises(LookupError, match="DYN_NEW of the plan has no pod= in VARIABLES"):
        variables(process(env={"DYN_NEW": "1"}), target(), gpus=0)


def test_what_is_of_one_machine_is_in_no_pod() -> None:
    for name in ASKED:
        words = [word for pod in pods(name) for one in pod["spec"]["containers"] for word in one["args"]]
        assert not [word for word in words if word in FLAGS_DROPPED and word != "--namespace"]
        text = "".join(json.dumps(pod) for pod in pods(name))
        assert not [word for word in ("127.0.0.1", '"lo"', "/tmp", "DYN_FILE_KV", str(Path.cwd())) if word in text]


def test_a_variable_reference_that_was_typed_is_not_one_to_kubernetes() -> None:
    argv = ("python", "-m", "trtx.worker", "--served-model-name", "$(HOME)", "--name", "agg-0")
    assert arguments(process(argv=argv), "plain") == ["--served-model-name", "$$(HOME)", "--name", "$(POD_NAME)"]
    [entry] = variables(process(env={"DYN_LOG": "$(X)"}), target(), gpus=0)
    assert entry == {"name": "DYN_LOG", "value": "$$(X)"}


def test_the_operators_own_is_left_to_it() -> None:
    def names(form: str) -> set[str]:
        env = {"DYN_NAMESPACE": "a", "DYN_DISCOVERY_BACKEND": "file", "DYN_SYSTEM_PORT": "1"}
        return {one["name"] for one in variables(process(env=env), target(form=form), gpus=0)}

    assert names("operator") == set()
    assert names("plain") >= {"DYN_NAMESPACE", "DYN_DISCOVERY_BACKEND", "DYN_SYSTEM_PORT", "POD_NAME"}


def test_gpus_of_a_pod_are_its_limit_and_what_its_worker_sees() -> None:
    worker = main_of(of_role("operator disagg", "decode"))
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": "0,1"} in worker["env"]
    assert "limits" not in main_of(of_role("plain agg", "agg"))["resources"]


def test_an_engine_over_nodes_has_whole_nodes_and_what_its_ranks_need() -> None:
    [graph] = [one for one in manifests("operator over nodes") if one["kind"] == "DynamoGraphDeployment"]
    decode = next(one for one in graph["spec"]["components"] if one["name"] == "decode")
    assert decode["multinode"] == {"nodeCount": 2}
    container = main_of(decode["podTemplate"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["command"] == ["python3", "-m", "trtx.worker"]
    given = {one["name"] for one in container["env"]}
    assert {"TRTLLM_EPLB_SHM_NAME", "TRTLLM_WORKER_DISABLE_GC", "UCX_NET_DEVICES"} <= given
    [configs] = [one for one in manifests("operator over nodes") if one["kind"] == "ConfigMap"]
    values = yaml.safe_load(configs["data"]["decode.yaml"])
    assert (values["tensor_parallel_size"], values["gpus_per_node"]) == (16, 8)


def test_other_engine_configs_have_another_name() -> None:
    def name(overrides: tuple[str, ...]) -> str:
        made = export(TopologySpec(engine="paced", overrides=overrides), target(form="plain"))
        [file] = [one for one in made.files if one.name == "engine-configs.yaml"]
        return str(yaml.safe_load(file.text)["metadata"]["name"])

    assert name(()) == name(()) != name(("max_batch_size=3",))


def test_all_pods_fetch_the_same_model_and_a_claim_is_fetched_by_none() -> None:
    for role in ("prefill", "decode"):
        [fetching] = of_role("operator over nodes", role)["spec"]["initContainers"]
        assert fetching["args"][0] == "synthetic:qwen3-0.6b"
        assert "initContainers" not in of_role("operator disagg", role)["spec"]
        assert "/models/qwen3" in main_of(of_role("operator disagg", role))["args"]


def test_tls_reaches_frontends_probes_and_the_job_which_gets_no_key() -> None:
    frontend = of_role("plain disagg", "frontend")
    assert "/run/trtx-tls/tls.key" in main_of(frontend)["args"]
    assert main_of(frontend)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    job = of_role("plain disagg", "bench")
    [secret] = [volume["secret"] for volume in job["spec"]["volumes"] if "secret" in volume]
    assert secret["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert any(word.startswith("https://") for word in job["spec"]["containers"][0]["args"])


def test_the_job_waits_for_every_worker_and_measures_with_what_was_typed() -> None:
    [wait] = [one for one in of_role("plain disagg", "bench")["spec"]["initContainers"] if one["name"] == "wait"]
    assert "prefill=1,decode=1" in wait["args"]
    assert of_role("plain disagg", "bench")["spec"]["containers"][0]["args"][-2:] == ["--concurrency", "1,8"]
    args = of_role("operator over nodes", "bench")["spec"]["containers"][0]["args"]
    assert args[args.index("--gpu-count") + 1] == "32"  # its workers publish those of one node
    assert "--gpu-count" not in of_role("operator disagg", "bench")["spec"]["containers"][0]["args"]


# --- refusals ---


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (("--engine", "paced"), "--image is missing"),
        ((*LARGE, "--engine", "auto"), "--engine auto can't be exported"),
        ((*LARGE, "--tp", "12"), "12 GPUs for each worker, and nodes have 8 (--gpus-per-node)"),
        ((*LARGE, "--tp", "16", "--plain"), "leave --plain out"),
        ((*LARGE, "--tp", "16", "--set", "gpus_per_node=4"), "give both the same"),
        ((*LARGE, "--tp", "16", "--served-model-name", "a model"), "has a space"),
        ((*LARGE, "--tp", "16", "--engine", "torch"), "expected from 1 to 8, the GPUs of one machine"),
        ((*LARGE, "--gpus-per-node", "0"), "needs a GPU"),
        ((*TINY, "--ucx-devices", "lo"), "--ucx-devices 'lo' reaches no other pod"),
        ((*TINY, "--name", "Qwen"), "--name 'Qwen' is refused"),
        ((*TINY, "--name", "q" * 41), "at most 40 characters"),
        ((*TINY, "--namespace", "a_b"), "--namespace 'a_b' is refused"),
        ((*TINY, "--image", "a b"), "--image is given twice"),
        ((*TINY, "--resource", "rdma/ib"), "--resource 'rdma/ib' is refused; expected NAME=VALUE"),
        ((*TINY, "--memory", "64 GB"), "--memory '64 GB' is refused"),
        ((*TINY, "--nats", "http://a:1"), "--nats 'http://a:1' is refused"),
        ((*TINY, "--nats", "nats://me:word@h:4222"), "--nats 'nats://h:4222' and more, which may be a secret"),
        ((*TINY, "--nats", "nats://a:70000"), "--nats 'nats://a:70000' is refused"),
        ((*TINY, "--nats", "nats://127.1:4222"), "--nats 'nats://127.1:4222' is refused"),
        ((*TINY, "--nats", "nats://127.0.0.1:4222"), "--nats 'nats://127.0.0.1:4222' is each pod itself"),
        ((*TINY, "--nats", "nats://LOCALHOST"), "--nats 'nats://LOCALHOST' is each pod itself"),
        ((*TINY, "--frontends", "0"), "--frontends 0: expected greater than or equal to 1"),
        ((*TINY, "--model-claim", "models/../x"), "--model-claim 'models/../x' is refused"),
        ((*TINY, "--model-claim", "../x"), "is refused; expected a claim, and the model's directory"),
        ((*TINY, "--model-claim", "a-/x"), "--model-claim 'a-/x' is refused"),
        ((*TINY, "--resource", "rdma/ib=1", "--resource", "rdma/ib=2"), "--resource names rdma/ib twice"),
        ((*TINY, "--node-selector", "a=1", "--node-selector", "a=2"), "--node-selector names a twice"),
        ((*TINY, "--resource", "nvidia.com/gpu=3"), "is what the plan (--tp, --gpus-per-node) sets"),
        ((*TINY, "--resource", "cpu=3"), "--resource 'cpu=3' is what --cpu sets"),
        ((*TINY, "--resource", "memory=1Gi"), "--resource 'memory=1Gi' is what --memory sets"),
        ((*TINY, "--resource", "rdma/ib=-1"), "--resource 'rdma/ib=-1' is refused"),
        ((*TINY, "--resource", "rdma/ib=1.5"), "expected a whole number of them"),
        ((*TINY, "--resource", "rdma/ib=0"), "expected a whole number of them, at least 1"),
        ((*TINY, "--resource", "rdma/ib="), "--resource 'rdma/ib=' is refused"),
        ((*TINY, "--resource", "a/b/c=1"), "--resource 'a/b/c=1' is refused"),
        ((*TINY, "--resource", "RDMA=1"), "--resource 'RDMA=1' is refused"),
        ((*TINY, "--resource", "hugepages-x=1Gi"), "--resource 'hugepages-x=1Gi' is refused"),
        ((*TINY, "--node-selector", "pool=-gpu"), "expected a label's value"),
        ((*TINY, "--node-selector", f"pool={'g' * 64}"), "expected a label's value"),
        ((*TINY, "--cpu", "0"), "--cpu '0' is refused; expected cores"),
        ((*TINY, "--cpu", "0.0001"), "--cpu '0.0001' is refused"),
        ((*TINY, "--cpu", "4Gi"), "--cpu '4Gi' is refused"),
        ((*TINY, "--memory", "0"), "--memory '0' is refused; expected bytes"),
        ((*TINY, "--memory", "100m"), "--memory '100m' is refused"),
        ((*TINY, "--shared-memory", "0Gi"), "--shared-memory '0Gi' is refused"),
        ((*TINY[:-1], "x:"), "--image 'x:' is refused"),
        ((*TINY[:-1], "UPPER/x:1"), "--image 'UPPER/x:1' is refused"),
        ((*TINY[:-1], "x:1:2"), "--image 'x:1:2' is refused"),
        ((*TINY[:-1], "reg/x@sha256:12"), "--image 'reg/x@sha256:12' is refused"),
        ((*TINY, "--model-claim", "m", "--hub-secret", "s"), "--hub-secret has no effect with --model-claim"),
        ((*TINY, "--hub-secret", "s"), "--hub-secret has no effect with --model synthetic"),
        ((*TINY, "--allowed-media-path", "/"), "which pods can't read"),
        ((*TINY, "--max-images", "2"), "a text model"),
        ((*TINY, "--set", "no_such_field=1"), "no_such_field"),
        ((*TINY, "--router-args", "--no-such-flag"), "--no-such-flag"),
        ((*TINY, "--bench", "--no-such-flag"), "No such option"),
        ((*TINY, "--bench", "--url http://a"), "--bench holds --url, which the job gives by itself"),
        ((*TINY, "--bench", "--concurrency 0"), "--bench: "),
        ((*TINY, "--bench", "--concurrency 1 --slo nonsense"), "--bench: --slo nonsense: it has 1 of 4 parts"),
        ((*TINY, "--bench", "--prefill 2"), "--bench holds --prefill"),
        ((*TINY, "--bench", "--input-file a.jsonl"), "has no file of this machine"),
    ],
)
def test_what_pods_cannot_serve_is_one_sentence(typed: tuple[str, ...], says: str) -> None:
    done = call("export", "kubernetes", *typed)
    assert (done.code, done.out) == (2, "")
    assert says in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    "image",
    [
        "x",
        "x:1",
        "reg:5000/a/b-c__d:v1.2_3-4",
        "REG.example/x:UPPER",
        f"a/b@sha256:{'0f' * 32}",
        f"a:1@sha256:{'0' * 64}",
    ],
)
def test_what_a_container_runtime_reads_is_an_image(image: str) -> None:
    assert target(image=image).image == image


def test_further_resources_and_labels_arrive_as_they_were_typed() -> None:
    asked = target(
        resources=("rdma/ib=2", "ephemeral-storage=10Gi", "hugepages-2Mi=1Gi"),
        node_selector=("kubernetes.io/arch=arm64", "pool="),
        cpu="1500m",
        nats="tls://10.0.0.1:4222",
    )
    assert asked.nats == "tls://10.0.0.1:4222"
    assert asked.further_limits == {"rdma/ib": "2", "ephemeral-storage": "10Gi", "hugepages-2Mi": "1Gi"}
    assert asked.selector == {"kubernetes.io/arch": "arm64", "pool": ""}


def test_a_directory_of_this_machine_needs_a_claim(tmp_path: Path) -> None:
    fetch.fetch("synthetic:tiny-trained", tmp_path / "model", revision=None, with_weights=True)
    (tmp_path / "model" / "model.safetensors").unlink()  # weights need not be here
    typed = ("--engine", "torch", "--gpus-per-node", "0", "--image", "reg/trtx:1.4.2", "--plain")
    refused = call("export", "kubernetes", "--model", str(tmp_path / "model"), *typed)
    assert refused.code == 2 and "which no pod sees" in refused.err
    done = call("export", "kubernetes", "--model", str(tmp_path / "model"), "--model-claim", "m/tiny", *typed)
    assert done.code == 0 and "/models/tiny" in done.out and str(tmp_path) not in done.out


def test_export_by_itself_says_what_there_is_to_write() -> None:
    done = call("export")
    assert done.code == 2 and "kubernetes" in done.err and done.err.count("\n") == 1


# --- files ---


def test_files_are_written_into_a_directory_of_their_own(tmp_path: Path) -> None:
    done = call("export", "kubernetes", *TINY, "--plain", "--output", str(tmp_path / "k8s"))
    assert done.code == 0 and "kubectl apply -f" in done.out
    names = {path.name for path in (tmp_path / "k8s").iterdir()}
    assert names >= {"crd.yaml", "access.yaml", "workers.yaml", "frontend.yaml", "network-policy.yaml"}
    printed = call("export", "kubernetes", *TINY, "--plain").out
    written = [one for name in names for one in yaml.safe_load_all((tmp_path / "k8s" / name).read_text())]
    assert sorted(map(str, written)) == sorted(map(str, yaml.safe_load_all(printed)))
    again = call("export", "kubernetes", *TINY, "--plain", "--output", str(tmp_path / "k8s"))
    assert again.code == 2 and "holds 'access.yaml' already" in again.err


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be written"):
        write_files([ExportedFile("a", "b\n")], tmp_path / "file")


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen3-8B", "qwen3-8b-agg"), ("7b_chat", "m-7b-chat-agg"), ("x" * 99, "x" * 36 + "-agg")],
)
def test_a_name_is_made_of_the_models(model: str, name: str) -> None:
    assert name_of(model, "agg", 40) == name
    assert target(name=name).name == name


def test_a_fetched_model_is_whole_and_may_lack_its_weights(tmp_path: Path) -> None:
    fetch.main(["synthetic:tiny", "--directory", str(tmp_path / "model")])
    fetch.main(["synthetic:tiny", "--directory", str(tmp_path / "model")])  # a pod that starts again
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "model").iterdir()}
    with pytest.raises(UsageError, match="no-such-shape"):
        fetch.main(["synthetic:no-such-shape", "--directory", str(tmp_path / "other")])


@pytest.mark.slow
def test_every_pod_fetches_the_commit_that_was_looked_at(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    repository = tmp_path / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    fetch.fetch("synthetic:tiny", repository / "snapshots" / ("0" * 40), revision=None, with_weights=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    words = ["--model", "someone/small", "--engine", "torch", "--hub-secret", "hub", "--image", "reg/trtx:1.4.2"]
    command = [sys.executable, "-m", "trtx", "export", "kubernetes", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"- --revision\n          - '{'0' * 40}'" in done.stdout
    assert "secretKeyRef" in done.stdout
    command = [sys.executable, "-m", "trtx.checkpoint.fetch", "someone/other", "--directory", str(tmp_path / "other")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'someone/other' can't be fetched" in done.stderr and done.stderr.count("\n") <= 2, done.stderr
