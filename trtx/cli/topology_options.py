"""The options that describe a topology, shared by all verbs that serve one, and their conversion to a spec."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer
from pydantic import ValidationError

from trtx.config import Mode, Role, RouterMode, TopologySpec, recipe_files
from trtx.config.media import MediaLimits, media_fields
from trtx.config.topology import refuse_idle
from trtx.config.wording import quoted
from trtx.errors import UsageError

WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")  # an item of a list; str.isdigit() would accept ² and any length
_MODEL, _TOPOLOGY, _OUTPUT = "Model", "Topology", "Output"


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    """Returns an option that is None unless given; the help text states the default."""
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


ConfigOption = Annotated[
    list[str] | None,
    _option(
        _MODEL,
        "--config",
        "Engine config of one role (agg, prefill, decode): YAML with TensorRT-LLM's field names. Repeatable.",
        metavar="ROLE=FILE",
    ),
]
RecipeOption = Annotated[
    str | None,
    _option(
        _MODEL,
        "--recipe",
        "A folder of engine_configs, such as deepseek-r1-mtp, instead of the model family's own; --config wins.",
        metavar="NAME",
    ),
]
SetOption = Annotated[
    list[str] | None,
    _option(
        _MODEL,
        "--set",
        "Override one engine config field for every role but encode; role.a.b=c for one role. Repeatable.",
        metavar="A.B=C",
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option(
        "-o", "--output", help="Parent of the run directory, which is always a new one.", rich_help_panel=_OUTPUT
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of the model and its engine, in the order of the help page."""

    model: Annotated[
        str | None,
        _option(
            _MODEL,
            "--model",
            "Directory, Hugging Face name or synthetic:<shape>. Default: a small synthetic model that fits here.",
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        _option(_MODEL, "--served-model-name", "Name that clients send. Default: the model's own short name."),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="auto, torch, tensorrt-llm, simulated (no real tokens) or paced (fixed speed). "
            "auto: tensorrt-llm where it is installed and a GPU is there, else torch.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    config: ConfigOption = None
    recipe: RecipeOption = None
    overrides: SetOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyOptions:
    """The options of the topology. An option with the name of a :class:`TopologySpec` field sets that field."""

    workers: Annotated[int | None, _option(_TOPOLOGY, "--workers", "Workers in mode agg. Default: 1.")] = None
    prefill: Annotated[int | None, _option(_TOPOLOGY, "--prefill", "Prefill workers in mode disagg. Default: 1.")] = (
        None
    )
    decode: Annotated[int | None, _option(_TOPOLOGY, "--decode", "Decode workers in mode disagg. Default: 1.")] = None
    encode: Annotated[
        int | None,
        _option(
            _TOPOLOGY,
            "--encode",
            "Workers that encode images for the others; with none of them, who needs an image encodes it. Default: 0.",
        ),
    ] = None
    encode_shared: Annotated[
        int | None,
        _option(
            _TOPOLOGY,
            "--encode-shared",
            "Further ones, on the GPUs of agg or prefill workers in turn, whose KV pools leave room. Default: 0.",
        ),
    ] = None
    tp: Annotated[
        int,
        typer.Option("--tp", help="GPUs a worker (tensor parallel); tensorrt-llm only.", rich_help_panel=_TOPOLOGY),
    ] = 1
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="A request's tokens and logprobs are the same to the bit in any batch; torch engine only, slower.",
            rich_help_panel=_TOPOLOGY,
        ),
    ] = False
    gpus: Annotated[
        str | None,
        _option(
            _TOPOLOGY,
            "--gpus",
            "GPUs to use, as indices into those that are visible to you. Default: all of them, NVLink pairs first.",
            metavar="0,1",
        ),
    ] = None
    router_mode: Annotated[
        RouterMode,
        typer.Option(
            "--router-mode",
            help="How the frontend picks a worker; kv goes where the prompt's prefix is cached.",
            rich_help_panel=_TOPOLOGY,
        ),
    ] = "round-robin"
    router_args: Annotated[
        str | None,
        _option(
            _TOPOLOGY,
            "--router-args",
            "Further flags of dynamo.frontend, in quotes, such as '--router-temperature 0.5'.",
            metavar="FLAGS",
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address of the HTTP port; 0.0.0.0 opens it, and it alone, to the network.",
            rich_help_panel=_TOPOLOGY,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="HTTP port; 0 takes a free one.", rich_help_panel=_TOPOLOGY)] = (
        8000
    )
    tls_cert: Annotated[
        Path | None,
        _option(
            _TOPOLOGY,
            "--tls-cert",
            "Certificate of the HTTP port in PEM, its authorities' behind it; the port then speaks TLS.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None, _option(_TOPOLOGY, "--tls-key", "Private key of --tls-cert in PEM, without a passphrase.")
    ] = None


OPTION_NAMES = tuple(field.name for group in (ModelOptions, TopologyOptions) for field in fields(group))


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """A group of generated options, placed in the ``Annotated`` of a verb's parameter."""

    members: Mapping[str, tuple[Any, Any]]  # name -> (annotation, default)


def spread(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that replaces a verb's group parameters, such as ``model: ModelOptions``, by their options.

    Typer itself requires each option in the signature of each verb. ``defaults``: defaults that differ in this verb.
    """

    def spread_over(verb: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, tuple[Callable[..., Any], Mapping[str, tuple[Any, Any]]]] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(verb, eval_str=True).parameters.values():
            group = _members(parameter.annotation)
            if group is None:
                parameters.append(parameter)
                continue
            groups[parameter.name] = group
            for name, (annotation, default) in group[1].items():
                default = defaults.get(name, default)
                parameters.append(parameter.replace(name=name, annotation=annotation, default=default))

        def called(**given: Any) -> None:
            held = {
                name: make(**{member: given.pop(member) for member in members})
                for name, (make, members) in groups.items()
            }
            verb(**given, **held)

        called.__name__, called.__doc__ = verb.__name__, verb.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return spread_over


def _members(annotation: Any) -> tuple[Callable[..., Any], Mapping[str, tuple[Any, Any]]] | None:
    """Returns the constructor of a group's value and the group's options; None if the annotation is no group."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        return annotation, {field.name: (hints[field.name], field.default) for field in fields(annotation)}
    made = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, OptionGroup)]
    return (dict, made[0].members) if made else None


