"""The plan of a topology as a value, and its form in ``plan.json``."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.config import Finding, Mode, Role
from trtx.memory import MemoryPlan

SCHEMA_VERSION = 1
TOPOLOGY_VARIABLE = "TRTX_TOPOLOGY"

ProcessRole = Role | Literal["frontend"]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` holds additions only: what it inherits is ``launch``'s business."""

    name: str  # unique in the topology: frontend, decode-0
    role: ProcessRole
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: Path
    gpu_indices: tuple[int, ...] = ()  # in the caller's visible set
    status_file: Path | None = None  # written by the worker; None where the process writes none
    system_port: int | None = None  # HTTP: metrics of one worker


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What the HTTP port speaks TLS with. Both files are PEM."""

    certificate: Path  # the server's own, its authorities' behind it
    key: Path
    names: tuple[str, ...] = ()  # DNS names and addresses that the certificate is for


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that starting, watching, measuring and stopping a topology needs to know. Frontend first."""

    mode: Mode
    engine: str  # resolved: torch, tensorrt-llm, simulated, paced
    model: str  # the name that clients send
    model_path: Path
    namespace: str  # Dynamo's, unique to the topology; every process carries it as TRTX_TOPOLOGY
    host: str
    port: int
    internal_ports: tuple[int, ...]
    run_dir: Path
    scratch_dir: Path  # discovery records and other short-lived files; gone when the topology is
    processes: tuple[ProcessSpec, ...]
    engine_configs: dict[str, dict[str, Any]]  # role -> the LLM's keyword arguments
    gpu_names: tuple[str, ...]  # one entry a GPU in use
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...] = ()  # of the engine configs; none of them an error
    memory: tuple[MemoryPlan, ...] = ()  # one a role; none where nothing is computed, or of an unknown shape
    tls: ServerTls | None = None  # None: the HTTP port speaks plain HTTP
    warnings: tuple[str, ...] = ()  # what whoever starts it should know before others reach it

    @property
    def url(self) -> str:
        """Where clients on this machine reach it. A wildcard host is reached through loopback."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def certificate(self) -> Path | None:
        """By which its own clients know it (:func:`trtx.tls.trust_of`)."""
        return None if self.tls is None else self.tls.certificate

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.role != "frontend")

    @property
    def worker_count(self) -> int:
        return len(self.workers)

    @property
    def gpu_count(self) -> int:
        return len(self.gpu_names)

    @property
    def is_local(self) -> bool:
        """Only this machine reaches it."""
        return is_loopback(self.host)

    @property
    def routes_by_prefix(self) -> bool:
        """Its frontend's router prefers workers that hold a prompt's beginning."""
        argv = self.processes[0].argv
        return ("--router-mode", "kv") in itertools.pairwise(argv)

    @property
    def marker(self) -> str:
        """``NAME=value``, in the environment of every process of the topology and of nothing else."""
        return f"{TOPOLOGY_VARIABLE}={self.namespace}"

    @property
    def discovery_dir(self) -> Path:
        return self.scratch_dir / "kv"

    def expected_workers(self) -> dict[str, int]:
        """Workers of each role that must be routable before the topology is ready."""
        counts: dict[str, int] = {}
        for worker in self.workers:
            counts[worker.role] = counts.get(worker.role, 0) + 1
        return counts

    def config_path(self, role: str) -> Path:
        """Where the resolved engine config of a role is written before its workers start."""
        return config_path(self.run_dir, role)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; :meth:`from_json` is its inverse."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        """Reads what :meth:`to_json` wrote. Raises ValueError for another schema version."""
        fields = dict(document)
        if (version := fields.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"plan.json has schema_version {version!r}; this trtx reads {SCHEMA_VERSION}")
        for name in ("model_path", "run_dir", "scratch_dir"):
            fields[name] = Path(fields[name])
        for name in ("internal_ports", "gpu_names", "reasons"):
            fields[name] = tuple(fields[name])
        if (tls := fields.get("tls")) is not None:
            fields["tls"] = ServerTls(Path(tls["certificate"]), Path(tls["key"]), tuple(tls["names"]))
        fields["warnings"] = tuple(fields.get("warnings", ()))
        fields["findings"] = tuple(Finding.from_json(entry) for entry in fields.get("findings", ()))
        fields["memory"] = tuple(
            MemoryPlan(**{**entry, "notes": tuple(entry["notes"])}) for entry in fields.get("memory", ())
        )
        fields["processes"] = tuple(_process(entry) for entry in fields["processes"])
        return cls(**fields)


def config_path(run_dir: Path, role: str) -> Path:
    """See :meth:`Plan.config_path`."""
    return run_dir / "serve" / "configs" / f"{role}.yaml"


def is_loopback(host: str) -> bool:
    """Whether an HTTP host is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _process(entry: dict[str, Any]) -> ProcessSpec:
    status_file = entry["status_file"]
    return ProcessSpec(
        **{
            **entry,
            "argv": tuple(entry["argv"]),
            "gpu_indices": tuple(entry["gpu_indices"]),
            "log_path": Path(entry["log_path"]),
            "status_file": None if status_file is None else Path(status_file),
        }
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
