"""The topology that a user requests, parsed from options or YAML into one validated value."""

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
    """Checks text before pydantic makes a Path of it: an empty string would become the current directory."""
    return _named(value, info) if isinstance(value, str) else value


def _bindable(value: str, info: ValidationInfo) -> str:
    if not _HOST.fullmatch(_named(value, info)):
        raise ValueError(f"{info.field_name} {quoted(value)} is no address; expected such as 127.0.0.1 or 0.0.0.0")
    return value


# An IPv4 or IPv6 address, or a host name whose labels have at most 63 characters.
_HOST = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,20}\.?")
Name = Annotated[str, AfterValidator(_named)]
"""A model, a directory or an address: not empty, and valid as a path on this system."""
MAX_WORKERS = 256
"""The maximum number of workers of one topology, and therefore of one role. Each worker is a process with its own port
below 32768. Dynamo's frontend holds connections to all workers within the 1,024 open files that most systems allow, and
256 idle workers already take about 20 GB of memory (80 MB each)."""

MAX_TP = 1024  # more GPUs than one machine has


class TopologySpec(BaseModel):
    """A topology as requested, not yet resolved. ``topology.plan`` turns it and a ``Machine`` into a ``Plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Name | None = None  # None: synthetic:tiny-trained without a GPU, synthetic:qwen3-0.6b with one
    served_model_name: Name | None = None  # None: the model's own short name
    mode: Mode = "agg"
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)  # agg workers
    prefill: int = Field(default=1, ge=1, le=MAX_WORKERS)
    decode: int = Field(default=1, ge=1, le=MAX_WORKERS)
    encode: int = Field(default=0, ge=0, le=MAX_WORKERS)  # encode workers on GPUs of their own
    encode_shared: int = Field(default=0, ge=0, le=MAX_WORKERS)  # encode workers on GPUs of agg or prefill workers
    media: MediaLimits = MediaLimits()  # limits on media from clients, for models that take images
    tp: int = Field(default=1, ge=1, le=MAX_TP)
    deterministic: bool = False  # answers are bitwise the same in any batch; docs/determinism.md
    engine: Name = "auto"  # auto, torch, simulated, tensorrt-llm, paced
    gpus: tuple[int, ...] | None = None  # indices into the GPUs visible to the caller; None: all of them
    host: Annotated[str, AfterValidator(_bindable)] = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    # PEM files for the HTTP port; None: plain HTTP
    tls_cert: Annotated[Path, BeforeValidator(_locatable)] | None = None  # server certificate, then intermediates
    tls_key: Annotated[Path, BeforeValidator(_locatable)] | None = None
    router_mode: RouterMode = "round-robin"
    router_args: tuple[str, ...] = ()  # further flags of dynamo.frontend; if a flag is repeated, the last wins
    engine_configs: dict[Role, Annotated[Path, BeforeValidator(_locatable)]] = Field(
        default_factory=dict
    )  # role -> YAML file; a missing role uses the shipped config
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
        """The total number of encode workers. With 0, the worker that needs an image's embedding computes it."""
        return self.encode + self.encode_shared

    @property
    def encoders_typed(self) -> str:
        """The options that request encode workers, for error messages."""
        counts = {"--encode": self.encode, "--encode-shared": self.encode_shared}
        return " ".join(f"{option} {count}" for option, count in counts.items() if count)

    @property
    def roles(self) -> dict[Role, int]:
        """The number of workers of each role, in the order in which a request with images reaches them."""
        encode: dict[Role, int] = {"encode": self.encoders} if self.encoders else {}
        if self.mode == "agg":
            return {**encode, "agg": self.workers}
        return {**encode, "prefill": self.prefill, "decode": self.decode}


_COUNT_ENCODERS = ("encode", "encode_shared")


def refuse_idle(spec: TopologySpec, told: Callable[[str], str], source: str = "") -> None:
    """Raises UsageError for a field that was set but can never take effect because ``media`` admits no such requests.

    ``told`` formats the name of a field, including those of ``media``, as the user wrote it. ``source`` begins the
    message.
    """
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
    """Returns the name of a field of a topology or of its ``media`` as a sweep file spells it."""
    return f"topology.media.{name}" if name in MediaLimits.model_fields else f"topology.{name}"
