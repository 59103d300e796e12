"""Assembles the files of a Kubernetes export; each explains its content and use at its top."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.metadata import version

import yaml

from trtx import __version__
from trtx.config import TopologySpec
from trtx.export.files import ExportedFile
from trtx.export.kubernetes import other_manifests, plain
from trtx.export.kubernetes.graph import API_VERSION, graph
from trtx.export.kubernetes.planning import PodKind, PodPlan, plan_pods
from trtx.export.kubernetes.pods import Manifest
from trtx.export.kubernetes.target import KubernetesTarget
from trtx.export.outcome import Export, ExportedService, Part

_WIDTH = 110


def export(spec: TopologySpec, target: KubernetesTarget) -> Export:
    """Exports ``spec`` as manifests for ``target``. Raises UsageError for a topology that can't be served there."""
    planned = plan_pods(spec, target)
    configs = other_manifests.engine_configs(planned)
    name = configs["metadata"]["name"]
    files = [_file("engine-configs.yaml", _about(planned), [configs])]
    if target.form == "operator":
        files.append(_file("graph.yaml", _GRAPH, [graph(planned, name)]))
    else:
        files.insert(0, _file("crd.yaml", _CRD, [plain.metadata_crd()]))
        files.append(_file("access.yaml", _ACCESS, plain.access(planned)))
        workers = [plain.deployment(planned, kind, name) for kind in planned.workers]
        files.append(_file("workers.yaml", _WORKERS, [plain.discovery_service(planned), *workers]))
        frontend = plain.deployment(planned, planned.kinds[0], name)
        files.append(_file("frontend.yaml", _FRONTEND, [plain.http_service(planned), frontend]))
    files.append(_file("network-policy.yaml", _POLICY, other_manifests.network_policies(planned)))
    if target.bench is not None:
        files.append(_file("bench-volume.yaml", _VOLUME, [other_manifests.bench_volume(planned)]))
        files.append(_file("bench-job.yaml", _JOB, [other_manifests.bench_job(planned, target.bench)]))
    return Export(
        files=tuple(files),
        findings=planned.findings,
        how=_how(planned),
        served=ExportedService(planned.model, planned.engine, planned.engine_configs, planned.checkpoint),
        about=_what(planned),
        parts=tuple(
            Part(kind.role, _pods(kind), (*kind.command, *kind.arguments), _told(kind)) for kind in planned.kinds
        ),
        reasons=planned.reasons,
        left_out=planned.left_out,
    )


def _pods(kind: PodKind) -> str:
    what = "frontend" if not kind.is_worker else "worker"
    count = f"{kind.replicas} {what}{'' if kind.replicas == 1 else 's'}"
    pods = f" of {kind.pods} pods (multinode.nodeCount)" if kind.pods > 1 else ""
    gpus = f"{kind.gpus} GPU{'' if kind.gpus == 1 else 's'} a pod" if kind.gpus else "no GPU"
    return f"{count}{pods}, {gpus}"


def _told(kind: PodKind) -> dict[str, str]:
    """Returns the environment of a pod as text; a value that the kubelet fills in appears as its field path."""
    return {
        str(one["name"]): str(one.get("value", f"({one.get('valueFrom', {}).get('fieldRef', {}).get('fieldPath')})"))
        for one in kind.variables
    }


_GRAPH = (
    f"The topology, for Dynamo's operator ({API_VERSION}): it makes the pods, their Services, accounts and probes of "
    "this."
)
_CRD = (
    "For the whole cluster, once, by who may do that; Dynamo's operator brings it too. Workers say there what "
    "frontends have to know."
)
_ACCESS = "The accounts of frontends and of workers, and what they may: no more than Dynamo 1.4.2 was seen to ask for."
_WORKERS = "The workers, and the Service by which frontends know which of them are ready."
_FRONTEND = "The frontends, and the Service that clients reach."
_POLICY = (
    "Dynamo's processes neither encrypt nor authenticate what they say to each other here: only pods of this topology "
    "may. It holds where the cluster's network plugin enforces policies. Prometheus reaches port 9090 of workers only "
    "with a policy more."
)
_VOLUME = "Where the report stays when the Job is gone."
_JOB = "Measures once, when all workers are there. To measure again, delete the Job and apply this file again."


def _what(planned: PodPlan) -> str:
    target = planned.target
    form = "for Dynamo's operator" if target.form == "operator" else "without Dynamo's operator"
    serves = ", ".join(f"{kind.replicas} {kind.role}" for kind in planned.kinds)
    gpus = "no GPUs" if not planned.gpu_count else f"{planned.gpu_count} GPUs"
    return (
        f"{planned.model} by engine {planned.engine}: {serves}; {gpus}. Written by trtx {__version__} {form}, Dynamo "
        f"{version('ai-dynamo')}. Not looked at: the cluster, its nodes, whether the model fits their GPUs, and what "
        f"the image {target.image} holds."
    )


def _about(planned: PodPlan) -> str:
    reasons = f" Decided: {'; '.join(planned.reasons)}." if planned.reasons else ""
    return f"{_what(planned)} {_how(planned)}{reasons}"


def _how(planned: PodPlan) -> str:
    target = planned.target
    kind = "dynamographdeployment" if target.form == "operator" else "deployments"
    words = [
        f"Apply with: kubectl apply -f DIRECTORY. Watch with: kubectl -n {target.namespace} get {kind},pods.",
        f"From inside the cluster it is {other_manifests.url(planned)}, from outside "
        f"kubectl -n {target.namespace} port-forward service/{target.name}-frontend 8000.",
    ]
    if target.tls_secret is None:
        words.append("HTTP has no TLS and no authentication: put a gateway in front of it.")
    return " ".join(words)


class _Dumper(yaml.SafeDumper):
    """Dumps YAML for people to read and edit: without anchors, and with multi-line text as literal blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _yaml(manifest: Manifest) -> str:
    return str(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=_WIDTH))


def _file(name: str, about: str, manifests: Sequence[Manifest]) -> ExportedFile:
    comment = "".join(f"# {line}\n" for line in textwrap.wrap(about, _WIDTH, break_on_hyphens=False))
    documents = "".join(f"---\n{_yaml(one)}" for one in manifests)
    return ExportedFile(name, comment + documents)
