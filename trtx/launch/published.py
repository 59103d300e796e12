"""The inputs of a plan over hosts as published in etcd for joining hosts, and what must be equal on every host.

They contain no commands, no environment and no paths of secrets. A joining host makes the plan itself with the same
pure function, and checks the values from etcd like typed input.
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
from trtx.planes.etcd_errors import EtcdUnreachable
from trtx.planes.published_plan import published_names, read_plan
from trtx.topology import Credentials, EtcdService, Plan

_SCHEMA_VERSION = 2
"""Version 2 contains a plan's inputs. Version 1 contained a plan with its commands."""
_PREFIX = "trtx-"  # prefix of every namespace
OF_ONE_HOST = {"model", "engine", "engine_configs", "overrides", "gpus", "host"}
"""Fields of a spec that are resolved before it is published, or are only meaningful on one machine."""
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
    nats_auth: bool  # NATS requires a user or a token; each host names its own files


@dataclass(frozen=True, slots=True)
class PublishedInputs:
    """The resolved inputs of :func:`trtx.topology.plan_hosts`, which makes the same plan from them on every host."""

    model: str  # the requested name, which each host resolves
    engine: str  # resolved
    engine_configs: dict[Role, dict[str, Any]]  # before --tp, which is in the spec
    spec: TopologySpec  # its own model, engine, engine configs, overrides and GPUs are ignored
    hosts: HostsSpec  # with the topology's name


@dataclass(frozen=True, slots=True)
class Published:
    """``asked``, and the values that a joining host compares with its own."""

    asked: PublishedInputs
    model_sha256: str  # see trtx.checkpoint.identity
    versions: dict[str, str]  # by package

    @classmethod
    def of(cls, asked: PublishedInputs, model_path: Path) -> Published:
        """Computes the comparison values from the model's files.

        Raises UsageError if a file can't be read, or if ``asked`` may not be published
        (:func:`trtx.launch.publishable.check_publishable`).
        """
        check_publishable(asked.spec, asked.engine_configs)
        return cls(asked, identify_model(model_path).sampled_sha256, versions_here(asked.engine))

    def to_bytes(self) -> bytes:
        """The document as JSON, without the paths of secrets."""
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
        """Parses a document. ``etcd_files``, ``nats_files``: this host's own credentials files.

        Raises UsageError for anything that this trtx would not have published under ``name``.
        """
        try:
            return cls._read(found, name, etcd_files, nats_files)
        except _NoFiles:
            raise
        except ValidationError as error:
            reason = _problem(error)
        except RecursionError:
            reason = "it is nested too deeply"
        except UnicodeDecodeError:
            reason = "it is not UTF-8"
        except json.JSONDecodeError:
            reason = "it is not JSON"
        except (UsageError, ValueError) as error:
            reason = str(error)
        raise UsageError(
            f"the plan of topology {name!r} in etcd can't be read by this trtx ({reason}); run the same trtx on every "
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
                f"topology {name!r} uses nats_auth, and each host has credentials files of its own; name them with "
                "--nats-auth"
            )
        files = {"etcd_auth": _named(etcd_files), "nats_auth": _named(nats_files)}
        # Through JSON: in strict mode, pydantic converts to tuples and paths only from JSON input.
        hosts = HostsSpec.model_validate_json(json.dumps(document.hosts | files), strict=True)
        if hosts.name != name:
            raise ValueError(f"it belongs to topology {quoted(hosts.name)}")
        spec = TopologySpec.model_validate_json(json.dumps(document.spec), strict=True)
        if document.engine_configs.keys() != spec.roles.keys():
            raise ValueError(
                f"it has engine configs of {', '.join(document.engine_configs) or 'no role'}, but its roles are "
                f"{', '.join(spec.roles)}"
            )
        check_publishable(spec, document.engine_configs)
        configs = {role: _with_numbers(values) for role, values in document.engine_configs.items()}
        asked = PublishedInputs(document.model, document.engine, configs, spec, hosts)
        return cls(asked, document.model_sha256, document.versions)

    def is_same_as(self, other: Published) -> bool:
        """Whether hosts with these two documents form one topology. The model's path may differ."""
        return _essence(self.to_bytes()) == _essence(other.to_bytes())

    def check_here(self, model: str | None) -> Path:
        """Path of the model on this machine; ``model`` replaces the published name.

        Raises UsageError if the model's files or the package versions differ from those of the planning host.
        """
        here = versions_here(self.asked.engine)
        for package in sorted(here.keys() | self.versions.keys()):
            own, there = (versions.get(package) or "not installed" for versions in (here, self.versions))
            if own != there:
                raise UsageError(
                    f"{shown(package)} is {own} here and {shown(there)} where the topology was planned; "
                    "install the same version on every host"
                )
        path = resolve_checkpoint(model or self.asked.model).path
        if identify_model(path).sampled_sha256 != self.model_sha256:
            raise UsageError(
                f"the files of {path} differ from those that the topology was planned with; put the same model on "
                "every host, or name it with --model"
            )
        return path


