"""The hosts file: the address, the devices and the workers of each host of a topology.

This module refuses every mistake that can be found without access to the hosts, each with one sentence. The hosts file
contains no secrets; it names the files that hold them.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtx.config.strict_yaml import read_yaml
from trtx.config.topology import MAX_WORKERS, Role
from trtx.config.wording import a_kind, quoted, shown, shown_address
from trtx.errors import UsageError

FIRST_PORT = 17_000
"""The default first port of the range that trtx plans on a host. System ports must stay below 32768, because Dynamo
1.6.1 reads them as signed 16-bit numbers."""
LAST_SYSTEM_PORT = 32_767
_WHAT, _EXPECTED = "hosts file", "a mapping with etcd, nats and hosts (docs/hosts.md)"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,32}(:[0-9]{1,3})?")  # eth1, mlx5_0:1
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%\w+)?")  # a host name, an IPv4 address or an IPv6 address
_MAX_GPUS = 64
_WRITTEN = "ca=FILE,certificate=FILE,key=FILE, or username=NAME,password_file=FILE, or token_file=FILE"
_FILES = {
    "etcd_auth": "{ca, certificate, key} or {username, password_file}",
    "nats_auth": "{username, password_file} or {token_file}",
}
MAX_FRONTENDS = 16
"""The largest number of frontends on one host."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Certificates(_Frozen):
    """PEM files for mutual TLS. Dynamo 1.6.1 needs all three."""

    ca: Path
    certificate: Path
    key: Path


class Password(_Frozen):
    """A user name and a file that contains only the password, with an optional line end."""

    username: str = Field(min_length=1, max_length=256)
    password_file: Path


class Token(_Frozen):
    """A file that contains only the token, with an optional line end."""

    token_file: Path


class HostSpec(_Frozen):
    """One machine of a topology."""

    name: str
    address: str  # IPv4; the host's processes listen on it, and other hosts connect to it
    device: str | None = None  # UCX network devices such as eth1 or mlx5_0:1, separated by commas
    gpus: int | tuple[int, ...] = 0  # a count, or indices on the host; list GPUs connected by NVLink next to each other
    frontends: int | None = Field(default=None, ge=0, le=MAX_FRONTENDS)  # None: 1 on the first host, else 0
    roles: dict[Role, int] | None = None  # workers of each role; None on every host: trtx places the workers
    first_port: int = Field(default=FIRST_PORT, ge=1024, le=LAST_SYSTEM_PORT)

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        return _name(value)

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"address {quoted(value)} is no IP address; expected one such as 10.77.0.1") from None
        if address.version != 4:
            raise ValueError(
                f"address {value} is IPv6, on which Dynamo's planes were never seen to work here; give the IPv4 "
                "address of the host"
            )
        if address.is_unspecified or address.is_multicast or address == ipaddress.ip_address("255.255.255.255"):
            raise ValueError(
                f"address {value} does not belong to one machine; give the address at which other hosts reach this host"
            )
        return value

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str | None) -> str | None:
        for one in () if value is None else value.split(","):
            if not _DEVICE.fullmatch(one):
                raise ValueError(
                    f"device {quoted(value)} is not a network device of UCX; expected a name such as eth1 or mlx5_0:1"
                )
            if one == "all":
                raise ValueError("device 'all' lets UCX listen on every network; name the one between the hosts")
        return value

    @field_validator("gpus")
    @classmethod
    def _are_gpus(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        indices = range(value) if isinstance(value, int) else value
        if len(indices) > _MAX_GPUS or any(not 0 <= index < _MAX_GPUS for index in indices) or value == -1:
            raise ValueError(f"gpus {quoted(value)} is neither a number up to {_MAX_GPUS} nor indices below it")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"gpus {value} is below 0; give how many the host has for this topology")
        if len(set(indices)) != len(indices):
            raise ValueError(f"gpus {quoted(list(indices))} names a GPU twice; name each once")
        return value

    @field_validator("roles")
    @classmethod
    def _are_counts(cls, value: dict[Role, int] | None) -> dict[Role, int] | None:
        for role, count in (value or {}).items():
            if not 0 <= count <= MAX_WORKERS:
                raise ValueError(f"roles has {count} {role}; expected a number of workers from 0 to {MAX_WORKERS}")
        return value

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The GPU indices, in the host's own numbering."""
        return tuple(range(self.gpus)) if isinstance(self.gpus, int) else self.gpus


