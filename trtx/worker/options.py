"""The worker's command line: role, engine, model, and the status file to report progress in."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from trtx.config.media import EMBEDDING_CACHE_BYTES, MediaLimits
from trtx.config.strict_yaml import read_yaml
from trtx.config.topology import Role
from trtx.config.wording import a_kind
from trtx.engine import ENGINE_KINDS, EngineKind
from trtx.errors import UsageError

DRAIN_SECONDS = 30.0
"""How long a stopping worker waits for the requests that it has begun; also the launcher's default."""

STALL_SECONDS = 300.0
"""How long a TensorRT-LLM engine with open requests may go without a step; also the frontend's stream timeout."""

_MOST_SECONDS = 86_400.0

Encoders = Literal["local", "remote"]
"""Where a worker's images are encoded: in the worker itself, or by the encode workers of its topology."""


PromptsBy = Literal["dynamo", "frontend"]
"""The renderer of prompts: Dynamo with the model's files, or, if that may differ, trtx's frontend with transformers."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The resolved options of one worker. ``llm_args`` are exactly the LLM's keyword arguments."""

    role: Role
    engine: EngineKind
    model: Path
    served_model_name: str
    name: str
    llm_args: dict[str, Any]
    status_file: Path | None
    drain_seconds: float
    shutdown_seconds: float | None  # None: the engine's own timeout
    stall_seconds: float
    encoders: Encoders = "local"
    media: MediaLimits = field(default_factory=MediaLimits)
    embedding_cache_bytes: int = EMBEDDING_CACHE_BYTES
    deterministic: bool = False
    weight_group: str | None = None  # name of the group of workers that share their weights; None: this one's own
    weight_engines: int = 1  # number of workers in that group
    prompts_by: PromptsBy = "dynamo"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: Path | None = None  # None: the model's own


def parse(argv: list[str]) -> WorkerOptions:
    """Parses the command line and reads the engine config that it names. Raises UsageError."""
    parser = argparse.ArgumentParser(prog="python -m trtx.worker", allow_abbrev=False)
    parser.add_argument("--role", choices=get_args(Role), required=True)
    parser.add_argument("--engine", choices=ENGINE_KINDS, required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--engine-config", type=Path, help="resolved YAML: the LLM's keyword arguments")
    parser.add_argument("--name", default="worker", help="name of this worker in logs, such as decode-0")
    parser.add_argument("--status-file", type=Path)
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=DRAIN_SECONDS,
        help="wait for open requests, in s (default: %(default)s)",
    )
    parser.add_argument(
        "--shutdown-seconds", type=_seconds, help="wait for the engine's shutdown, in s (default: 20, or 60)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=_seconds,
        default=STALL_SECONDS,
        help="treat the engine as dead after this time without a step",
    )
    parser.add_argument("--encoders", choices=get_args(Encoders), default="local", help="who encodes images")
    parser.add_argument("--embedding-cache-bytes", type=int, default=EMBEDDING_CACHE_BYTES, help="of images")
    parser.add_argument("--deterministic", action="store_true", help="bit-identical answers in any batch")
    parser.add_argument("--weight-group", help="workers with this group's name share one copy of the weights")
    parser.add_argument("--weight-engines", type=int, default=1, help="number of workers in the group")
    parser.add_argument(
        "--media", default="{}", help="JSON with limits of clients' images that differ from the defaults"
    )
    parser.add_argument("--prompts-by", choices=get_args(PromptsBy), default="dynamo", help="who makes prompts")
    parser.add_argument("--tool-call-parser", help="name of Dynamo's tool call parser")
    parser.add_argument("--reasoning-parser", help="name of Dynamo's reasoning parser")
    parser.add_argument("--chat-template", type=Path, help="file that replaces the model's chat template")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        # If the directory does not exist, Dynamo would treat the path as a model name to download.
        raise UsageError(f"--model {args.model} has no config.json; expected a Hugging Face model directory")
    if args.deterministic and args.role == "encode":
        raise UsageError("--deterministic has no effect on role encode, which generates nothing; leave it out")
    return WorkerOptions(
        role=args.role,
        engine=args.engine,
        model=args.model.resolve(),
        served_model_name=args.served_model_name,
        name=args.name,
        llm_args=_read_engine_config(args.engine_config),
        status_file=args.status_file,
        drain_seconds=args.drain_seconds,
        shutdown_seconds=args.shutdown_seconds,
        stall_seconds=args.stall_seconds,
        encoders=args.encoders,
        media=_read_media(args.media),
        embedding_cache_bytes=args.embedding_cache_bytes,
        deterministic=args.deterministic,
        weight_group=args.weight_group,
        weight_engines=args.weight_engines,
        prompts_by=args.prompts_by,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        chat_template=args.chat_template,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"it is {text}, expected seconds from 0 to {_MOST_SECONDS:g}")
    return seconds


def _read_media(text: str) -> MediaLimits:
    try:
        return MediaLimits.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"--media {text} can't be read: {error.errors()[0]['msg']}; expected JSON") from error


def _read_engine_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    values = read_yaml(path, "--engine-config", "a YAML mapping")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"--engine-config {path} holds {a_kind(values)}; expected a YAML mapping")
    return values
