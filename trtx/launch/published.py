"""What a plan over hosts is made of, as it lies in etcd for those who join it, and what has to be the same on each.

It holds no command, no environment, no path of a secret: a host that joins makes the plan itself, by the same pure
function, and takes from etcd what a person could have typed, under the same checks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.identity import identify_model
from trtx.config import Role, TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.config.strict_json import parse_json
from trtx.config.topology import Name
from trtx.config.wording import quoted, shown
from trtx.engine import installed_version
from trtx.errors import LaunchError, UsageError
from trtx.launch.discovery import open_etcd
from trtx.launch.publishable import check_publishable
from trtx.planes.etcd import EtcdUnreachable
from trtx.planes.published_plan import published_names, read_plan
from trtx.topology import Credentials, EtcdService, Plan

_SCHEMA_VERSION = 2
"""2: what a plan is made of. 1 was a plan, commands and all."""
_PREFIX = "trtx-"  # of every namespace
OF_ONE_HOST = {"model", "engine", "engine_configs", "overrides", "gpus", "host"}
"""Fields of a spec that are resolved before it is published, or mean one machine."""
_WHOLE = re.compile(r"[0-9]{1,9}")
_Engine = Literal["torch", "tensorrt-llm", "simulated", "paced"]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: int
    model: Name
    model_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    versions: dict[str, str]
    engine: _Engine
    engine_configs: dict[Role, dict[str, Any]]
    spec: dict[str, Any]
    hosts: dict[str, Any]
    nats_auth: bool  # NATS asks for a user or a token; whose files that are each host says for itself


@dataclass(frozen=True, slots=True)
class Asked:
    """What :func:`trtx.topology.plan_hosts` makes a plan of, resolved: the same plan wherever it is made."""

    model: str  # the name that was asked for, to be found on each host
    engine: str  # resolved
    engine_configs: dict[Role, dict[str, Any]]  # before --tp, which the spec has
    spec: TopologySpec  # its own model, engine, engine configs, overrides and GPUs say nothing here
    hosts: HostsSpec  # with the topology's name


@dataclass(frozen=True, slots=True)
class Published:
    """``asked``, and what is compared with it where it is joined."""

    asked: Asked
    model_sha256: str  # see trtx.checkpoint.identity
    versions: dict[str, str]  # by package

    @classmethod
    def of(cls, asked: Asked, model_path: Path) -> Published:
        """Reads the model's files. Raises UsageError where one can't be read, or what is asked for may not lie in
        etcd (:func:`trtx.launch.publishable.check_publishable`)."""
        check_publishable(asked.spec, asked.engine_configs)
        return cls(asked, identify_model(model_path).sampled_sha256, versions_here(asked.engine))

    def to_bytes(self) -> bytes:
        """Without the names of files that hold secrets."""
        asked = self.asked
        document = {
            "schema_version": _SCHEMA_VERSION,
            "model": asked.model,
            "model_sha256": self.model_sha256,
            "versions": self.versions,
            "engine": asked.engine,
            "engine_configs": asked.engine_configs,
            "spec": asked.spec.model_dump(mode="json", exclude=OF_ONE_HOST, exclude_defaults=True),
            "hosts": asked.hosts.model_dump(mode="json", exclude={"etcd_auth", "nats_auth"}, exclude_defaults=True),
            "nats_auth": asked.hosts.nats_auth is not None,
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(
        cls, found: bytes, name: str, *, etcd_files: Credentials | None = None, nats_files: Credentials | None = None
    ) -> Published:
        """``etcd_files``, ``nats_files``: this host's own. Raises UsageError for what this trtx would not have
        published under ``name``, whoever wrote it."""
        try:
            return cls._read(found, name, etcd_files, nats_files)
        except _NoFiles:
            raise
        except ValidationError as error:
            told = _problem(error)
        except RecursionError:
            told = "it is nested too deeply"
        except UnicodeDecodeError:
            told = "it is not UTF-8"
        except json.JSONDecodeError:
            told = "it is no JSON"
        except (UsageError, ValueError) as error:
            told = str(error)
        raise UsageError(
            f"the plan of topology {name!r} in etcd is none that this trtx reads ({told}); run the same trtx on every "
            "host"
        )

    @classmethod
    def _read(
        cls, found: bytes, name: str, etcd_files: Credentials | None, nats_files: Credentials | None
    ) -> Published:
        raw = parse_json(found.decode())
        if isinstance(raw, dict) and raw.get("schema_version") != _SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {quoted(raw.get('schema_version'))}, not {_SCHEMA_VERSION}")
        document = _Document.model_validate_json(json.dumps(raw))
        if strange := sorted(OF_ONE_HOST & document.spec.keys()):
            raise ValueError(f"its spec has {strange[0]}")
        if strange := sorted({"etcd_auth", "nats_auth"} & document.hosts.keys()):
            raise ValueError(f"its hosts have {strange[0]}")
        if document.nats_auth and nats_files is None:
            raise _NoFiles(
                f"topology {name!r} was planned with nats_auth, and the files are each host's own; name them with "
                "--nats-auth"
            )
        files = {"etcd_auth": _named(etcd_files), "nats_auth": _named(nats_files)}
        # By way of JSON, of which alone pydantic is strict and still makes tuples and paths.
        hosts = HostsSpec.model_validate_json(json.dumps(document.hosts | files), strict=True)
        if hosts.name != name:
            raise ValueError(f"it is of topology {quoted(hosts.name)}")
        spec = TopologySpec.model_validate_json(json.dumps(document.spec), strict=True)
        if document.engine_configs.keys() != spec.roles.keys():
            raise ValueError(
                f"it has engine configs of {', '.join(document.engine_configs) or 'no role'}, and its roles are "
                f"{', '.join(spec.roles)}"
            )
        check_publishable(spec, document.engine_configs)
        configs = {role: _with_numbers(values) for role, values in document.engine_configs.items()}
        asked = Asked(document.model, document.engine, configs, spec, hosts)
        return cls(asked, document.model_sha256, document.versions)

    def is_same_as(self, other: Published) -> bool:
        """Whether hosts of the one and of the other make one topology: the model may lie anywhere."""
        return _essence(self.to_bytes()) == _essence(other.to_bytes())

    def check_here(self, model: str | None) -> Path:
        """Where the model lies on this machine, ``model`` or what was asked for. Raises UsageError where its files or
        the versions here are others than where the plan was made."""
        here = versions_here(self.asked.engine)
        for package in sorted(here.keys() | self.versions.keys()):
            own, there = (versions.get(package) or "not installed" for versions in (here, self.versions))
            if own != there:
                raise UsageError(
                    f"{shown(package)} is {own} here and {shown(there)} where the topology was planned; "
                    "install the same on every host"
                )
        path = resolve_checkpoint(model or self.asked.model).path
        if identify_model(path).sampled_sha256 != self.model_sha256:
            raise UsageError(
                f"the files of {path} are others than those that the topology was planned with; put the same model on "
                "every host, or name it with --model"
            )
        return path


class _NoFiles(UsageError):
    """The plan is one, and this host lacks something for it."""


def _named(files: Credentials | None) -> dict[str, str] | None:
    if files is None:
        return None
    pairs = ((name, getattr(files, name)) for name in Credentials.__dataclass_fields__)
    return {name: str(value) for name, value in pairs if value is not None}


def _with_numbers(value: Any) -> Any:
    """With whole numbers where JSON made text of a mapping's keys: no field is called so, and batch sizes are."""
    if isinstance(value, dict):
        return {int(key) if _WHOLE.fullmatch(key) else key: _with_numbers(entry) for key, entry in value.items()}
    return [_with_numbers(entry) for entry in value] if isinstance(value, list) else value


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    told = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    return shown(f"{where}: {told}" if where else told, 300)


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


