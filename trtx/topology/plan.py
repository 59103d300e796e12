"""The plan of a topology as a value, and its form in ``plan.json``."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.config import Finding, Mode, Role
from trtx.config.left_out import LeftOutField, left_out_warnings
from trtx.memory import MemoryPlan

SCHEMA_VERSION = 2
"""2: hosts, their discovery and several frontends. 1, which is read too, knew one machine and one frontend."""
_OLDEST = 1
TOPOLOGY_VARIABLE = "TRTX_TOPOLOGY"

ProcessRole = Role | Literal["frontend"]
Discovery = Literal["file", "etcd", "kubernetes"]
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """One machine of a topology."""

    name: str
    address: str  # IPv4: where its processes listen, and are reached
    device: str  # of UCX, several with commas


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files that hold secrets, and whose they are: a certificate's three, a password's two, or a token's one. What is
    in them reaches the environment of a child alone, when it starts."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class EtcdService:
    """Where processes of several hosts find each other."""

    endpoints: tuple[str, ...]
    lease_ttl_s: int  # so long a process that nobody removes stays registered
    credentials: Credentials | None = None
    host_lease_ttl_s: int | None = None  # so long a lost host, whose processes others remove; None: nobody does


@dataclass(frozen=True, slots=True)
class NatsService:
    """What carries their events."""

    url: str
    credentials: Credentials | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` holds additions only: what it inherits is ``launch``'s business.

    A port that is None is the system's choice, or none: of a frontend HTTP, requests and responses, of a worker
    requests, the system port and KV.
    """

    name: str  # unique in the topology: frontend, decode-0
    role: ProcessRole
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: Path
    gpu_indices: tuple[int, ...] = ()  # in the caller's visible set, on its host
    status_file: Path | None = None  # written by the worker; None where the process writes none
    system_port: int | None = None  # HTTP: metrics of one worker
    host: str = ""  # by name; empty on one machine
    address: str = _LOOPBACK  # what all of its ports listen on but HTTP
    http_host: str = ""  # of a frontend
    http_port: int | None = None
    request_port: int | None = None
    response_port: int | None = None
    kv_ports: tuple[int, int] | None = None  # first and last, of which UCX takes some where it goes over TCP

    @property
    def ports(self) -> dict[str, int]:
        """Of the planned ones but HTTP, by what they are for."""
        named = {"requests": self.request_port, "responses": self.response_port, "system": self.system_port}
        return {what: port for what, port in named.items() if port is not None}


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
    host: str  # HTTP of the first frontend
    port: int
    internal_ports: tuple[int, ...]  # of one machine, on loopback
    run_dir: Path
    scratch_dir: Path  # discovery records and other short-lived files; gone when the topology is
    processes: tuple[ProcessSpec, ...]
    engine_configs: dict[str, dict[str, Any]]  # role -> the LLM's keyword arguments, those that its engine acts on
    gpu_names: tuple[str, ...]  # one entry a GPU in use, once also where workers share it
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...] = ()  # of the engine configs; none of them an error
    memory: tuple[MemoryPlan, ...] = ()  # one a role; none where nothing is computed, or of an unknown shape
    discovery: Discovery = "file"
    hosts: tuple[PlannedHost, ...] = ()  # none on one machine
    this_host: str = ""  # in a share: whose it is
    etcd: EtcdService | None = None  # with discovery etcd
    nats: NatsService | None = None  # the same
    tls: ServerTls | None = None  # None: the HTTP ports speak plain HTTP
    warnings: tuple[str, ...] = ()  # what whoever starts it should know before others reach it
    left_out: tuple[LeftOutField, ...] = ()  # of its engine configs: what its engine does not act on

    @property
    def url(self) -> str:
        """Where clients on its machine reach the first frontend. A wildcard host is reached through loopback."""
        return self._url("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host, self.port)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of every frontend, in their order."""
        return tuple(self.url_of(frontend) for frontend in self.frontends)

    def url_of(self, frontend: ProcessSpec) -> str:
        """Of one of its frontends, as :attr:`url`."""
        host, port = self.http_of(frontend)
        return self._url(frontend.address if host in ("0.0.0.0", "::") else host, port)

    def http_of(self, frontend: ProcessSpec) -> tuple[str, int]:
        """What one of its frontends listens on for HTTP."""
        if frontend.http_port is None:  # a plan of version 1
            return self.host, self.port
        return frontend.http_host, frontend.http_port

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def certificate(self) -> Path | None:
        """By which its own clients know its frontends (:func:`trtx.tls.trust_of`)."""
        return None if self.tls is None else self.tls.certificate

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """``warnings``, and what was typed and has no effect."""
        return (*self.warnings, *left_out_warnings(self.left_out, self.engine))

    @property
    def frontends(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.role == "frontend")

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.role != "frontend")

    def sharers(self, worker: ProcessSpec) -> tuple[ProcessSpec, ...]:
        """The encode workers on a GPU of another worker."""
        return tuple(
            one
            for one in self.workers
            if one.role == "encode" != worker.role
            and one.host == worker.host
            and {*one.gpu_indices} & {*worker.gpu_indices}
        )

    @property
    def worker_count(self) -> int:
        return len(self.workers)

    @property
    def gpu_count(self) -> int:
        return len(self.gpu_names)

    @property
    def is_local(self) -> bool:
        """Only this machine reaches it."""
        return is_loopback(self.host) and not self.hosts

    @property
    def routes_by_prefix(self) -> bool:
        """Its frontend's router prefers workers that hold a prompt's beginning."""
        return any(("--router-mode", "kv") in itertools.pairwise(frontend.argv) for frontend in self.frontends)

    @property
    def marker(self) -> str:
        """``NAME=value``, in the environment of every process of the topology, or of the share, and of nothing else."""
        return f"{TOPOLOGY_VARIABLE}={group_of(self.namespace, self.this_host)}"

    def share(self, host: str) -> Plan:
        """What one of its hosts runs, and no other. Raises ValueError where it has no such host."""
        if host not in {one.name for one in self.hosts}:
            raise ValueError(f"no host {host!r} in the plan of {self.namespace}")
        processes = tuple(process for process in self.processes if process.host == host)
        names = dict(zip(_gpu_slots(self.workers), self.gpu_names, strict=True))
        first = next((process for process in processes if process.role == "frontend"), self.frontends[0])
        assert first.http_port is not None  # of a plan over hosts
        return dataclasses.replace(
            self,
            this_host=host,
            host=first.http_host,
            port=first.http_port,
            processes=processes,
            engine_configs={
                role: values
                for role, values in self.engine_configs.items()
                if any(process.role == role for process in processes)
            },
            left_out=tuple(one for one in self.left_out if any(process.role == one.role for process in processes)),
            gpu_names=tuple(name for (where, _), name in names.items() if where == host),
        )

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
        version = fields.pop("schema_version", None)
        if version not in range(_OLDEST, SCHEMA_VERSION + 1):
            raise ValueError(f"plan.json has schema_version {version!r}; this trtx reads {_OLDEST} to {SCHEMA_VERSION}")
        for name in ("model_path", "run_dir", "scratch_dir"):
            fields[name] = Path(fields[name])
        for name in ("internal_ports", "gpu_names", "reasons"):
            fields[name] = tuple(fields[name])
        if (tls := fields.get("tls")) is not None:
            fields["tls"] = ServerTls(Path(tls["certificate"]), Path(tls["key"]), tuple(tls["names"]))
        fields["warnings"] = tuple(fields.get("warnings", ()))
        fields["left_out"] = tuple(LeftOutField(**entry) for entry in fields.get("left_out", ()))
        fields["findings"] = tuple(Finding.from_json(entry) for entry in fields.get("findings", ()))
        fields["memory"] = tuple(
            MemoryPlan(**{**entry, "notes": tuple(entry["notes"])}) for entry in fields.get("memory", ())
        )
        fields["processes"] = tuple(_process(entry) for entry in fields["processes"])
        fields["hosts"] = tuple(PlannedHost(**entry) for entry in fields.get("hosts", ()))
        if (etcd := fields.get("etcd")) is not None:
            fields["etcd"] = EtcdService(
                tuple(etcd["endpoints"]), etcd["lease_ttl_s"], _credentials(etcd), etcd.get("host_lease_ttl_s")
            )
        if (nats := fields.get("nats")) is not None:
            fields["nats"] = NatsService(nats["url"], _credentials(nats))
        return cls(**fields)


