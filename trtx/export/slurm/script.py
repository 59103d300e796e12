"""Generates the text of the batch file: the sbatch directives, the plan, and the runtime part (``job.sh``)."""

from __future__ import annotations

import sys
import textwrap
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import yaml

from trtx import __version__
from trtx.config import TopologySpec
from trtx.export.files import ExportedFile
from trtx.export.outcome import Export, ExportedService, Part
from trtx.export.slurm.planning import JobPlan, JobStep, plan_job
from trtx.export.slurm.quoting import array, word
from trtx.export.slurm.spec import DEFAULT_MPI, JobSpec
from trtx.topology import CHAT_TEMPLATE

_WIDTH = 110
_RUNTIME = Path(__file__).with_name("job.sh")
_END_OF_CONFIG = "END_OF_ENGINE_CONFIG"
_MAX_PAYLOAD = 32 << 20
"""The maximum size of a NATS message in bytes. KV events grow with the prompt, and NATS's default of 1 MiB limits a
prompt to about 10^5 tokens."""


def export(spec: TopologySpec, job: JobSpec) -> Export:
    """Exports ``spec`` as one batch file for ``job``. Raises UsageError for a topology that a job can't serve."""
    planned = plan_job(spec, job)
    name = f"{job.name}.sbatch"
    text = "".join((_allocation(planned), _about(planned, name), _plan(planned), _RUNTIME.read_text(encoding="utf-8")))
    return Export(
        files=(ExportedFile(name, text, is_executable=True),),
        findings=planned.findings,
        how=_how(planned, name),
        served=ExportedService(planned.model, planned.engine, planned.engine_configs, planned.checkpoint),
        about=_what(planned),
        parts=tuple(Part(step.name, _where(step), step.command, step.environment) for step in planned.steps),
        reasons=_reasons(planned),
        left_out=planned.left_out,
    )


def _allocation(planned: JobPlan) -> str:
    job = planned.job
    lines = {
        "job-name": f"trtx-{job.name}",
        "nodes": str(planned.node_count),
        "ntasks-per-node": str(planned.tasks_per_node),
        "gpus-per-node": str(planned.gpus_per_node) if planned.gpus_per_node else None,
        "exclusive": "",
        "mem": "0",
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:TERM@{job.lead_s}",
        "no-requeue": "",
        "output": f"trtx-{job.name}-%j.log",
    }
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in lines.items() if value is not None]
    return "#!/bin/bash\n" + "".join(f"#SBATCH {flag}\n" for flag in (*flags, *map(_typed, job.sbatch)))


def _typed(flag: str) -> str:
    """Quotes a flag's value for an sbatch directive, where a space ends the value and # starts a comment."""
    name, equals, value = flag.partition("=")
    return f"{name}='{value}'" if equals and any(mark in value for mark in " #") else flag


def _what(planned: JobPlan) -> str:
    counts = ", ".join(f"{count} {role}" for role, count in planned.expected_workers.items())
    nodes = "1 node" if planned.node_count == 1 else f"{planned.node_count} nodes"
    gpus = f"{planned.gpus_per_node} GPUs each" if planned.gpus_per_node else "no GPUs"
    return (
        f"{planned.model} by engine {planned.engine}: {counts}; {nodes}, {gpus}. Written by trtx {__version__} for "
        f"Dynamo {version('ai-dynamo')}. Not looked at: the cluster, its nodes, whether the model fits their GPUs."
    )


def _reasons(planned: JobPlan) -> tuple[str, ...]:
    """Returns the plan's reasons without those about CPU threads, which are counted on the node at start."""
    return tuple(reason for reason in planned.reasons if not reason.startswith("CPU threads"))


