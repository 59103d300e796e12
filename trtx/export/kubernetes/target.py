"""What a person says of the cluster: names, image, where the model lies, what a node has."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from trtx.config.wording import quoted

Form = Literal["operator", "plain"]
LONGEST_NAME = 40
"""Of a topology: Dynamo's operator makes names of at most 63 characters of it, with a role and a hash behind it."""
MAX_FRONTENDS = 64
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-zA-Z0-9][\w.:/-]*(@sha256:[0-9a-f]{64})?", re.ASCII)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_PAIR = re.compile(r"([A-Za-z0-9][-\w./]*)=([\w.-]*)", re.ASCII)
_NATS = re.compile(r"nats://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_DEVICES = re.compile(r"[A-Za-z0-9_.-]+(:[0-9]+)?(,[A-Za-z0-9_.-]+(:[0-9]+)?)*")


def _matching(pattern: re.Pattern[str], expected: str, longest: int = 253) -> AfterValidator:
    def check(value: str, info: ValidationInfo) -> str:
        if not pattern.fullmatch(value) or len(value) > longest:
            raise ValueError(f"{info.field_name} {quoted(value)} is not taken; expected {expected}")
        return value

    return AfterValidator(check)


_ObjectName = Annotated[
    str, _matching(_SUBDOMAIN, "the name of an object of Kubernetes: lower-case letters, digits, - and .")
]
_Quantity = Annotated[str, _matching(_QUANTITY, "a quantity of Kubernetes such as 4, 500m or 16Gi")]
_Pair = Annotated[str, _matching(_PAIR, "NAME=VALUE")]


class KubernetesTarget(BaseModel):
    """Asked for beside the topology. Names of secrets and claims, never what is in them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Form = "operator"
    name: Annotated[str, _matching(_LABEL, f"a DNS label of at most {LONGEST_NAME} characters", LONGEST_NAME)]
    namespace: Annotated[str, _matching(_LABEL, "the name of a namespace of Kubernetes", 63)] = "default"
    image: Annotated[str, _matching(_IMAGE, "an image such as registry.example/trtx:1.4.2")]
    image_pull_secret: _ObjectName | None = None
    model_claim: str | None = None  # CLAIM, or CLAIM/PATH of the model's directory in it
    hub_secret: _ObjectName | None = None  # has the key HF_TOKEN
    tls_secret: _ObjectName | None = None  # of type kubernetes.io/tls
    gpus_per_node: int = Field(default=8, ge=0, le=72)  # 0: nodes without GPUs
    frontends: int = Field(default=1, ge=1, le=MAX_FRONTENDS)
    ucx_devices: Annotated[str, _matching(_DEVICES, "devices of UCX such as eth0 or mlx5_0:1")] = "eth0"
    nats: Annotated[str, _matching(_NATS, "nats://HOST:PORT")] | None = None  # None: events go by ZMQ from each worker
    resources: tuple[_Pair, ...] = ()  # further resources of each worker's pod, such as rdma/ib=1
    node_selector: tuple[_Pair, ...] = ()  # of the workers' nodes
    cpu: _Quantity = "4"
    memory: _Quantity | None = None
    shared_memory: _Quantity = "16Gi"
    bench: tuple[str, ...] | None = None  # words of trtx bench; None: no Job

    @model_validator(mode="after")
    def _agrees(self) -> KubernetesTarget:
        if self.model_claim is not None:
            claim, path = self.claim
            if not _SUBDOMAIN.fullmatch(claim) or any(part in ("", ".", "..") for part in path.split("/") if path):
                raise ValueError(
                    f"model_claim {quoted(self.model_claim)} is not taken; expected a claim's name, and the model's "
                    "directory in it where that is not its root, such as models/qwen3-8b"
                )
            if self.hub_secret is not None:
                raise ValueError(
                    "hub_secret means nothing beside model_claim, which has the model already; leave one of them out"
                )
        if "lo" in self.ucx_devices.split(","):
            raise ValueError(
                "ucx_devices 'lo' reaches no other pod, and each handoff would be computed again; expected the pods' "
                "network device, such as eth0"
            )
        return self

    @property
    def claim(self) -> tuple[str, str]:
        """Of ``model_claim``: the claim's name, and the path in it, empty for its root."""
        name, _, path = (self.model_claim or "").partition("/")
        return name, path

    @property
    def selector(self) -> dict[str, str]:
        return dict(_split(pair) for pair in self.node_selector)

    @property
    def further_limits(self) -> dict[str, str]:
        return dict(_split(pair) for pair in self.resources)


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value


def name_of(model: str, mode: str) -> str:
    """A topology's name where none is given: the served model's, made a DNS label."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"m-{plain}"
    return f"{named[: LONGEST_NAME - len(mode) - 1].rstrip('-')}-{mode}"