class _NoFiles(UsageError):
    """The document is valid, but this host lacks credentials files for it."""


def _named(files: Credentials | None) -> dict[str, str] | None:
    if files is None:
        return None
    pairs = ((name, getattr(files, name)) for name in Credentials.__dataclass_fields__)
    return {name: str(value) for name, value in pairs if value is not None}


def _with_numbers(value: Any) -> Any:
    """``value`` with the integer keys that JSON turned into strings: batch sizes. No field name is a number."""
    if isinstance(value, dict):
        return {int(key) if _WHOLE.fullmatch(key) else key: _with_numbers(entry) for key, entry in value.items()}
    return [_with_numbers(entry) for entry in value] if isinstance(value, list) else value


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    return shown(f"{where}: {reason}" if where else reason, 300)


def name_of(plan: Plan) -> str:
    """The topology's name, as in ``--name``."""
    return plan.namespace.removeprefix(_PREFIX)


def versions_here(engine: str) -> dict[str, str]:
    """Versions of the packages that must be equal on every host."""
    found: dict[str, str] = {}
    packages = ["trtx", "ai-dynamo"] + (["torch", "nixl"] if engine == "torch" else [])
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if engine == "tensorrt-llm" and (version := installed_version()) is not None:
        found["tensorrt_llm"] = version
    return found


def find_published(etcd: EtcdService, name: str, *, nats_files: Credentials | None = None) -> Published:
    """The document published under ``name``. ``nats_files``: this host's credentials for NATS.

    Raises UsageError if there is none, EtcdError if etcd can't be read.
    """
    with remedy_added(etcd), open_etcd(etcd) as client:
        found = read_plan(client, name)
        if found is None:
            names = ", ".join(published_names(client))
            raise UsageError(
                f"--name {quoted(name)}: no topology of that name is planned in etcd ({shown(names) or 'none is'}); "
                "start it with trtx serve --hosts on one of its hosts"
            )
        return Published.from_bytes(found, name, etcd_files=etcd.credentials, nats_files=nats_files)


@contextlib.contextmanager
def remedy_added(service: EtcdService) -> Iterator[None]:
    """Adds a remedy to the error of an etcd that does not answer. Raises LaunchError, UsageError."""
    try:
        yield
    except EtcdUnreachable as error:
        raise LaunchError(
            f"{error}; expected an etcd at {', '.join(service.endpoints)}: start it, open its port to this host, or "
            f"correct its address{'' if service.credentials is None else ' or etcd_auth (--etcd-auth)'}"
        ) from error


def _essence(document: bytes) -> dict[str, Any]:
    """The fields that must be equal on all hosts of a topology: all but the model's name."""
    fields: dict[str, Any] = json.loads(document)
    return {name: value for name, value in fields.items() if name != "model"}
