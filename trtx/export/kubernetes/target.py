"""The user's description of the cluster: names, image, location of the model, resources of a node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from trtx.config.wording import quoted, shown_address
from trtx.export.kubernetes.rules import (
    amount,
    is_image,
    is_label_value,
    is_nats,
    is_own_address,
    is_qualified_name,
    is_resource,
    is_subdomain,
    is_whole,
)

Form = Literal["operator", "plain"]
LONGEST_NAME = 40
"""The maximum length of a topology's name. Names of at most 63 characters are made of it, a role and a hash."""
_LONGEST_WITH_PARTS = 45
"""The maximum total length of the names that Dynamo's operator passes to Grove for one component. It is Grove's limit,
because pod names are made of them (``MaxCombinedGroveResourceNameLength``; ``validation`` of ai-dynamo/dynamo's
operator)."""
_LEADER = "-ldr"  # the longest suffix that the operator gives to a component's name for an engine over several nodes
MAX_FRONTENDS = 64
_POD_DEVICE = "eth0"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DEVICES = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]+)?(,[A-Za-z0-9_.-]+(:[0-9]+)?)*")


def _taken(holds: Callable[[str], bool], expected: str) -> AfterValidator:
    def check(value: str, info: ValidationInfo) -> str:
        if not holds(value):
            # The value is not quoted: users give the secret itself in place of its name, and an address may contain a
            # password.
            given = "as it is given" if str(info.field_name).endswith("_secret") else quoted(value)
            if info.field_name == "nats":
                given = shown_address(value)
            raise ValueError(f"{info.field_name} {given} is refused; expected {expected}")
        return value

    return AfterValidator(check)


def _matching(pattern: re.Pattern[str], expected: str, longest: int = 253) -> AfterValidator:
    return _taken(lambda value: len(value) <= longest and pattern.fullmatch(value) is not None, expected)


def _is_cores(quantity: str) -> bool:
    cores = amount(quantity)
    return cores is not None and 0 < cores <= _MOST_CORES and cores * 1000 % 1 == 0


def _is_bytes(quantity: str) -> bool:
    size = amount(quantity)
    return size is not None and 0 < size <= _MOST_BYTES and size % 1 == 0


