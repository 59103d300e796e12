"""``trtx export slurm``: exports a topology as one Slurm batch file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, optional
from trtx.cli.export import NODES, DryRun, ExportMode, ExportOutput, GpusPerNode, hand_over_export, options_of_cluster
from trtx.cli.export_bench import read_bench
from trtx.cli.field_options import validated
from trtx.cli.placement import refuse_ignored

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_JOB, _CONTAINER, _BENCH = "Job", "Container", "Measuring"
_Topology = Annotated[Mapping[str, Any], options_of_cluster("port")]


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 file written; 2 usage, config, or a topology that such nodes can't serve.",
)
@options.spread(engine="tensorrt-llm")
def slurm(
    context: typer.Context,
    *,
    model: options.ModelOptions,
    mode: ExportMode = "agg",
    topology: _Topology,
    media: options.MediaOptions,
    name: Annotated[
        str | None, optional(_JOB, "--name", "Name of job, file and run directory. Default: serve.")
    ] = None,
    time: Annotated[
        str | None, optional(_JOB, "--time", "Time limit of the job, in Slurm's format. Default: 04:00:00.")
    ] = None,
    partition: Annotated[str | None, optional(_JOB, "--partition", "Slurm partition.")] = None,
    account: Annotated[str | None, optional(_JOB, "--account", "Slurm account.")] = None,
    sbatch: Annotated[
        list[str] | None,
        optional(_JOB, "--sbatch", "Additional flag of sbatch, such as --qos=high. Repeatable.", metavar="FLAG"),
    ] = None,
    nodes: Annotated[int | None, optional(NODES, "--nodes", "Number of nodes. Default: as few as possible.")] = None,
    gpus_per_node: GpusPerNode = None,
    frontends: Annotated[
        int | None, optional(NODES, "--frontends", "Frontends, one on each of the first nodes. Default: 1.")
    ] = None,
    interface: Annotated[
        str | None,
        optional(NODES, "--interface", "Network interface of all addresses. Default: the interface that Slurm uses."),
    ] = None,
    ucx_devices: Annotated[
        str | None,
        optional(NODES, "--ucx-devices", "Network devices for KV transfers, such as mlx5_0:1. Default: the interface."),
    ] = None,
    first_port: Annotated[
        int | None, optional(NODES, "--first-port", "First port, except for HTTP. Default: 17000.")
    ] = None,
    model_dir: Annotated[
        Path | None,
        optional(NODES, "--model-dir", "Directory of the model on the nodes. Default: the path on this machine."),
    ] = None,
    local_dir: Annotated[
        Path | None, optional(NODES, "--local-dir", "Directory on each node's own disk. Default: /tmp.")
    ] = None,
    python: Annotated[
        str | None,
        optional(
            NODES, "--python", "Python interpreter with trtx on the nodes. Default: this one; in a container python3."
        ),
    ] = None,
    etcd: Annotated[
        str | None, optional(NODES, "--etcd", "Program etcd on the first node. Default: etcd.", metavar="PROGRAM")
    ] = None,
    nats: Annotated[
        str | None,
        optional(NODES, "--nats", "Program nats-server on the first node. Default: nats-server.", metavar="PROGRAM"),
    ] = None,
    mpi: Annotated[
        str | None, optional(NODES, "--mpi", "srun's --mpi type, for engines over several nodes. Default: pmix.")
    ] = None,
    container_image: Annotated[
        str | None,
        optional(
            _CONTAINER, "--container-image", "Container image for all processes except etcd and NATS; needs pyxis."
        ),
    ] = None,
    container_mounts: Annotated[
        str | None,
        optional(
            _CONTAINER,
            "--container-mounts",
            "Mounts besides the directories of the model and the run.",
            metavar="FROM:TO[,...]",
        ),
    ] = None,
    bench: Annotated[
        str | None,
        optional(
            _BENCH,
            "--bench",
            "Run trtx bench with these flags when all workers serve, then end the job. Default: no benchmark.",
            metavar="FLAGS",
        ),
    ] = None,
    ready_timeout_s: Annotated[
        int | None,
        optional(
            _JOB,
            "--ready-timeout-s",
            "Time until all workers must serve, in seconds. Default: 1800, or what --time leaves.",
        ),
    ] = None,
    drain_s: Annotated[
        int | None,
        optional(
            _JOB, "--drain-s", "Time for running requests to complete when the job ends, in seconds. Default: 15."
        ),
    ] = None,
    lease_ttl_s: Annotated[
        int | None,
        optional(
            _JOB,
            "--lease-ttl-s",
            "Lease of each process in etcd, in seconds; etcd may be away for half of it. Default: 600.",
        ),
    ] = None,
    output: ExportOutput = None,
    dry_run: DryRun = False,
) -> None:
    """Write a topology as one Slurm batch file.

    Submits nothing and contacts no cluster. The job starts etcd, NATS and all
    processes, waits until they serve, runs --bench if given, and ends in order.

    \b
    Examples:
      trtx export slurm --model /models/qwen3-8b --workers 8
      trtx export slurm --model /models/qwen3-8b --mode disagg --prefill 2 \\
        --decode 2 --gpus-per-node 4 --nodes 2 --time 01:00:00 \\
        --bench '--concurrency 1,8,64 --isl 1024 --osl 128' -o job
      trtx export slurm --model synthetic:tiny-trained --engine torch \\
        --gpus-per-node 0 --mode disagg --nodes 2
    """
    uses = [mode, *options.engine_uses(model.engine), *([] if container_image else ["no container"])]
    uses += ["dry run"] if dry_run else []
    refuse_ignored(context, uses)
    from trtx.export.slurm import JobSpec, export

    spec = options.build_spec(mode=mode, **asdict(model), **topology, **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encoders)
    benchmark = None if bench is None else read_bench(bench, _ANEW)
    given = {name: context.params.get(name) for name in JobSpec.model_fields}
    if benchmark is not None:
        given |= {"bench": benchmark.words, "bench_files": benchmark.files}
    job = validated(JobSpec, {name: value for name, value in given.items() if value is not None})
    made = export(spec, job)
    if benchmark is not None:
        benchmark.check_fits(made.served)
    hand_over_export(made, output, dry_run=dry_run)


_ANEW = {"--resume": "but the job starts a new run"}