class HostsSpec(_Frozen):
    """All hosts of a topology, and the etcd and NATS servers that connect them."""

    name: str | None = None  # the topology's name; None: a random name
    etcd: tuple[str, ...] = Field(min_length=1, max_length=16)
    nats: str
    etcd_auth: Certificates | Password | None = None
    nats_auth: Password | Token | None = None
    lease_ttl_s: int = Field(default=60, ge=5, le=600)
    """How long a host that fails as a whole stays registered, plus 10 s. A single process that dies is removed at once.
    The time that etcd may be unavailable does not depend on this value (docs/hosts-faults.md)."""
    hosts: tuple[HostSpec, ...] = Field(min_length=1, max_length=64)

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        return None if value is None else _name(value)

    @field_validator("etcd")
    @classmethod
    def _are_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            _check_url("etcd", url, ("http", "https"), "http://10.77.0.1:2379")
        if len({urlsplit(url).scheme for url in value}) > 1:
            raise ValueError("etcd mixes http and https; give all endpoints the same")
        return value

    @field_validator("nats")
    @classmethod
    def _is_nats(cls, value: str) -> str:
        _check_url("nats", value, ("nats", "tls"), "nats://10.77.0.1:4222")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _check_alike("name", [host.name for host in self.hosts])
        _check_alike("address", [host.address for host in self.hosts])
        if len(self.hosts) > 1:
            for host in self.hosts:
                _check_reachable(host)
            for what, urls in (("etcd", self.etcd), ("nats", (self.nats,))):
                _check_service(what, urls)
        is_tls = self.etcd[0].startswith("https:")
        if is_tls and not isinstance(self.etcd_auth, Certificates):
            raise ValueError(
                f"etcd {self.etcd[0]} uses TLS, for which Dynamo 1.6.1 needs ca, certificate and key; give the "
                "three PEM files in etcd_auth"
            )
        if not is_tls and isinstance(self.etcd_auth, Certificates):
            raise ValueError(
                f"etcd_auth has certificates, and etcd {self.etcd[0]} is plain HTTP; write https:, or leave them out"
            )
        if sum(self.frontends_of(host) for host in self.hosts) == 0:
            raise ValueError("hosts have no frontend; leave frontends out, or give one host at least 1")
        return self

    def frontends_of(self, host: HostSpec) -> int:
        """Returns the number of frontends on ``host``."""
        if host.frontends is not None:
            return host.frontends
        return 1 if host == self.hosts[0] else 0

    @property
    def has_roles(self) -> bool:
        """Whether the file assigns workers to hosts."""
        return any(host.roles for host in self.hosts)


def read_hosts(path: Path) -> HostsSpec:
    """Reads a hosts file. Relative paths in it are resolved against the file's own directory. Raises UsageError."""
    document = read_yaml(path, _WHAT, _EXPECTED)
    if not isinstance(document, dict):
        found = "is empty" if document is None else f"holds {a_kind(document)}"
        raise UsageError(f"{_WHAT} {shown(path)} {found}; expected {_EXPECTED}")
    try:
        # Through JSON: in strict mode pydantic makes tuples and paths only from JSON, and it refuses "4" for 4.
        spec = HostsSpec.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise UsageError(f"{_WHAT} {shown(path)}: {_problem(error)}") from error
    home = path.absolute().parent
    return spec.model_copy(
        update={
            name: None if auth is None else auth.model_copy(update=_absolute(auth, home))
            for name, auth in (("etcd_auth", spec.etcd_auth), ("nats_auth", spec.nats_auth))
        }
    )


