"""``trtx export slurm`` as written, submitted by ``sbatch`` to two real nodes (:mod:`slurm_cluster`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from called import call
from processes import until
from slurm_cluster import ADDRESSES, NODES, SlurmCluster, lacks, slurm_cluster

pytestmark = [pytest.mark.proof, pytest.mark.skipif(lacks() is not None, reason=f"no Slurm nodes here: {lacks()}")]

TINY = ("--model", "synthetic:tiny-trained", "--engine", "torch", "--gpus-per-node", "0", "--mode", "disagg")
OVER_BOTH = (*TINY, "--nodes", "2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
ENVIRONMENT = {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"}  # or UCX would take shared memory between the two nodes
STANDIN = Path(__file__).parents[1] / "standin"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    # A short path: munge's and etcd's sockets have theirs in 108 bytes.
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "nodes") as running:
        yield running


Submit = Callable[..., "Job"]


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Writes and submits a file; what still runs when the test ends is cancelled."""
    with contextlib.ExitStack() as jobs:

        def submit(*flags: str, **options: Any) -> Job:
            directory = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            return jobs.enter_context(Job(cluster, directory, *flags, **options))

        yield submit


class Job:
    """One submitted file, cancelled at the end of a ``with`` block if it goes on: others wait for its nodes."""

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        *flags: str,
        changed: Callable[[str], str] = lambda text: text,
        **environment: str,
    ) -> None:
        self.cluster, self.directory = cluster, directory
        self.local = directory / "node-local"
        self.local.mkdir()
        written = directory / "written"
        done = call("export", "slurm", *flags, "--local-dir", str(self.local), "-o", str(written))
        assert done.code == 0, done.err
        (self.file,) = written.iterdir()
        self.file.write_text(changed(self.file.read_text()))
        self.id = cluster.submit(self.file, directory, {**ENVIRONMENT, **environment})

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.cluster.state(self.id) not in ENDED:
            self.cluster.tell("scancel", self.id)
            until("a cancelled job ends", lambda: self.cluster.state(self.id) in ENDED, seconds=60, every=0.3)

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.directory.glob("trtx-*.log"))

    @property
    def run(self) -> Path:
        (found,) = (path for path in self.directory.glob("trtx-*") if path.is_dir())
        return found

    def await_ready(self) -> None:
        def ready() -> bool:
            assert self.cluster.state(self.id) not in ENDED, self.all_logs()
            return " Ready: " in self.log

        until("the job says Ready", ready, seconds=180, every=0.3)

    def await_end(self, seconds: float = 120) -> str:
        """The state it ended in, once nothing of it is left."""
        until("the job ends", lambda: self.cluster.state(self.id) in ENDED, seconds=seconds, every=0.3)
        until("every process of it ends", lambda: not self.left(), seconds=30, every=0.2)
        assert list(self.local.iterdir()) == [], "node-local directories are left"
        return self.cluster.state(self.id)

    def left(self) -> list[str]:
        """Command lines; the daemons of Slurm itself are none of the job's."""
        return [line for line in self.cluster.processes().values() if not re.search(r"slurmscriptd|munged", line)]

    def process(self, name: str) -> int:
        """The pid of one worker's own process."""
        found = [
            pid
            for pid, line in self.cluster.processes().items()
            if f"trtx.worker --role {name.partition('-')[0]}" in line and f"--name {name} " in line
        ]
        assert len(found) == 1, found
        return found[0]

    def all_logs(self) -> str:
        logs = [f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.directory.glob("trtx-*/logs/*"))]
        return "\n".join([self.log, *logs])

    def curl(self, node: int, url: str, body: object = None) -> str:
        """From the network of one of the nodes."""
        words = ["curl", "--silent", "--show-error", "--max-time", "60", "--noproxy", "*", url]
        if body is not None:
            words += ["--json", json.dumps(body)]
        done = subprocess.run(self.cluster.inside(node, *words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def total(metrics: str, name: str) -> float:
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if re.match(rf"{name}(\{{| )", line)]
    assert values, f"no {name} in {metrics[:2000]}"
    return sum(map(float, values))


def test_it_serves_over_both_nodes_on_the_planned_ports_alone_and_ends_when_it_is_told(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submit(*OVER_BOTH)
    job.await_ready()
    assert dict(line.split()[:2] for line in (job.run / "nodes").read_text().splitlines()) == dict(
        zip(NODES, ADDRESSES, strict=True)
    )
    prompt = "Count from one to ten, then say which of the numbers are even. " * 3
    body = {"model": "tiny-trained", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    url = f"http://{ADDRESSES[0]}:8000/v1/completions"
    answers = {json.loads(job.curl(node, url, body))["choices"][0]["text"] for node in (0, 1, 0, 1)}
    assert len(answers) == 1 and answers != {""}

    assert "and KV in its pair of workers" in job.log
    system_port = re.search(r"^  decode-0\)$.*?DYN_SYSTEM_PORT=(\d+)", job.file.read_text(), re.DOTALL | re.MULTILINE)
    assert system_port is not None
    metrics = job.curl(0, f"http://{ADDRESSES[1]}:{system_port[1]}/metrics")
    assert total(metrics, "trtx_recomputed_prefixes_total") == 0
    assert total(metrics, "trtx_handoff_reads_total") > 0

    text = job.file.read_text()
    planned = {int(port) for port in re.findall(r"(?:_PORT=|--http-port )(\d+)", text)}
    ranges = [(int(a), int(b)) for a, b in re.findall(r"UCX_TCP_PORT_RANGE=(\d+)-(\d+)", text)]
    for node, address in enumerate(ADDRESSES):
        told = subprocess.run(cluster.inside(node, "ss", "-Hltnp"), capture_output=True, text=True, check=True).stdout
        for line in told.splitlines():
            host, _, port = line.split()[3].rpartition(":")
            if re.search(r'"(slurm|srun)', line):
                continue
            known = int(port) in planned or any(first <= int(port) <= last for first, last in ranges)
            assert (host == address and known) or host in ("127.0.0.1", "[::1]"), line

    secrets = _passwords(cluster)
    assert len(secrets) == 2
    # etcd 3.4 writes a new user's password into its log of requests: in its own directory, which others can't read.
    (kept,) = job.local.glob("trtx-*-etcd.*")
    assert kept.stat().st_mode & 0o077 == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(kept)]
    said = [path.read_text(errors="replace") for path in files]
    said += cluster.processes().values()
    assert not [one for one in said for secret in secrets if secret in one]
    refused = job.curl(1, f"http://{ADDRESSES[0]}:17000/v3/kv/range", {"key": "AA==", "range_end": "AA=="})
    assert "user name is empty" in refused

    cluster.tell("scancel", "--batch", "--signal=TERM", job.id)
    assert job.await_end() == "COMPLETED", job.all_logs()
    assert cluster.exit_code(job.id) == "0:0"
    assert "ended because SIGTERM asked for it" in job.log and "killed" not in job.log


def _passwords(cluster: SlurmCluster) -> set[str]:
    """Of etcd and of NATS, as the processes of the job have them."""
    found = set()
    for pid in cluster.processes():
        try:
            environment = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {one.partition(b"=")[2].decode() for one in environment if b"_AUTH_PASSWORD=" in one}
    return found


def test_it_measures_and_ends(submit: Submit, cluster: SlurmCluster) -> None:
    load = "--concurrency 2 --request-count 8 --warmup-request-count 2 --isl 32 --osl 8"
    job = submit(*TINY, "--bench", load)
    assert job.await_end(240) == "COMPLETED", job.all_logs()
    assert cluster.exit_code(job.id) == "0:0"
    (report,) = job.run.glob("bench/*/report.html")
    assert f"benchmark done: {report}" in job.log
    (cell,) = job.run.glob("bench/*/cells/*/cell.json")
    assert json.loads(cell.read_text())["figures"]["request_count"] == 8 or "8" in cell.read_text()


def test_a_cancelled_job_leaves_nothing(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(*OVER_BOTH, "--bench", "--concurrency 2 --request-count 100000 --isl 32 --osl 8")
    job.await_ready()
    until("the benchmark has begun", lambda: "aiperf" in " ".join(job.left()), seconds=60, every=0.3)
    cluster.tell("scancel", job.id)
    assert job.await_end() == "CANCELLED"
    assert "ended because SIGTERM asked for it" in job.log and "FAILED" not in job.log


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGKILL, "ended with code 137"), (signal.SIGTERM, "ended with code 0")]
)
def test_a_worker_that_ends_ends_the_job_even_with_0(
    submit: Submit, cluster: SlurmCluster, number: signal.Signals, told: str
) -> None:
    job = submit(*OVER_BOTH)
    job.await_ready()
    os.kill(job.process("decode-0"), number)
    assert job.await_end() == "FAILED"
    assert cluster.exit_code(job.id) == "4:0"
    assert f"FAILED: decode-0 {told}, and nobody had asked it to; the end of {job.run}/logs/decode-0.log" in job.log