def _media_option(name: str) -> tuple[Any, Any]:
    """Returns annotation and default of the option for one field of :class:`MediaLimits`."""
    field, record = MediaLimits.model_fields[name], media_fields()[name]
    kind = next(one for one in (bool, int, float, Path) if one in (field.annotation, *get_args(field.annotation)))
    told = f" Default: {field.default:g}." if isinstance(field.default, float) else f" Default: {field.default}."
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=record.help + (told if type(field.default) in (int, float) else ""),
        metavar=record.metavar,
        rich_help_panel="Media",
        show_default=False,
    )
    return (Annotated[bool | None, option] if kind is bool else Annotated[kind | None, option], None)


MediaOptions = Annotated[Mapping[str, Any], OptionGroup({name: _media_option(name) for name in media_fields()})]
"""The options for the fields of :class:`MediaLimits`, in the order of the fields."""


def build_spec(*, mode: str, **typed: Any) -> TopologySpec:
    """Builds a validated spec from the options above; None means that an option was not given.

    Raises UsageError, which names the option, for invalid and contradictory values.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    recipe = recipe_roles(given.pop("recipe", None), encode=any(map(given.get, ("encode", "encode_shared"))))
    engine_configs = recipe | role_files(given.pop("config", None))
    if media := {name: given.pop(name) for name in media_fields() if name in given}:
        given["media"] = media
    if "gpus" in given:
        given["gpus"] = _indices(given["gpus"])
    if "router_args" in given:
        given["router_args"] = split_words("--router-args", given["router_args"])
    try:
        spec = TopologySpec.model_validate({"mode": mode, "engine_configs": engine_configs, **given})
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][-1] if first["loc"][:1] == ("media",) else first["loc"][0]) if first["loc"] else ""
        if field in ("", "media"):  # two fields contradict each other; the message begins with the one to change
            field = first["msg"].removeprefix("Value error, ").partition(" ")[0]
        option = f"--{_OPTIONS.get(field, field).replace('_', '-')}"
        if first["type"] == "value_error":  # the message begins with the field's name
            told = first["msg"].removeprefix("Value error, ").replace(field, option, 1)
            for other in (name for name in TopologySpec.model_fields if "_" in name):  # other names are plain words
                told = told.replace(f" {other};", f" --{other.replace('_', '-')};")
            raise UsageError(told) from error
        expected = first["msg"].removeprefix("Input should be ")
        raise UsageError(f"{option} {quoted(first.get('input'))}: expected {expected}; see --help") from error
    refuse_idle(spec, lambda field: f"--{field.replace('_', '-')}")
    return spec


_OPTIONS = {"engine_configs": "config", "overrides": "set"}  # field -> option, if they differ
_FIELDS = {"config": "engine_configs", "recipe": "engine_configs"}  # option -> field, if they differ


def engine_uses(engine: str) -> tuple[str, ...]:
    """Returns the uses that follow from the engine, by their names in :mod:`trtx.cli.placement`."""
    return ("no GPU",) if engine in ("simulated", "paced") else ()


def check_roles(
    modes: Sequence[Mode],
    config: list[str] | None,
    overrides: list[str] | None,
    recipe: str | None,
    *,
    encode: int | None = None,
    beside: Sequence[Role] = (),
) -> None:
    """Refuses configs and overrides that no role uses.

    Raises UsageError for a given config or override of a role that is neither in a topology of ``modes`` nor in
    ``beside``, and for a recipe whose configs are all replaced. ``encode``: the number of encode workers of each
    topology; None if the verb can't serve any.
    """
    served = {role for mode in modes for role in TopologySpec(mode=mode, encode=encode or 0).roles} | {*beside}
    for option, entries in (("--config", config), ("--set", overrides)):
        for entry in entries or ():
            role = entry.partition("=")[0].partition(".")[0]
            if role in get_args(Role) and role not in served:
                way_out = "leave it out, or choose another --mode"
                if role == "encode":
                    way_out = "leave it out" if encode is None else "leave it out, or add --encode 1"
                raise UsageError(
                    f"{option} {quoted(entry)} is for {role} workers, and --mode {','.join(modes)} has "
                    f"{' and '.join(sorted(served))} workers alone; {way_out}"
                )

    if recipe is not None and served - {*beside} <= role_files(config).keys():
        raise UsageError(unused_recipe(recipe))


def unused_recipe(recipe: str) -> str:
    """Returns the error message for a recipe combined with a ``--config`` for every role."""
    return f"--recipe {quoted(recipe)} means nothing beside a --config of every role; leave one of them out"


def recipe_roles(recipe: str | None, *, encode: bool = False) -> dict[Role, Path]:
    """Returns the configs of ``--recipe`` for the roles of a topology. ``encode``: whether it has encode workers."""
    files = recipe_files(recipe) if recipe is not None else {}
    return {role: path for role, path in files.items() if encode or role != "encode"}


def role_files(config: list[str] | None) -> dict[Role, Path]:
    """Parses ``--config ROLE=FILE`` options, with at most one for each role. Raises UsageError."""
    files: dict[Role, Path] = {}
    for entry in config or ():
        role, equals, path = entry.partition("=")
        if not equals or role not in get_args(Role) or not path.strip():
            raise UsageError(
                f"--config {quoted(entry)} is not ROLE=FILE; expected a role of {', '.join(get_args(Role))}"
            )
        if role in files:
            raise UsageError(f"--config names {role} twice; leave one of them out")
        files[cast(Role, role)] = Path(path)
    return files


def split_words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {quoted(text)} can't be split into words ({error}); close the quotes") from error


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(WHOLE_NUMBER.fullmatch(part) for part in parts):
        raise UsageError(f"--gpus {quoted(text)} is not a list of indices; expected such as 0 or 0,1")
    return tuple(int(part) for part in parts)


def topology_fields(given: dict[str, Any], modes: list[str]) -> dict[str, Any]:
    """Returns the given topology options, checked by the same rules as ``trtx serve``'s."""
    chosen = {name: given[name] for name in OPTION_NAMES if name in given}
    roles = {"agg": ("workers",), "disagg": ("prefill", "decode")}
    both = len(modes) != 1
    fields: dict[str, Any] = {}
    for mode, own in roles.items():
        if mode in modes or both:
            others = {name for names in roles.values() for name in names} - set(own)
            kept = {name: value for name, value in chosen.items() if not both or name not in others}
            checked = build_spec(mode=mode, **kept).model_dump(mode="json")
            fields |= {field: checked[field] for field in (_FIELDS.get(name, name) for name in kept)}
    if media := {name: given[name] for name in media_fields() if name in given}:
        fields["media"] = _typed_media(media, {name: chosen[name] for name in chosen if name.startswith("encode")})
    return fields


_AT_ODDS = ("media_memory_bytes", "max_media_bytes")


def _typed_media(media: dict[str, Any], encoders: dict[str, Any]) -> dict[str, Any]:
    """Returns the given media options, checked by the same rules together with the given encode workers.

    An option that may contradict a field in the sweep file is skipped here; it is checked together with the file.
    """
    is_half = sum(name in media for name in _AT_ODDS) == 1
    alone = {name: value for name, value in media.items() if not (is_half and name in _AT_ODDS)}
    checked = build_spec(mode="agg", **alone, **encoders).model_dump(mode="json")["media"]
    return {name: checked[name] if name in alone else value for name, value in media.items()}


def parse_modes(text: str) -> list[str]:
    """Parses the value of ``--mode``, such as ``agg,disagg``. Raises UsageError."""
    modes = [part.strip() for part in text.split(",")]
    for mode in modes:
        if mode not in get_args(Mode):
            raise UsageError(
                f"--mode {quoted(mode)} is not a mode; expected {' or '.join(get_args(Mode))}, or agg,disagg"
            )
    return modes