def parse_auth(option: str, text: str, home: Path) -> Certificates | Password | Token:
    """Parses the value of an authentication option.

    The forms are ``ca=FILE,certificate=FILE,key=FILE``, ``username=NAME,password_file=FILE`` and ``token_file=FILE``.
    Relative paths are resolved against ``home``. Raises UsageError.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    given = {name.strip(): value for name, _, value in pairs}
    for form in (Certificates, Password, Token):
        if given.keys() == form.model_fields.keys() and len(given) == len(pairs) and all(given.values()):
            auth = form.model_validate(given)
            return auth.model_copy(update=_absolute(auth, home))
    raise UsageError(  # does not quote the value: it may be the secret itself
        f"{option} must have the form {_WRITTEN}; give the path of a file that holds the secret, not the secret itself"
    )


def _absolute(auth: BaseModel, home: Path) -> dict[str, Path]:
    return {name: home / value.expanduser() for name, value in auth if isinstance(value, Path)}


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"name {quoted(value)} is not a valid name; expected up to 32 characters of a-z, 0-9 and -")
    return value


def _check_url(what: str, url: str, schemes: Sequence[str], example: str) -> None:
    if "@" in url:
        raise ValueError(
            f"{what} has a user in its address, which plans and logs would show; give {what}_auth the name of a file"
        )
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in schemes and parts.hostname and parts.port and url == f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError(f"{what} {shown_address(url)} is not one server's address; expected one such as {example}")
    if not _HOST.fullmatch(parts.hostname or ""):  # a comma would break Dynamo's address lists
        raise ValueError(
            f"{what} {shown_address(url)} does not name exactly one host; expected one such as {example}. List several "
            "addresses separately"
        )


def _check_alike(what: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"hosts have the {what} {value} twice; each host needs its own")


def _check_reachable(host: HostSpec) -> None:
    address = ipaddress.ip_address(host.address)
    if address.is_loopback or address.is_link_local:
        kind = "loopback" if address.is_loopback else "link-local"
        raise ValueError(
            f"address {host.address} of {host.name} is {kind}, which other hosts can't reach; give the one of the "
            "network between the hosts"
        )
    if host.device is None or "lo" in (name.partition(":")[0] for name in host.device.split(",")):
        has = "no device" if host.device is None else "the device lo"
        raise ValueError(
            f"{host.name} has {has}, so no KV would cross to other hosts, and they would compute every prompt again; "
            "name its network device, such as eth1 or mlx5_0:1"
        )


def _check_service(what: str, urls: Sequence[str]) -> None:
    for url in urls:
        name = urlsplit(url).hostname or ""
        try:
            is_here = ipaddress.ip_address(name).is_loopback or ipaddress.ip_address(name).is_unspecified
        except ValueError:
            is_here = name == "localhost"
        if is_here:
            raise ValueError(f"{what} {url} is another for each host; give the address that every host reaches it at")


def _first(error: ValidationError) -> Any:
    """Returns the validation error to report.

    ``etcd_auth`` and ``nats_auth`` accept several forms, and pydantic reports errors against each of them. For these
    fields the error comes from the form that is nearest to the input.
    """
    errors: list[Any] = error.errors()
    field = errors[0]["loc"][:1]
    if field not in (("etcd_auth",), ("nats_auth",)):
        return errors[0]
    forms: dict[Any, list[Any]] = {}
    for one in errors:
        if one["loc"][:1] == field:
            forms.setdefault(one["loc"][1:2], []).append(one)
    nearest = min(forms.values(), key=lambda form: (sum(map(_is_extra, form)), len(form)))
    return min(nearest, key=_is_extra)


def _is_extra(one: Any) -> bool:
    return bool(one["type"] == "extra_forbidden")


def _problem(error: ValidationError) -> str:
    first = _first(error)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    where = shown(re.sub(r"\.(Certificates|Password|Token|int|tuple\[int, \.\.\.\])(?=\.|\[|$)", "", where))
    if first["type"] == "value_error":
        told = first["msg"].removeprefix("Value error, ")
        return told if not where else f"{where.rpartition('.')[0]}: {told}" if "." in where else told
    if first["type"] == "extra_forbidden":
        return f"{where} is not a field of a hosts file; leave it out (docs/hosts.md lists the fields)"
    if first["type"] == "missing":
        return f"{where} is missing; expected {_EXPECTED}" if "." not in where else f"{where} is missing; give it"
    if first["type"] in ("too_short", "string_too_short"):
        return f"{where} is empty; give at least one, or leave it out where it may be (docs/hosts.md)"
    expected = first["msg"].removeprefix("Input should be ").replace("array", "list").replace("an object", "a map")
    field, kind = where.partition(".")[0], a_kind(first.get("input"))
    if field in _FILES:  # the value may be the secret itself
        return f"{where} is {kind}; expected {field}: {_FILES[field]}, each the name of a file but username"
    if field.partition("[")[0] in ("etcd", "nats"):  # an address may contain a secret
        return f"{where} is {kind}; expected {expected[:1].lower()}{expected[1:]}"
    return f"{where} {quoted(first.get('input'))}: expected {expected[:1].lower()}{expected[1:]}"