def _about(planned: JobPlan, name: str) -> str:
    job = planned.job
    paragraphs = [_what(planned), _how(planned, name), *_needs(planned)]
    paragraphs += [f"{step.name}: {_where(step)}" for step in planned.steps]
    paragraphs += _reasons(planned)
    lines = [line for one in paragraphs for line in ("", *textwrap.wrap(one, _WIDTH, break_on_hyphens=False))]
    if job.bench is None:
        lines += ["", "It serves until its time is over, or until: scancel --batch --signal=TERM JOBID"]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def _how(planned: JobPlan, name: str) -> str:
    job = planned.job
    return (
        f"Run with: sbatch {name}, in a directory that all nodes share: its log is trtx-{job.name}-JOBID.log, and "
        f"trtx-{job.name}-JOBID has a log of each process"
        + (", and the benchmark's report. " if job.bench is not None else ". ")
        + "HTTP has no TLS and no authentication, and nothing that the processes say to each other is encrypted: "
        "anyone who can reach the nodes' network can use the service."
    )


def _needs(planned: JobPlan) -> Iterator[str]:
    job = planned.job
    where = f"in the container image {job.container_image}" if job.container_image else "on every node"
    yield (
        f"It needs {planned.model_dir} and {_python(planned)} with trtx {__version__} {where}; {job.etcd}, {job.nats}, "
        "curl and ip (iproute2) on the nodes themselves, etcd and NATS on the first alone."
    )
    if planned.spans_nodes:
        yield (
            "An engine over several nodes is started by trtllm-llmapi-launch, one rank a GPU, under "
            f"srun --mpi={job.mpi or DEFAULT_MPI}: Slurm needs that plugin, and ps and openssl have to be there."
        )


def _where(step: JobStep) -> str:
    nodes = f"node {step.nodes[0]}" if len(step.nodes) == 1 else f"nodes {step.nodes[0]} to {step.nodes[-1]}"
    if not step.gpus:
        return nodes
    gpus = f"GPU {step.gpus[0]}" if len(step.gpus) == 1 else f"GPUs {','.join(map(str, step.gpus))}"
    return f"{nodes}, {gpus}" + (f" of each, {step.tasks} ranks on each" if len(step.nodes) > 1 else "")


def _plan(planned: JobPlan) -> str:
    job, spec = planned.job, planned.spec
    first = job.first_port
    lines = [
        "set -u -o pipefail\n",
        "umask 077\n",
        "if [[ ${1:-job} == job ]]; then # what another Dynamo, or sbatch for srun, left in the environment\n",
        '  unset "${!DYN_@}" "${!ETCD_@}" "${!NATS_@}" "${!TRTX_@}" MODEL_EXPRESS_URL UCX_NET_DEVICES\n',
        "  unset SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_EXPORT_ENV SLURM_MEM_PER_CPU\n",
        "fi\n\n",
        f"# --- What was planned {'-' * 88}\n\n",
    ]
    constants: Mapping[str, object] = {
        "TRTX_VERSION": __version__,
        "MODEL": planned.model_dir,
        "SERVED": planned.model,
        "ENGINE": planned.engine,
        "PYTHON": _python(planned),
        "REGISTRY": job.etcd,
        "EVENTS": job.nats,
        "REGISTRY_PORT": first,
        "REGISTRY_PEER_PORT": first + 1,
        "EVENTS_PORT": first + 2,
        "EVENTS_MAX_PAYLOAD": _MAX_PAYLOAD,
        "HTTP_PORT": spec.port,
        "INTERFACE": job.interface or "",
        "LOCAL_PARENT": job.local_dir,
        "NODE_COUNT": planned.node_count,
        "READY_SECONDS": job.ready_within_s,
        "DRAIN_SECONDS": job.drain_s,
        "BENCH": int(job.bench is not None),
    }
    if planned.spans_nodes:
        directory = _python(planned).rpartition("/")[0]
        constants = {
            **constants,
            "LAUNCHER": "trtllm-llmapi-launch",
            "PYTHON_DIR": f"{directory}:" if directory else "",
            "MPI": job.mpi or DEFAULT_MPI,
        }
    lines += [f"{name}={word(str(value))}\n" for name, value in constants.items()]
    lines.append(f'NAMESPACE="trtx-{job.name}-$SLURM_JOB_ID"\n')
    lines.append(f'export TRTX_RUN="$SLURM_SUBMIT_DIR/trtx-{job.name}-$SLURM_JOB_ID"\n')
    lines.append(array("FRONTENDS", [step.name for step in planned.frontends]))
    lines.append(array("WORKERS", [step.name for step in planned.workers]))
    lines.append(f"EXPECTED={word(','.join(f'{role}={count}' for role, count in planned.expected_workers.items()))}\n")
    lines.append(array("CONTAINER", _container(planned)))
    # Workers publish their GPUs, but the worker of an engine over several nodes knows only those of one node.
    lines.append(array("GPU_COUNT", ["--gpu-count", str(planned.gpu_count)] if planned.spans_nodes else ()))
    lines.append(array("BENCH_WORDS", job.bench or ()))
    lines.append(array("BENCH_FILES", map(str, job.bench_files)))
    lines += ["\n", *_configs(planned)]
    lines += ["\nstart_processes() {\n", *(_start(step) for step in planned.steps), "}\n"]
    lines += ["\n", *_processes(planned), "\n"]
    return "".join(lines)


