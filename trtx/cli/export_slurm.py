"""``trtx export slurm``: exports a topology as one Slurm batch file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from trtx.cli import topology_options as options
from trtx.cli.command import Verb
from trtx.cli.export import DryRun, ExportOutput, hand_over_export, topology_group
from trtx.cli.export_bench import read_bench
from trtx.cli.placement import refuse_ignored
from trtx.config import Mode
from trtx.config.wording import quoted
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.export.slurm import JobSpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_JOB, _NODES, _CONTAINER, _BENCH = "Job", "Nodes", "Container", "Measuring"
_Topology = Annotated[
    Mapping[str, Any],
    topology_group(
        "workers",
        "prefill",
        "decode",
        "encode",
        "encode_shared",
        "tp",
        "deterministic",
        "router_mode",
        "router_args",
        "port",
    ),
]


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 written; 2 usage, config, or a topology that such nodes can't serve.",
)
@options.spread(engine="tensorrt-llm")
def slurm(
    context: typer.Context,
    *,
    model: options.ModelOptions,
    mode: Annotated[
        Mode,
        typer.Option("--mode", help="As for trtx serve: agg or disagg.", rich_help_panel="Topology"),
    ] = "agg",
    topology: _Topology,
    media: options.MediaOptions,
    name: Annotated[str | None, _option(_JOB, "--name", "Of job, file and run directory. Default: serve.")] = None,
    time: Annotated[str | None, _option(_JOB, "--time", "The job's limit, as Slurm has it. Default: 04:00:00.")] = None,
    partition: Annotated[str | None, _option(_JOB, "--partition", "Of Slurm.")] = None,
    account: Annotated[str | None, _option(_JOB, "--account", "Of Slurm.")] = None,
    sbatch: Annotated[
        list[str] | None,
        _option(_JOB, "--sbatch", "Further flag of sbatch, such as --qos=high. Repeatable.", metavar="FLAG"),
    ] = None,
    nodes: Annotated[
        int | None, _option(_NODES, "--nodes", "Nodes to spread over. Default: as few as hold all workers.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        _option(_NODES, "--gpus-per-node", "Larger workers span nodes of as many GPUs; 0: no GPUs. Default: 8."),
    ] = None,
    frontends: Annotated[
        int | None, _option(_NODES, "--frontends", "Frontends, one on each of the first nodes. Default: 1.")
    ] = None,
    interface: Annotated[
        str | None,
        _option(_NODES, "--interface", "Network interface of all addresses. Default: the one that Slurm goes by."),
    ] = None,
    ucx_devices: Annotated[
        str | None,
        _option(_NODES, "--ucx-devices", "Devices that KV goes by, such as mlx5_0:1. Default: the interface."),
    ] = None,
    first_port: Annotated[
        int | None, _option(_NODES, "--first-port", "Where all ports but HTTP's begin. Default: 17000.")
    ] = None,
    model_dir: Annotated[
        Path | None, _option(_NODES, "--model-dir", "Where nodes have the model. Default: where it is here.")
    ] = None,
    local_dir: Annotated[
        Path | None, _option(_NODES, "--local-dir", "A directory on each node's own disk. Default: /tmp.")
    ] = None,
    python: Annotated[
        str | None,
        _option(_NODES, "--python", "The interpreter with trtx there. Default: this one; in a container python3."),
    ] = None,
    etcd: Annotated[
        str | None, _option(_NODES, "--etcd", "The program etcd, on the first node. Default: etcd.", metavar="PROGRAM")
    ] = None,
    nats: Annotated[
        str | None,
        _option(_NODES, "--nats", "The program nats-server, likewise. Default: nats-server.", metavar="PROGRAM"),
    ] = None,
    mpi: Annotated[
        str | None, _option(_NODES, "--mpi", "srun's, for engines over several nodes. Default: pmix.")
    ] = None,
    container_image: Annotated[
        str | None, _option(_CONTAINER, "--container-image", "Run all but etcd and NATS in it, by pyxis.")
    ] = None,
    container_mounts: Annotated[
        str | None,
        _option(
            _CONTAINER, "--container-mounts", "Beside the model's and the run's directories.", metavar="FROM:TO[,...]"
        ),
    ] = None,
    bench: Annotated[
        str | None,
        _option(
            _BENCH,
            "--bench",
            "Run trtx bench with these flags once all workers serve, and end with it. Default: serve until told.",
            metavar="FLAGS",
        ),
    ] = None,
    ready_timeout_s: Annotated[
        int | None,
        _option(_JOB, "--ready-timeout-s", "All workers must serve within. Default: 1800, at most what --time leaves."),
    ] = None,
    drain_s: Annotated[
        int | None, _option(_JOB, "--drain-s", "What workers have to end begun requests at the end. Default: 15.")
    ] = None,
    lease_ttl_s: Annotated[
        int | None,
        _option(_JOB, "--lease-ttl-s", "A process's lease: absences of etcd may add up to half of it. Default: 600."),
    ] = None,
    output: ExportOutput = None,
    dry_run: DryRun = False,
) -> None:
    """Write a topology as one batch file of Slurm.

    Nothing is submitted, and no cluster is asked. The job starts etcd, NATS and
    all processes, waits until they serve, measures if asked to, and ends in order.

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
    from trtx.export.slurm import export

    spec = options.build_spec(mode=mode, **asdict(model), **topology, **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encoders)
    benchmark = None if bench is None else read_bench(bench, _ANEW)
    typed = {
        "name": name,
        "time": time,
        "partition": partition,
        "account": account,
        "sbatch": sbatch,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "frontends": frontends,
        "interface": interface,
        "ucx_devices": ucx_devices,
        "first_port": first_port,
        "model_dir": model_dir,
        "local_dir": local_dir,
        "python": python,
        "etcd": etcd,
        "nats": nats,
        "mpi": mpi,
        "container_image": container_image,
        "container_mounts": container_mounts,
        "bench": None if benchmark is None else benchmark.words,
        "bench_files": None if benchmark is None else benchmark.files,
        "ready_timeout_s": ready_timeout_s,
        "drain_s": drain_s,
        "lease_ttl_s": lease_ttl_s,
    }
    made = export(spec, _job({field: value for field, value in typed.items() if value is not None}))
    if benchmark is not None:
        benchmark.check_fits(made.served)
    hand_over_export(made, output, dry_run=dry_run)


_ANEW = {"--resume": "and the job measures anew"}


def _job(given: Mapping[str, Any]) -> JobSpec:
    from trtx.export.slurm import JobSpec

    try:
        return JobSpec.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        field = str(first["loc"][0]) if first["loc"] else message.partition(" ")[0]
        option = f"--{field.replace('_', '-')}"
        if first["type"] == "value_error":  # the message begins with the field's name
            raise UsageError(message.replace(field, option, 1)) from error
        expected = first["msg"].removeprefix("Input should be ")
        raise UsageError(f"{option} {quoted(first.get('input'))}: expected {expected}; see --help") from error
