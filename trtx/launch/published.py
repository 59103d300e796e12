"""A plan over hosts as it lies in etcd for those who join it, with what has to be the same on each of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.identity import identify_model
from trtx.config.wording import quoted
from trtx.engine import installed_version
from trtx.errors import UsageError
from trtx.launch.discovery import open_etcd
from trtx.planes.etcd import Etcd, EtcdError
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.published_plan import publish_plan, published_names, read_plan, withdraw_plan
from trtx.planes.registry import RegistryUnknown
from trtx.topology import EtcdService, Plan

_SCHEMA_VERSION = 1
_PREFIX = "trtx-"  # of every namespace


@dataclass(frozen=True, slots=True)
class Published:
    """``model`` is the name that was asked for, to be found on each host; the rest is compared there."""

    plan: Plan  # of all hosts, as no host has settled it
    model: str
    model_sha256: str  # see trtx.checkpoint.identity
    versions: dict[str, str]  # by package

    @classmethod
    def of(cls, plan: Plan, model: str) -> Published:
        """Reads the model's files. Raises UsageError where one can't be read."""
        return cls(plan, model, identify_model(plan.model_path).sampled_sha256, versions_here(plan.engine))

    def to_bytes(self) -> bytes:
        document = {
            "schema_version": _SCHEMA_VERSION,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "versions": self.versions,
            "plan": self.plan.to_json(),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, found: bytes, name: str) -> Published:
        """Raises UsageError for what another trtx has published."""
        try:
            document = json.loads(found)
            if document["schema_version"] != _SCHEMA_VERSION:
                raise ValueError(f"it has schema_version {document['schema_version']!r}")
            return cls(
                Plan.from_json(document["plan"]),
                str(document["model"]),
                str(document["model_sha256"]),
                {str(package): str(version) for package, version in document["versions"].items()},
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the plan of topology {name!r} in etcd is none that this trtx reads ({error}); run the same trtx on "
                "every host"
            ) from error

    def check_here(self, model: str | None) -> Path:
        """Where the model lies on this machine, ``model`` or what was asked for. Raises UsageError where its files or
        the versions here are others than where the plan was made."""
        for package, version in self.versions.items():
            here = versions_here(self.plan.engine).get(package)
            if here != version:
                raise UsageError(
                    f"{package} is {here or 'not installed'} here and {version} where the topology was planned; "
                    "install the same on every host"
                )
        path = resolve_checkpoint(model or self.model).path
        if identify_model(path).sampled_sha256 != self.model_sha256:
            raise UsageError(
                f"the files of {path} are others than those that the topology was planned with; put the same model on "
                "every host, or name it with --model"
            )
        return path


def name_of(plan: Plan) -> str:
    """Of a topology, as ``--name`` has it."""
    return plan.namespace.removeprefix(_PREFIX)


def versions_here(engine: str) -> dict[str, str]:
    """Of the packages that have to be the same on every host."""
    found: dict[str, str] = {}
    packages = ["trtx", "ai-dynamo"] + (["torch", "nixl"] if engine == "torch" else [])
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if engine == "tensorrt-llm" and (version := installed_version()) is not None:
        found["tensorrt_llm"] = version
    return found


def find_published(etcd: EtcdService, name: str) -> Published:
    """What is published under ``name``. Raises UsageError where nothing is, EtcdError where that can't be known."""
    with open_etcd(etcd) as client:
        found = read_plan(client, name)
        if found is None:
            names = ", ".join(published_names(client))
            raise UsageError(
                f"--name {quoted(name)}: no topology of that name is planned in etcd ({names or 'none is'}); start it "
                "with trtx serve --hosts on one of its hosts"
            )
        return Published.from_bytes(found, name)


@contextlib.contextmanager
def publishing(plan: Plan, model: str) -> Iterator[Published]:
    """Keeps ``plan`` in etcd for those who join it, from now until no worker of it is registered any more.

    Where the same topology is served already, because only this host's share of it was started again, what is published
    stays, and is yielded. Raises UsageError where another plan of that name is served, EtcdError.
    """
    assert plan.etcd is not None
    name, own = name_of(plan), Published.of(plan, model)
    with open_etcd(plan.etcd) as client:
        found = read_plan(client, name)
        if found is not None and _is_served(client, plan):
            before = Published.from_bytes(found, name)
            if _essence(before) != _essence(own):
                raise UsageError(
                    f"topology {name!r} is served already, by another plan; end it, or give this one another name in "
                    "the hosts file"
                )
            own = before
        else:
            publish_plan(client, name, own.to_bytes())
    with withdrawn_at_the_end(plan):
        yield own


@contextlib.contextmanager
def withdrawn_at_the_end(plan: Plan) -> Iterator[None]:
    """Takes a published plan out of etcd with the last share of it, whose ever that is."""
    assert plan.etcd is not None
    try:
        yield
    finally:
        with contextlib.suppress(EtcdError, RegistryUnknown, UsageError), open_etcd(plan.etcd) as client:
            if not _is_served(client, plan):
                withdraw_plan(client, name_of(plan))


def _is_served(client: Etcd, plan: Plan) -> bool:
    """Raises RegistryUnknown."""
    assert plan.etcd is not None
    return bool(EtcdRegistry(client, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s).instances())


def _essence(one: Published) -> Mapping[str, Any]:
    """What two plans of one topology have in common, wherever they were made."""
    plan = one.plan
    return {
        "model": (plan.model, one.model_sha256),
        "served by": (plan.mode, plan.engine, one.versions, plan.engine_configs),
        "hosts": plan.hosts,
        "services": (plan.etcd, plan.nats),
        "processes": [
            (one.name, one.role, one.host, one.gpu_indices, one.ports, one.http_port) for one in plan.processes
        ],
    }