def find_published(etcd: EtcdService, name: str, *, nats_files: Credentials | None = None) -> Published:
    """What is published under ``name``. ``nats_files``: what this host shows NATS, as ``etcd.credentials`` are what it
    shows etcd. Raises UsageError where nothing is, EtcdError where that can't be known."""
    with told_where(etcd), open_etcd(etcd) as client:
        found = read_plan(client, name)
        if found is None:
            names = ", ".join(published_names(client))
            raise UsageError(
                f"--name {quoted(name)}: no topology of that name is planned in etcd ({shown(names) or 'none is'}); "
                "start it with trtx serve --hosts on one of its hosts"
            )
        return Published.from_bytes(found, name, etcd_files=etcd.credentials, nats_files=nats_files)


@contextlib.contextmanager
def told_where(service: EtcdService) -> Iterator[None]:
    """What is asked of an etcd that does not answer ends in what to do. Raises LaunchError, UsageError."""
    try:
        yield
    except EtcdUnreachable as error:
        raise LaunchError(
            f"{error}; expected an etcd at {', '.join(service.endpoints)}: start it, open its port to this host, or "
            f"correct its address{'' if service.credentials is None else ' or etcd_auth (--etcd-auth)'}"
        ) from error


def _essence(document: bytes) -> dict[str, Any]:
    """What two of one topology have in common, wherever they were published: not where the model lies there."""
    fields: dict[str, Any] = json.loads(document)
    return {name: value for name, value in fields.items() if name != "model"}