def test_an_etcd_that_ends_is_told_first(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit(*OVER_BOTH)
    job.await_ready()
    (pid,) = (pid for pid, line in cluster.processes().items() if line.startswith("etcd --name head"))
    os.kill(pid, signal.SIGKILL)
    assert job.await_end() == "FAILED"
    assert "FAILED: etcd ended with code 137" in job.log


def test_a_topology_whose_kv_does_not_move_is_not_ready(submit: Submit) -> None:
    """Each request is answered there: decode computes every prompt again."""

    def over_loopback(text: str) -> str:
        return text.replace('UCX_NET_DEVICES="${DEVICE}"', "UCX_NET_DEVICES=lo")

    job = submit(*OVER_BOTH, changed=over_loopback)
    assert job.await_end(180) == "FAILED"
    assert "FAILED: not ready: trtx.export.wait: no KV came from prefill-0 to decode-0: " in job.log, job.all_logs()


def test_a_node_that_lacks_something_is_told_before_anything_starts(submit: Submit, tmp_path: Path) -> None:
    job = submit(*OVER_BOTH, "--model-dir", "/no/such/model")
    assert job.await_end() == "FAILED"
    assert re.search(r"FAILED: node[12] can't read /no/such/model/config.json", job.log), job.all_logs()
    assert not (job.run / "logs" / "etcd.log").exists()

    job = submit(*OVER_BOTH, "--interface", "ib7")
    assert job.await_end() == "FAILED"
    assert re.search(r"FAILED: node[12] has no IPv4 address on ib7", job.log), job.all_logs()

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "one"}\n')

    def lost(text: str) -> str:
        prompts.unlink()
        return text

    job = submit(*TINY, "--bench", f"--input-file {prompts} --custom-dataset-type single_turn", changed=lost)
    assert job.await_end() == "FAILED"
    assert "FAILED: a node can't take part: " in job.log and f"node1 can't read {prompts}, which --bench" in job.log
    assert not (job.run / "logs" / "etcd.log").exists()