def config_path(run_dir: Path, role: str) -> Path:
    """See :meth:`Plan.config_path`."""
    return run_dir / "serve" / "configs" / f"{role}.yaml"


def is_loopback(host: str) -> bool:
    """Whether an HTTP host is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def group_of(namespace: str, host: str) -> str:
    """What processes of one topology on one machine carry as TRTX_TOPOLOGY: a share's end ends that share alone."""
    return f"{namespace}.{host}" if host else namespace


def _gpu_slots(workers: tuple[ProcessSpec, ...]) -> list[tuple[str, int]]:
    """Host and index of each GPU, in the order of ``gpu_names``."""
    return list(dict.fromkeys((worker.host, index) for worker in workers for index in worker.gpu_indices))


def _credentials(entry: dict[str, Any]) -> Credentials | None:
    if (found := entry["credentials"]) is None:
        return None
    paths = {name: Path(value) for name, value in found.items() if value is not None and name != "username"}
    return Credentials(username=found["username"], **paths)


def _process(entry: dict[str, Any]) -> ProcessSpec:
    status_file = entry["status_file"]
    return ProcessSpec(
        **{
            **entry,
            "argv": tuple(entry["argv"]),
            "gpu_indices": tuple(entry["gpu_indices"]),
            "log_path": Path(entry["log_path"]),
            "status_file": None if status_file is None else Path(status_file),
            "kv_ports": None if (kv := entry.get("kv_ports")) is None else tuple(kv),
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
