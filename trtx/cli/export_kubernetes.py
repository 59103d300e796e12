"""``trtx export kubernetes``: exports a topology as manifests, for Dynamo's operator or for a cluster without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

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

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CLUSTER, _NODES, _BENCH = "Cluster", "Nodes", "Measuring"
_Topology = Annotated[
    Mapping[str, Any],
    topology_group(
        "workers", "prefill", "decode", "encode", "encode_shared", "tp", "deterministic", "router_mode", "router_args"
    ),
]


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 written; 2 usage, config, or a topology that pods can't serve.",
)
@options.spread(engine="tensorrt-llm")
def kubernetes(
    context: typer.Context,
    *,
    model: options.ModelOptions,
    mode: Annotated[
        Mode,
        typer.Option("--mode", help="As for trtx serve: agg or disagg.", rich_help_panel="Topology"),
    ] = "agg",
    topology: _Topology,
    media: options.MediaOptions,
    image: Annotated[
        str | None,
        _option(_CLUSTER, "--image", "Image with trtx, Dynamo and the engine, such as registry.example/trtx:1.4.2."),
    ] = None,
    plain: Annotated[
        bool, _option(_CLUSTER, "--plain", "Deployments and Services, for a cluster without Dynamo's operator.")
    ] = False,
    name: Annotated[
        str | None, _option(_CLUSTER, "--name", "Of the topology in the cluster. Default: made of model and mode.")
    ] = None,
    namespace: Annotated[
        str | None, _option(_CLUSTER, "--namespace", "Of Kubernetes, for all objects. Default: default.")
    ] = None,
    frontends: Annotated[
        int | None, _option(_CLUSTER, "--frontends", "Frontends behind one Service. Default: 1.")
    ] = None,
    model_claim: Annotated[
        str | None,
        _option(
            _CLUSTER,
            "--model-claim",
            "Volume claim that has the model, and its directory there. Default: pods fetch it from the hub.",
            metavar="CLAIM/PATH",
        ),
    ] = None,
    hub_secret: Annotated[
        str | None, _option(_CLUSTER, "--hub-secret", "Secret whose key HF_TOKEN opens the model on the hub.")
    ] = None,
    image_pull_secret: Annotated[
        str | None, _option(_CLUSTER, "--image-pull-secret", "Secret that opens the image's registry.")
    ] = None,
    tls_secret: Annotated[
        str | None,
        _option(_CLUSTER, "--tls-secret", "Secret of type kubernetes.io/tls: the frontends speak HTTPS with it."),
    ] = None,
    nats: Annotated[
        str | None,
        _option(_CLUSTER, "--nats", "Events go by this NATS, nats://HOST:PORT. Default: by ZMQ from each worker."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        _option(_NODES, "--gpus-per-node", "Larger workers span nodes of as many GPUs; 0: no GPUs. Default: 8."),
    ] = None,
    ucx_devices: Annotated[
        str | None,
        _option(_NODES, "--ucx-devices", "Network devices in a worker's pod that KV goes by. Default: eth0."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        _option(
            _NODES,
            "--resource",
            "Further resource of each worker's pod, such as rdma/ib=1. Repeatable.",
            metavar="NAME=N",
        ),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        _option(_NODES, "--node-selector", "Label of the workers' nodes. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    cpu: Annotated[str | None, _option(_NODES, "--cpu", "Cores that each worker's pod asks for. Default: 4.")] = None,
    memory: Annotated[
        str | None, _option(_NODES, "--memory", "Memory that each worker's pod asks for, such as 64Gi. Default: none.")
    ] = None,
    shared_memory: Annotated[
        str | None, _option(_NODES, "--shared-memory", "/dev/shm of each worker's pod. Default: 16Gi.")
    ] = None,
    bench: Annotated[
        str | None,
        _option(
            _BENCH,
            "--bench",
            "A Job that runs trtx bench with these flags once all workers are there, and keeps its report.",
            metavar="FLAGS",
        ),
    ] = None,
    output: ExportOutput = None,
    dry_run: DryRun = False,
) -> None:
    """Write a topology as manifests of Kubernetes.

    Nothing is applied, and no cluster is asked. Without --plain it is a
    DynamoGraphDeployment (v1beta1) for Dynamo's operator.

    \b
    Examples:
      trtx export kubernetes --model Qwen/Qwen3-8B --image reg/trtx:1.4.2
      trtx export kubernetes --plain --mode disagg --model ./qwen3-8b \\
        --model-claim models/qwen3-8b --image reg/trtx:1.4.2 -o k8s
      trtx export kubernetes --model synthetic:tiny-trained --engine torch \\
        --gpus-per-node 0 --plain --image reg/trtx:1.4.2 \\
        --bench '--concurrency 1,8'
    """
    refuse_ignored(context, (mode, *options.engine_uses(model.engine), *(["dry run"] if dry_run else [])))
    from trtx.export.kubernetes import export

    if image is None:
        raise UsageError("--image is missing; give the image that pods run, such as registry.example/trtx:1.4.2")
    spec = options.build_spec(mode=mode, **asdict(model), **topology, **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encoders)
    if spec.media.allowed_media_path is not None:
        raise UsageError(
            "--allowed-media-path names a directory of this machine, which no pod sees; leave it out, and send images "
            "by https: or data:"
        )
    benchmark = None if bench is None else read_bench(bench, _OF_THIS_MACHINE)
    typed = {
        "form": "plain" if plain else None,
        "name": name,
        "namespace": namespace,
        "image": image,
        "frontends": frontends,
        "model_claim": model_claim,
        "hub_secret": hub_secret,
        "image_pull_secret": image_pull_secret,
        "tls_secret": tls_secret,
        "nats": nats,
        "gpus_per_node": gpus_per_node,
        "ucx_devices": ucx_devices,
        "resources": resources,
        "node_selector": node_selector,
        "cpu": cpu,
        "memory": memory,
        "shared_memory": shared_memory,
        "bench": None if benchmark is None else benchmark.words,
    }
    made = export(spec, _target({field: value for field, value in typed.items() if value is not None}))
    if benchmark is not None:
        benchmark.check_fits(made.served)
    hand_over_export(made, output, dry_run=dry_run)


_OPTIONS = {"resources": "resource"}  # field -> option, if they differ
_OF_THIS_MACHINE = dict.fromkeys(
    ("--resume", "--sweep", "SWEEP_FILE", "--input-file", "--baseline", "--baseline-dir", "--save-baseline"),
    "and the Job's pod has no file of this machine",
)


def _target(given: Mapping[str, Any]) -> Any:
    from trtx.export.kubernetes import KubernetesTarget

    try:
        return KubernetesTarget.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        field = str(first["loc"][0]) if first["loc"] else message.partition(" ")[0]
        option = f"--{_OPTIONS.get(field, field).replace('_', '-')}"
        if first["type"] == "value_error":  # the message begins with the field's name
            for other in (name for name in KubernetesTarget.model_fields if "_" in name):  # other names are plain words
                message = message.replace(f" {other}, ", f" --{other.replace('_', '-')}, ")
            raise UsageError(message.replace(field, option, 1)) from error
        expected = first["msg"].removeprefix("Input should be ")
        raise UsageError(f"{option} {quoted(first.get('input'))}: expected {expected}; see --help") from error