def test_an_engine_over_two_nodes_is_one_step_with_a_rank_a_gpu(
    submit: Submit, cluster: SlurmCluster, tmp_path: Path
) -> None:
    """With a launcher that does what trtllm-llmapi-launch does of it: rank 0 runs the command, without the job's
    variables, and the others wait for it; and the stand-in for TensorRT-LLM. No MPI is there, and no NCCL."""
    tools, ranks, package = tmp_path / "tools", tmp_path / "ranks", tmp_path / "package"
    shutil.copytree(STANDIN, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "tensorrt_llm" / "version.py").write_text('__version__ = "1.3.0rc22"\n')  # one that needs GPUs
    tools.mkdir()
    ranks.mkdir()
    launcher = tools / "trtllm-llmapi-launch"
    launcher.write_text(
        "#!/bin/bash\n"
        f'env >"{ranks}/$SLURM_PROCID-$SLURMD_NODENAME"\n'
        'if ((SLURM_PROCID)); then exec -a "rank $SLURM_PROCID" sleep 600; fi\n'
        'unset "${!SLURM_@}" "${!PMI_@}" "${!UCX_@}"\n'
        "export TLLM_SPAWN_PROXY_PROCESS=1\n"
        "$@\n"  # unquoted, as upstream has it
    )
    launcher.chmod(0o755)
    job = submit(
        *("--model", "synthetic:tiny-trained", "--tp", "4", "--gpus-per-node", "2", "--mpi", "pmi2"),
        PATH=f"{tools}:{os.environ['PATH']}",
        PYTHONPATH=str(package),
    )
    job.await_ready()
    told = {path.name: dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
            for path in ranks.iterdir()}  # fmt: skip
    assert sorted(told) == ["0-node1", "1-node1", "2-node2", "3-node2"]
    assert {one["TRTLLM_EPLB_SHM_NAME"] for one in told.values()} == {f"trtx_eplb_{job.id}_agg-0"}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in told.values()} == {"0,1"}
    assert {one["PMI_RANK"] for one in told.values()} == {"0", "1", "2", "3"}
    assert "gpus_per_node: 2" in (job.run / "configs" / "agg.yaml").read_text()
    body = {"model": "tiny-trained", "prompt": "one two", "max_tokens": 4}
    answer = json.loads(job.curl(1, f"http://{ADDRESSES[0]}:8000/v1/completions", body))
    assert answer["choices"][0]["finish_reason"] is not None

    (rank,) = (pid for pid, line in cluster.processes().items() if line.startswith("rank 3"))
    os.kill(rank, signal.SIGKILL)
    assert job.await_end() == "FAILED"
    assert re.search(r"FAILED: agg-0 ended with code 1(37|43)", job.log)  # srun tells the highest of its tasks


def test_the_file_asks_for_what_was_typed(submit: Submit, cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm itself reads the lines of the file: nothing is started."""
    done = call(
        *("export", "slurm", *TINY, "--nodes", "2", "--time", "00:07:00", "--name", "typed"),
        *("--sbatch=--comment=hello", "--sbatch=--nice=7", "-o", str(tmp_path / "written")),
    )
    assert done.code == 0, done.err
    id = cluster.submit(tmp_path / "written" / "typed.sbatch", tmp_path, {}, "--hold")
    shown = cluster.tell("scontrol", "-o", "show", "job", id)
    cluster.tell("scancel", id)
    for part in ("JobName=trtx-typed", "TimeLimit=00:07:00", "NumNodes=2", "Requeue=0", "Comment=hello"):
        assert part in shown, shown