def _pairs(what: str) -> AfterValidator:
    """Returns a validator for NAME=VALUE pairs with distinct names. ``what``: the kind of name, for messages."""

    def check(pairs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        seen: set[str] = set()
        for pair in pairs:
            name, equals, _ = pair.partition("=")
            if not equals or not is_qualified_name(name):
                raise ValueError(
                    f"{info.field_name} {quoted(pair)} is refused; expected NAME=VALUE, with the name of {what}"
                )
            if name in seen:
                raise ValueError(f"{info.field_name} names {name} twice; leave one of them out")
            seen.add(name)
        return pairs

    return AfterValidator(check)


def _resources(pairs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    for pair in pairs:
        name, value = _split(pair)
        if name in _OWN_RESOURCES:
            raise ValueError(f"{info.field_name} {quoted(pair)} is what {_OWN_RESOURCES[name]} sets; use that")
        size = amount(value)
        if not is_resource(name) or size is None or size > _MOST_BYTES:
            raise ValueError(
                f"{info.field_name} {quoted(pair)} is refused; expected a resource of Kubernetes or of a domain, and "
                "a quantity, such as rdma/ib=1"
            )
        if size == 0 or size % 1:
            expected = "a whole number of them, at least 1" if is_whole(name) else "whole bytes, more than 0"
            raise ValueError(f"{info.field_name} {quoted(pair)} is refused; expected {expected}")
    return pairs


def _selector(pairs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    for pair in pairs:
        if not is_label_value(_split(pair)[1]):
            raise ValueError(
                f"{info.field_name} {quoted(pair)} is refused; expected a label's value: at most 63 letters, digits, "
                "-, _ and ., the first and the last a letter or a digit"
            )
    return pairs


_MOST_CORES, _MOST_BYTES = 10**6, 2**60  # far above any node; a larger value is a typing mistake
_OWN_RESOURCES = {"cpu": "--cpu", "memory": "--memory", "nvidia.com/gpu": "the plan (--tp, --gpus-per-node)"}
_ObjectName = Annotated[
    str, _taken(is_subdomain, "the name of an object of Kubernetes: lower-case letters, digits, - and .")
]
_Cores = Annotated[str, _taken(_is_cores, "cores such as 4 or 500m, more than 0")]
_Bytes = Annotated[str, _taken(_is_bytes, "bytes such as 64Gi or 500M, more than 0")]


class KubernetesTarget(BaseModel):
    """The cluster options of an export. It contains names of Secrets and claims, never their contents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Form = "operator"
    # "": derived from the model and the mode
    name: Annotated[str, _matching(_LABEL, f"a DNS label of at most {LONGEST_NAME} characters", LONGEST_NAME)] = ""
    namespace: Annotated[str, _matching(_LABEL, "the name of a namespace of Kubernetes", 63)] = "default"
    image: Annotated[
        str,
        _taken(is_image, "an image such as registry.example/trtx:1.4.2, its name in lower case"),
    ]
    image_pull_secret: _ObjectName | None = None
    model_claim: str | None = None  # CLAIM, or CLAIM/PATH with the path of the model's directory
    hub_secret: _ObjectName | None = None  # contains the key HF_TOKEN
    tls_secret: _ObjectName | None = None  # of type kubernetes.io/tls
    gpus_per_node: int = Field(default=8, ge=0, le=72)  # 0: nodes without GPUs
    frontends: int = Field(default=1, ge=1, le=MAX_FRONTENDS)
    ucx_devices: Annotated[str, _matching(_DEVICES, "devices of UCX such as eth0 or mlx5_0:1")] = _POD_DEVICE
    nats: Annotated[str, _taken(is_nats, "nats://HOST:PORT, or tls://HOST:PORT for TLS")] | None = (
        None  # None: events go by ZMQ from each worker
    )
    resources: Annotated[tuple[str, ...], _pairs("a resource"), AfterValidator(_resources)] = ()
    """Additional resource limits of each worker's pod, such as rdma/ib=1."""
    node_selector: Annotated[
        tuple[str, ...], _pairs("a label"), AfterValidator(_selector)
    ] = ()  # labels of the workers' nodes
    cpu: _Cores = "4"
    memory: _Bytes | None = None
    shared_memory: _Bytes = "16Gi"
    bench: tuple[str, ...] | None = None  # arguments of trtx bench; None: no Job

    @model_validator(mode="after")
    def _agrees(self) -> KubernetesTarget:
        if self.model_claim is not None:
            claim, path = self.claim
            if not is_subdomain(claim) or any(part in ("", ".", "..") for part in path.split("/") if path):
                raise ValueError(
                    f"model_claim {quoted(self.model_claim)} is refused; expected a claim, and the model's directory "
                    "in it where that is not its root, such as models/qwen3-8b"
                )
            if self.hub_secret is not None:
                raise ValueError(
                    "hub_secret has no effect with model_claim, which has the model already; leave one of them out"
                )
        if self.nats is not None and is_own_address(self.nats):
            raise ValueError(
                f"nats {quoted(self.nats)} is each pod itself, where no NATS is; expected the address of a Service, "
                "such as nats://nats.events:4222"
            )
        if "lo" in self.ucx_devices.split(","):
            raise ValueError(
                "ucx_devices 'lo' reaches no other pod, and each handoff would be computed again; expected the pods' "
                "network device, such as eth0"
            )
        return self

    @property
    def claim(self) -> tuple[str, str]:
        """The name of the claim in ``model_claim``, and the path in it; "" for its root."""
        name, _, path = (self.model_claim or "").partition("/")
        return name, path

    @property
    def has_no_rdma(self) -> bool:
        """Whether KV can only use the pod network, because no other device is named."""
        return self.ucx_devices == _POD_DEVICE

    @property
    def selector(self) -> dict[str, str]:
        return dict(_split(pair) for pair in self.node_selector)

    @property
    def further_limits(self) -> dict[str, str]:
        return dict(_split(pair) for pair in self.resources)


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value


def longest_name(form: Form, pods: Mapping[str, int]) -> int:
    """Returns the maximum length of a topology's name.

    ``pods``: maps each component to the number of pods of one worker. The operator's limit covers the topology's name
    and the component's; for an engine over several nodes also the name of its scaling group, which equals the
    component's, and the suffix of its leader.
    """
    if form == "plain":
        return LONGEST_NAME
    parts = (len(name) + (len(name) + len(_LEADER) if count > 1 else 0) for name, count in pods.items())
    return min(LONGEST_NAME, _LONGEST_WITH_PARTS - max(parts))


def name_of(model: str, mode: str, longest: int) -> str:
    """Returns the default name of a topology: the served model's name as a DNS label, and the mode."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"m-{plain}"
    return f"{named[: longest - len(mode) - 1].rstrip('-')}-{mode}"
