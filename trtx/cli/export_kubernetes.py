"""``trtx export kubernetes``: exports a topology as manifests, for Dynamo's operator or for a cluster without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, optional
from trtx.cli.export import NODES, DryRun, ExportMode, ExportOutput, GpusPerNode, hand_over_export, options_of_cluster
from trtx.cli.export_bench import read_bench
from trtx.cli.field_options import validated
from trtx.cli.placement import refuse_ignored
from trtx.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CLUSTER, _BENCH = "Cluster", "Measuring"
_Topology = Annotated[Mapping[str, Any], options_of_cluster()]


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 files written; 2 usage, config, or a topology that pods can't serve.",
)
@options.spread(engine="tensorrt-llm")
def kubernetes(
    context: typer.Context,
    *,
    model: options.ModelOptions,
    mode: ExportMode = "agg",
    topology: _Topology,
    media: options.MediaOptions,
    image: Annotated[
        str | None,
        optional(
            _CLUSTER,
            "--image",
            "Container image with trtx, Dynamo and the engine, such as registry.example/trtx:1.4.2.",
        ),
    ] = None,
    plain: Annotated[
        bool, optional(_CLUSTER, "--plain", "Write Deployments and Services, for a cluster without Dynamo's operator.")
    ] = False,
    name: Annotated[
        str | None, optional(_CLUSTER, "--name", "Name of the topology in the cluster. Default: from model and mode.")
    ] = None,
    namespace: Annotated[
        str | None, optional(_CLUSTER, "--namespace", "Kubernetes namespace of all objects. Default: default.")
    ] = None,
    frontends: Annotated[
        int | None, optional(_CLUSTER, "--frontends", "Frontends behind one Service. Default: 1.")
    ] = None,
    model_claim: Annotated[
        str | None,
        optional(
            _CLUSTER,
            "--model-claim",
            "Volume claim with the model, and its directory there. Default: pods fetch the model from the hub.",
            metavar="CLAIM/PATH",
        ),
    ] = None,
    hub_secret: Annotated[
        str | None,
        optional(_CLUSTER, "--hub-secret", "Secret whose key HF_TOKEN gives access to the model on the hub."),
    ] = None,
    image_pull_secret: Annotated[
        str | None, optional(_CLUSTER, "--image-pull-secret", "Secret with the credentials of the image's registry.")
    ] = None,
    tls_secret: Annotated[
        str | None,
        optional(_CLUSTER, "--tls-secret", "Secret of type kubernetes.io/tls, with which the frontends serve HTTPS."),
    ] = None,
    nats: Annotated[
        str | None,
        optional(
            _CLUSTER, "--nats", "NATS for events, nats://HOST:PORT or tls://HOST:PORT. Default: ZMQ from each worker."
        ),
    ] = None,
    gpus_per_node: GpusPerNode = None,
    ucx_devices: Annotated[
        str | None,
        optional(NODES, "--ucx-devices", "Network devices of a worker's pod for KV transfers. Default: eth0."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        optional(
            NODES,
            "--resource",
            "Additional resource of each worker's pod, such as rdma/ib=1. Repeatable.",
            metavar="NAME=N",
        ),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        optional(NODES, "--node-selector", "Label of the workers' nodes. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    cpu: Annotated[
        str | None, optional(NODES, "--cpu", "CPU request of each worker's pod, in cores. Default: 4.")
    ] = None,
    memory: Annotated[
        str | None, optional(NODES, "--memory", "Memory request of each worker's pod, such as 64Gi. Default: none.")
    ] = None,
    shared_memory: Annotated[
        str | None, optional(NODES, "--shared-memory", "Size of /dev/shm in each worker's pod. Default: 16Gi.")
    ] = None,
    bench: Annotated[
        str | None,
        optional(
            _BENCH,
            "--bench",
            "Add a Job that runs trtx bench with these flags when all workers are ready, and keeps its report.",
            metavar="FLAGS",
        ),
    ] = None,
    output: ExportOutput = None,
    dry_run: DryRun = False,
) -> None:
    """Write a topology as Kubernetes manifests.

    Applies nothing and contacts no cluster. Without --plain, it writes a
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
    from trtx.export.kubernetes import KubernetesTarget, export

    if image is None:
        raise UsageError("--image is missing; give the image of the pods, such as registry.example/trtx:1.4.2")
    spec = options.build_spec(mode=mode, **asdict(model), **topology, **media)
    options.check_roles((mode,), model.config, model.overrides, model.recipe, encode=spec.encoders)
    if spec.media.allowed_media_path is not None:
        raise UsageError(
            "--allowed-media-path names a directory of this machine, which pods can't read; leave it out, and send "
            "images as https: or data: URLs"
        )
    benchmark = None if bench is None else read_bench(bench, _OF_THIS_MACHINE)
    given = {name: context.params.get(name) for name in KubernetesTarget.model_fields}
    given |= {"form": "plain" if plain else None, "bench": None if benchmark is None else benchmark.words}
    target = validated(
        KubernetesTarget, {name: value for name, value in given.items() if value is not None}, {"resources": "resource"}
    )
    made = export(spec, target)
    if benchmark is not None:
        benchmark.check_fits(made.served)
    hand_over_export(made, output, dry_run=dry_run)


_OF_THIS_MACHINE = dict.fromkeys(
    ("--resume", "--sweep", "SWEEP_FILE", "--input-file", "--baseline", "--baseline-dir", "--save-baseline"),
    "and the Job's pod has no file of this machine",
)
