"""The plan of a topology as a value, and its JSON form in ``plan.json``."""

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
"""Version 2 has hosts, their discovery, and several frontends.

Version 1, which is still read, has one machine and one frontend.
"""
_OLDEST = 1
TOPOLOGY_VARIABLE = "TRTX_TOPOLOGY"
CHAT_TEMPLATE = "chat_template.jinja"

ProcessRole = Role | Literal["frontend"]
Discovery = Literal["file", "etcd", "kubernetes"]
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """One machine of a topology."""

    name: str
    address: str  # IPv4 address on which its processes listen and are reached
    device: str  # UCX's network device; several are separated by commas


@dataclass(frozen=True, slots=True)
class Credentials:
    """Paths of secret files: three for certificates, a user name and a file for a password, or one for a token.

    Their contents are only put into the environment of a child at its start.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    username: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class EtcdService:
    """The etcd through which processes of several hosts find each other."""

    endpoints: tuple[str, ...]
    lease_ttl_s: int  # how long a dead process stays registered if it is not removed
    credentials: Credentials | None = None
    # how long a lost host stays registered; then other hosts remove its processes; None: they do not
    host_lease_ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class NatsService:
    """The NATS that carries the events of a topology over hosts."""

    url: str
    credentials: Credentials | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` contains additions only; ``launch`` decides what it inherits.

    A port of None is chosen by the system, or not used. Frontends use the HTTP, request and response ports; workers use
    the request, system and KV ports.
    """

    name: str  # unique in the topology, such as frontend or decode-0
    role: ProcessRole
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: Path
    gpu_indices: tuple[int, ...] = ()  # indices among the caller's visible GPUs on its host
    cpus: tuple[int, ...] = ()  # the CPUs that it may run on; empty: all
    status_file: Path | None = None  # written by the worker; None if the process writes none
    system_port: int | None = None  # HTTP port of a worker's metrics
    host: str = ""  # name of the host; empty on one machine
    address: str = _LOOPBACK  # address of all its ports except HTTP
    http_host: str = ""  # HTTP address of a frontend
    http_port: int | None = None
    request_port: int | None = None
    response_port: int | None = None
    kv_ports: tuple[int, int] | None = None  # first and last port; UCX uses some of them with its TCP transport

    @property
    def ports(self) -> dict[str, int]:
        """The planned ports by purpose, without HTTP."""
        named = {"requests": self.request_port, "responses": self.response_port, "system": self.system_port}
        return {what: port for what, port in named.items() if port is not None}


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Certificate and key of the HTTP port, both in PEM."""

    certificate: Path  # the server's own certificate, followed by its authorities'
    key: Path
    names: tuple[str, ...] = ()  # DNS names and addresses in the certificate


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything needed to start, watch, measure and stop a topology. ``processes`` begin with the frontends."""

    mode: Mode
    engine: str  # resolved: torch, tensorrt-llm, simulated, paced
    model: str  # the model name in requests
    model_path: Path
    namespace: str  # Dynamo's namespace, unique to the topology; every process has it in TRTX_TOPOLOGY
    host: str  # HTTP address of the first frontend
    port: int
    internal_ports: tuple[int, ...]  # on one machine: ports on loopback
    run_dir: Path
    scratch_dir: Path  # discovery records and other temporary files; removed with the topology
    processes: tuple[ProcessSpec, ...]
    # role -> the LLM's keyword arguments, without fields that the engine ignores
    engine_configs: dict[str, dict[str, Any]]
    gpu_names: tuple[str, ...]  # one entry per GPU in use, also if several workers share it
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...] = ()  # findings about the engine configs; none is an error
    memory: tuple[MemoryPlan, ...] = ()  # one per role; empty if nothing is computed or the model's shape is unknown
    discovery: Discovery = "file"
    hosts: tuple[PlannedHost, ...] = ()  # empty on one machine
    this_host: str = ""  # in a share: the name of its host
    etcd: EtcdService | None = None  # with discovery etcd
    nats: NatsService | None = None  # the same
    tls: ServerTls | None = None  # None: the HTTP ports speak plain HTTP
    warnings: tuple[str, ...] = ()  # for the user, before others can reach the topology
    left_out: tuple[LeftOutField, ...] = ()  # fields of its engine configs that the engine ignores
    chat_template: str | None = None  # the text that replaces the model's own; None: the model's own

    @property
    def url(self) -> str:
        """URL of the first frontend for clients on its machine; a wildcard address becomes loopback."""
        return self._url("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host, self.port)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all frontends, in order."""
        return tuple(self.url_of(frontend) for frontend in self.frontends)

    def url_of(self, frontend: ProcessSpec) -> str:
        """URL of one of its frontends, as for :attr:`url`."""
        host, port = self.http_of(frontend)
        return self._url(frontend.address if host in ("0.0.0.0", "::") else host, port)

    def http_of(self, frontend: ProcessSpec) -> tuple[str, int]:
        """HTTP address and port of one of its frontends."""
        if frontend.http_port is None:  # plan.json of version 1
            return self.host, self.port
        return frontend.http_host, frontend.http_port

    def _url(self, host: str, port: int) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def certificate(self) -> Path | None:
        """The certificate that trtx's own clients trust (:func:`trtx.tls.trust_of`), or None."""
        return None if self.tls is None else self.tls.certificate

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """``warnings``, plus one for each typed field that has no effect."""
        return (*self.warnings, *left_out_warnings(self.left_out, self.engine))

    @property
    def frontends(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.role == "frontend")

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.role != "frontend")

    def sharers(self, worker: ProcessSpec) -> tuple[ProcessSpec, ...]:
        """The encode workers that run on a GPU of ``worker``."""
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
        """Whether the topology can be reached from this machine only."""
        return is_loopback(self.host) and not self.hosts

    @property
    def routes_by_prefix(self) -> bool:
        """Whether its frontends' router prefers workers that have cached a prompt's prefix."""
        return any(("--router-mode", "kv") in itertools.pairwise(frontend.argv) for frontend in self.frontends)

    @property
    def marker(self) -> str:
        """``NAME=value`` in the environment of every process of the topology, or of the share, and of no other
        process.
        """
        return f"{TOPOLOGY_VARIABLE}={group_of(self.namespace, self.this_host)}"

    def share(self, host: str) -> Plan:
        """The part of the plan that ``host`` runs. Raises ValueError if the plan has no such host."""
        if host not in {one.name for one in self.hosts}:
            raise ValueError(f"no host {host!r} in the plan of {self.namespace}")
        processes = tuple(process for process in self.processes if process.host == host)
        names = dict(zip(_gpu_slots(self.workers), self.gpu_names, strict=True))
        first = next((process for process in processes if process.role == "frontend"), self.frontends[0])
        assert first.http_port is not None  # set in every plan over hosts
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
        """Number of workers per role that must be routable before the topology is ready."""
        counts: dict[str, int] = {}
        for worker in self.workers:
            counts[worker.role] = counts.get(worker.role, 0) + 1
        return counts

    def config_path(self, role: str) -> Path:
        """Path of a role's resolved engine config, which is written before its workers start."""
        return config_path(self.run_dir, role)

    def to_json(self) -> dict[str, Any]:
        """The plan as lists, dicts, strings and numbers; the inverse of :meth:`from_json`."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        """Reads the result of :meth:`to_json`. Raises ValueError for an unsupported schema version."""
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


def template_path(run_dir: Path) -> Path:
    """Path of the chat template that replaces the model's, next to the engine configs."""
    return run_dir / "serve" / "configs" / CHAT_TEMPLATE


def config_path(run_dir: Path, role: str) -> Path:
    """Path of a role's resolved engine config; see :meth:`Plan.config_path`."""
    return run_dir / "serve" / "configs" / f"{role}.yaml"


def is_loopback(host: str) -> bool:
    """Whether an HTTP address can be reached from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def group_of(namespace: str, host: str) -> str:
    """Value of TRTX_TOPOLOGY for the processes of one topology on one machine, so that ending a share ends only it."""
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
            "cpus": tuple(entry.get("cpus", ())),
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