def _python(planned: JobPlan) -> str:
    return planned.job.python or ("python3" if planned.job.container_image else sys.executable)


def _container(planned: JobPlan) -> list[str]:
    """Returns pyxis's flags for srun. The script itself adds the mount of the run directory."""
    job = planned.job
    if job.container_image is None:
        return []
    mounts = [f"{planned.model_dir}:{planned.model_dir}", *([job.container_mounts] if job.container_mounts else [])]
    return [
        f"--container-image={job.container_image}",
        f"--container-mounts={','.join(mounts)}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]


def _configs(planned: JobPlan) -> Iterator[str]:
    yield "write_configs() { # of each role, as its workers read them: TensorRT-LLM's field names\n"
    for role, values in planned.engine_configs.items():
        text = yaml.safe_dump(dict(values), sort_keys=False)
        if _END_OF_CONFIG in text:
            raise LookupError(f"the engine config of {role} holds {_END_OF_CONFIG}, which ends it in the file")
        yield f"  cat >\"$TRTX_RUN/configs/{role}.yaml\" <<'{_END_OF_CONFIG}' || return\n{text}{_END_OF_CONFIG}\n"
    if planned.chat_template is not None:  # in base64: bash would drop NUL bytes, and end the text with a line break
        text = b64encode(planned.chat_template.encode()).decode()
        yield f'  base64 -d >"$TRTX_RUN/configs/{CHAT_TEMPLATE}" <<<{text} || return\n'
    yield "}\n"


def _start(step: JobStep) -> str:
    nodes = ",".join(f"${{NODES[{index}]}}" for index in step.nodes)
    mpi = '"--mpi=$MPI"' if len(step.nodes) > 1 else "--mpi=none"
    return f'  start {step.name} "{nodes}" {step.tasks} {mpi} "${{CONTAINER[@]}}"\n'


def _processes(planned: JobPlan) -> Iterator[str]:
    """Yields a bash function that sets environment and command of a process; the common environment comes first."""
    shared = _in_common([step.environment for step in planned.steps])
    yield "process() { # NAME: exports its environment, and sets COMMAND\n"
    yield from (f"  export {name}={word(value)}\n" for name, value in shared.items())
    yield "  case $1 in\n"
    for step in planned.steps:
        yield f"  {step.name})\n"
        if any("${THREADS}" in value for value in step.environment.values()):
            here = sum(1 for one in planned.workers if set(one.nodes) & set(step.nodes))
            yield f"    count_threads {here}\n"
        if step.is_worker and step.gpus:
            yield f"    choose_gpus {' '.join(map(str, step.gpus))} || return\n"
        elif step.is_worker:
            yield "    export CUDA_VISIBLE_DEVICES=''\n"
        own = {name: value for name, value in step.environment.items() if name not in shared}
        yield from (f"    export {name}={word(value)}\n" for name, value in own.items())
        yield array("COMMAND", step.command, indent="    ")
        yield "    ;;\n"
    yield "  esac\n}\n"


def _in_common(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = environments
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value and type(other[name]) is type(value) for other in others)
    }
