"""The topology that a user requests, parsed from options or YAML into one validated value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from trtx.config.conditional_disagg import checked_policy
from trtx.config.files import name_problem
from trtx.config.media import VIDEO_FIELDS, MediaLimits
from trtx.config.option_field import OptionField
from trtx.config.otlp import collector_url
from trtx.config.wording import quoted
from trtx.errors import UsageError

Mode = Literal["agg", "disagg"]
Role = Literal["agg", "prefill", "decode", "encode"]
RouterMode = Literal["round-robin", "random", "least-loaded", "kv"]
LogLevel = Literal["error", "warn", "info", "debug", "trace"]
LogFormat = Literal["text", "json"]


def _named(value: str, info: ValidationInfo) -> str:
    if problem := name_problem(value):
        raise ValueError(f"{info.field_name} {quoted(value)} {problem}; give one, or leave it out")
    return value


def _locatable(value: object, info: ValidationInfo) -> object:
    """Checks text before pydantic makes a Path of it: an empty string would become the current directory."""
    return _named(value, info) if isinstance(value, str) else value


def _bindable(value: str, info: ValidationInfo) -> str:
    if not _HOST.fullmatch(_named(value, info)):
        raise ValueError(
            f"{info.field_name} {quoted(value)} is not an address; expected one such as 127.0.0.1 or 0.0.0.0"
        )
    return value


# An IPv4 or IPv6 address, or a host name whose labels have at most 63 characters.
_HOST = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,20}\.?")
Name = Annotated[str, AfterValidator(_named)]
"""A model, a directory or an address: not empty, and valid as a path on this system."""
NO_PARSER = "none"
"""The value of a parser option that turns the parser off."""
MAX_WORKERS = 256
"""The maximum number of workers of one topology, and therefore of one role. Each worker is a process with its own port
below 32768. Dynamo's frontend holds connections to all workers within the 1,024 open files that most systems allow, and
256 idle workers already take about 20 GB of memory (80 MB each)."""

MAX_SHARERS = 8  # of a GPU: each has a CUDA context, activations and CUDA graphs of its own
MOST_QUEUED = 100_000  # each waiting request is an open connection and its body
MOST_SECONDS = 86_400.0  # a day
MAX_TP = 1024  # more GPUs than one machine has


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyField(OptionField):
    """The record of a field of :class:`TopologySpec`. The use ``attach`` of a verb refuses the option of each."""

    panel: str = "Topology"
    of_machine: bool = False  # it describes the machine that trtx runs on, so no export has its option


class TopologySpec(BaseModel):
    """A topology as requested, not yet resolved. ``topology.plan`` turns it and a ``Machine`` into a ``Plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Name | None = None  # None: synthetic:tiny-trained without a GPU, synthetic:qwen3-0.6b with one
    served_model_name: Name | None = None  # None: the model's own short name
    mode: Mode = "agg"
    workers: Annotated[int, TopologyField(help="Workers in mode agg.", ignored=("disagg", "roles"))] = Field(
        default=1, ge=1, le=MAX_WORKERS
    )
    prefill: Annotated[int, TopologyField(help="Prefill workers in mode disagg.", ignored=("agg", "roles"))] = Field(
        default=1, ge=1, le=MAX_WORKERS
    )
    decode: Annotated[int, TopologyField(help="Decode workers in mode disagg.", ignored=("agg", "roles"))] = Field(
        default=1, ge=1, le=MAX_WORKERS
    )
    encode: Annotated[
        int,
        TopologyField(
            help="Encode workers, each on a GPU of its own. With none, each worker encodes the images of its own "
            "requests.",
            since=5,
            before=0,
        ),
    ] = Field(default=0, ge=0, le=MAX_WORKERS)
    encode_shared: Annotated[
        int,
        TopologyField(
            help="Encode workers that share GPUs with agg or prefill workers, whose KV pools shrink to make room.",
            since=8,
            before=0,
        ),
    ] = Field(default=0, ge=0, le=MAX_WORKERS)
    # Limits on media from clients, for models that take images.
    media: Annotated[MediaLimits, TopologyField(since=5)] = MediaLimits()
    tp: Annotated[
        int,
        TopologyField(
            help="GPUs of each worker (tensor parallel). Without GPUs, the torch engine's ranks share the CPU.",
            ignored=("no GPU",),
        ),
    ] = Field(default=1, ge=1, le=MAX_TP)
    deterministic: Annotated[
        bool,
        TopologyField(
            help="Give a request the same tokens and logprobs, bit for bit, in any batch. Slower; torch engine only.",
            since=8,
            before=False,
        ),
    ] = False  # docs/determinism.md
    share_weights: Annotated[
        int,
        TopologyField(
            help="Workers that share a GPU and the copy of the weights on it. Without GPUs, a copy in host memory. "
            "With 1, each worker has a GPU and a copy of its own.",
            metavar="N",
            ignored=("no GPU", "hosts"),
            since=10,
            before=1,
            of_machine=True,
        ),
    ] = Field(default=1, ge=1, le=MAX_SHARERS)
    engine: Name = "auto"  # auto, torch, simulated, tensorrt-llm, paced
    gpus: Annotated[
        tuple[int, ...] | None,
        TopologyField(
            help="GPUs to use, as indices into the visible ones. Default: all, NVLink pairs first.",
            metavar="0,1",
            ignored=("no GPU", "hosts"),
            of_machine=True,
        ),
    ] = None
    worker_cores: Annotated[
        Literal["auto"] | None,
        TopologyField(
            help="auto: run each worker on cores of its GPU's NUMA node, where trtx may choose. Default: on all cores.",
            metavar="auto",
            ignored=("hosts",),
            since=10,
            before=None,
            of_machine=True,
        ),
    ] = None
    host: Annotated[
        str,
        AfterValidator(_bindable),
        TopologyField(
            help="Address of the HTTP port. 0.0.0.0 opens this port, and no other, to the network.",
            ignored=("hosts",),
            of_machine=True,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, TopologyField(help="HTTP port. 0: any free port.")] = Field(default=8000, ge=0, le=65535)
    # PEM files for the HTTP port; None: plain HTTP
    tls_cert: Annotated[
        Annotated[Path, BeforeValidator(_locatable)] | None,
        TopologyField(
            help="Serve HTTPS with this certificate (PEM), followed by its intermediates.",
            since=7,
            before=None,
            of_machine=True,
        ),
    ] = None
    tls_key: Annotated[
        Annotated[Path, BeforeValidator(_locatable)] | None,
        TopologyField(
            help="Private key of --tls-cert (PEM), without a passphrase.", since=7, before=None, of_machine=True
        ),
    ] = None
    router_mode: Annotated[
        RouterMode,
        TopologyField(
            help="How the frontend picks a worker; kv: the worker that caches the longest prefix of the prompt.",
            metavar="MODE",
        ),
    ] = "round-robin"
    # Further flags of dynamo.frontend; if a flag is repeated, the last wins.
    router_args: Annotated[
        tuple[str, ...],
        TopologyField(
            help="Further flags of dynamo.frontend, in quotes, such as '--router-temperature 0.5'.", metavar="FLAGS"
        ),
    ] = ()
    # Policy of Dynamo's KV router, with thresholds; None: every prompt takes a prefill worker
    conditional_disagg: Annotated[
        Annotated[str, AfterValidator(checked_policy)] | None,
        TopologyField(
            help="Let decode workers prefill prompts themselves by this policy of the KV router, such as "
            "isl_bounding,eff_isl_threshold=512. Default: no prompt.",
            metavar="POLICY",
            ignored=("agg",),
            since=10,
            before=None,
        ),
    ] = None
    # Bounds of the frontends (docs/guides/overload.md); None: no bound
    max_queued_requests: Annotated[
        int | None,
        TopologyField(
            help="Refuse a request (529 with Retry-After) if this many already wait for a worker. Default: no bound.",
            panel="Overload",
            metavar="N",
            since=10,
            before=None,
        ),
    ] = Field(default=None, ge=1, le=MOST_QUEUED)
    max_queue_s: Annotated[
        float | None,
        TopologyField(
            help="Refuse a request (529 with Retry-After) that has waited this long for a worker. Default: no bound.",
            panel="Overload",
            metavar="SECONDS",
            since=10,
            before=None,
        ),
    ] = Field(default=None, gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    max_request_s: Annotated[
        float | None,
        TopologyField(
            help="End a request that takes longer, with a sentence, and free its KV. Default: no bound.",
            panel="Overload",
            metavar="SECONDS",
            since=10,
            before=None,
        ),
    ] = Field(default=None, gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    log_level: Annotated[
        LogLevel | None,
        TopologyField(
            help="Least severe level in the logs of frontends and workers. Default: DYN_LOG, or warn.",
            panel="Output",
            metavar="LEVEL",
            since=10,
            before=None,
        ),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        TopologyField(
            help="Form of the logs of frontends and workers: text or json. Default: DYN_LOGGING_JSONL, or text.",
            panel="Output",
            metavar="FORMAT",
            since=10,
            before=None,
        ),
    ] = None
    # Names of Dynamo's parsers; auto: by the chat template and the model's architecture
    tool_call_parser: Annotated[
        Name,
        TopologyField(
            help="Dynamo's parser of the model's tool calls; auto: by its chat template; none: calls stay text.",
            panel="Model",
            metavar="NAME",
            since=10,
            before=NO_PARSER,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Name,
        TopologyField(
            help="Dynamo's parser of the model's reasoning; auto: by its chat template; none: reasoning stays text.",
            panel="Model",
            metavar="NAME",
            since=10,
            before=NO_PARSER,
        ),
    ] = "auto"
    chat_template: Annotated[
        Annotated[Path, BeforeValidator(_locatable)] | None,
        TopologyField(
            help="Jinja file that replaces the model's chat template. Default: the model's.",
            panel="Model",
            metavar="FILE",
            since=10,
            before=None,
        ),
    ] = None
    # Base URL of an OpenTelemetry collector (OTLP over HTTP); None: no traces
    otlp_endpoint: Annotated[
        str | None,
        AfterValidator(collector_url),
        TopologyField(
            help="Send traces of requests to this OpenTelemetry collector (OTLP over HTTP). Default: no traces.",
            metavar="URL",
            since=10,
            before=None,
        ),
    ] = None
    engine_configs: dict[Role, Annotated[Path, BeforeValidator(_locatable)]] = Field(
        default_factory=dict
    )  # role -> YAML file; a missing role uses the shipped config
    overrides: tuple[str, ...] = ()  # "a.b=c", every role; "prefill.a.b=c", one role

    @model_validator(mode="after")
    def _has_both_or_none(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key has no effect without tls_cert; name both, or leave it out")
        if self.tls_key is None and self.tls_cert is not None:
            raise ValueError(
                "tls_key is missing beside a certificate, which has no effect without its key; name both, or neither"
            )
        return self

    @property
    def registered_parsers(self) -> dict[str, str]:
        """The options of the parsers that workers register, with their names, once they are resolved."""
        named = {"--tool-call-parser": self.tool_call_parser, "--reasoning-parser": self.reasoning_parser}
        return {option: name for option, name in named.items() if name not in ("auto", NO_PARSER)}

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
            f"{source}{told(name)} has no effect where {' and '.join(map(told, limits))} "
            f"{'is' if len(limits) == 1 else 'are'} 0; leave it out, or allow some"
        )


def in_topology(name: str) -> str:
    """Returns the name of a field of a topology or of its ``media`` as a sweep file spells it."""
    return f"topology.media.{name}" if name in MediaLimits.model_fields else f"topology.{name}"
