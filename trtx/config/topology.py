"""What a person asks for when they ask for a topology: flags or YAML become one checked value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from trtx.config.files import name_problem
from trtx.config.media import VIDEO_FIELDS, MediaLimits
from trtx.config.wording import quoted
from trtx.errors import UsageError

Mode = Literal["agg", "disagg"]
Role = Literal["agg", "prefill", "decode", "encode"]
RouterMode = Literal["round-robin", "random", "least-loaded", "kv"]


def _named(value: str, info: ValidationInfo) -> str:
    if problem := name_problem(value):
        raise ValueError(f"{info.field_name} {quoted(value)} {problem}; give one, or leave it out")
    return value


def _locatable(value: object, info: ValidationInfo) -> object:
    """Before a path is made of it: an empty one would be the current directory."""
    return _named(value, info) if isinstance(value, str) else value


def _bindable(value: str, info: ValidationInfo) -> str:
    if not _HOST.fullmatch(_named(value, info)):
        raise ValueError(f"{info.field_name} {quoted(value)} is no address; expected such as 127.0.0.1 or 0.0.0.0")
    return value


# An IPv4 or IPv6 address, or a name of labels of at most 63 characters.
_HOST = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,20}\.?")
Name = Annotated[str, AfterValidator(_named)]
"""A model, a directory or an address: not empty, and nothing that the system could not look up."""
MAX_WORKERS = 256
"""Of one topology, so of one role too. Each is a process with a port below 32768 of its own; Dynamo's frontend holds
connections to all of them below the 1,024 open files that most systems allow, and 256 idle ones take some 20 GB already
(80 MB each)."""

MAX_TP = 1024  # more GPUs than one machine has


class TopologySpec(BaseModel):
    """Asked for, not yet resolved: ``topology.plan`` turns it and a ``Machine`` into a ``Plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Name | None = None  # None: synthetic:tiny-trained without a GPU, synthetic:qwen3-0.6b with one
    served_model_name: Name | None = None  # None: the model's own short name
    mode: Mode = "agg"
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)  # agg workers
    prefill: int = Field(default=1, ge=1, le=MAX_WORKERS)
    decode: int = Field(default=1, ge=1, le=MAX_WORKERS)
    encode: int = Field(default=0, ge=0, le=MAX_WORKERS)  # encode workers on GPUs of their own
    encode_shared: int = Field(default=0, ge=0, le=MAX_WORKERS)  # those on GPUs of agg or prefill workers
    media: MediaLimits = MediaLimits()  # what workers of a model that takes images take of clients
    tp: int = Field(default=1, ge=1, le=MAX_TP)
    deterministic: bool = False  # answers are the same to the bit in any batch; docs/determinism.md
    engine: Name = "auto"  # auto, torch, simulated, tensorrt-llm, paced
    gpus: tuple[int, ...] | None = None  # indices into the caller's visible set; None: all of them
    host: Annotated[str, AfterValidator(_bindable)] = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    # PEM, of the HTTP port; None: it speaks plain HTTP
    tls_cert: Annotated[Path, BeforeValidator(_locatable)] | None = None  # the server's own, its authorities' behind it
    tls_key: Annotated[Path, BeforeValidator(_locatable)] | None = None
    router_mode: RouterMode = "round-robin"
    router_args: tuple[str, ...] = ()  # further flags of dynamo.frontend; the last of a kind wins
    engine_configs: dict[Role, Annotated[Path, BeforeValidator(_locatable)]] = Field(
        default_factory=dict
    )  # role -> YAML; absent: shipped defaults
    overrides: tuple[str, ...] = ()  # "a.b=c", every role; "prefill.a.b=c", one role

    @model_validator(mode="after")
    def _has_both_or_none(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key means nothing without tls_cert; name both, or leave it out")
        if self.tls_key is None and self.tls_cert is not None:
            raise ValueError(
                "tls_key is missing beside a certificate, which means nothing without its key; name both, or neither"
            )
        return self

    @property
    def encoders(self) -> int:
        """All encode workers; 0: who needs an image's embedding makes it."""
        return self.encode + self.encode_shared

    @property
    def encoders_typed(self) -> str:
        """The options that ask for encode workers, for what is said against them."""
        counts = {"--encode": self.encode, "--encode-shared": self.encode_shared}
        return " ".join(f"{option} {count}" for option, count in counts.items() if count)

    @property
    def roles(self) -> dict[Role, int]:
        """Workers of each role, as a request with images meets them."""
        encode: dict[Role, int] = {"encode": self.encoders} if self.encoders else {}
        if self.mode == "agg":
            return {**encode, "agg": self.workers}
        return {**encode, "prefill": self.prefill, "decode": self.decode}


_COUNT_ENCODERS = ("encode", "encode_shared")


def refuse_idle(spec: TopologySpec, told: Callable[[str], str], source: str = "") -> None:
    """Raises UsageError for a field that was said and that no request would ever meet, as limits of ``media`` let none
    in. ``told``: how a field, of ``media`` too, is said there; ``source`` begins the message."""
    media = spec.media
    if media.max_videos:
        return
    idle: list[tuple[str, tuple[str, ...]]] = [
        (name, VIDEO_FIELDS[:1]) for name in VIDEO_FIELDS[1:] if name in media.model_fields_set
    ]
    if not media.max_images:
        idle += [(name, ("max_images", *VIDEO_FIELDS[:1])) for name in _COUNT_ENCODERS if getattr(spec, name)]
    for name, limits in idle:
        raise UsageError(
            f"{source}{told(name)} means nothing where {' and '.join(map(told, limits))} "
            f"{'is' if len(limits) == 1 else 'are'} 0; leave it out, or allow some"
        )


def in_topology(name: str) -> str:
    """A field of a topology or of its ``media``, as a sweep file says it."""
    return f"topology.media.{name}" if name in MediaLimits.model_fields else f"topology.{name}"
