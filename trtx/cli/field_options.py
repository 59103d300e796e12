"""Options that are generated from the fields of a model, and the decorator that gives a verb groups of options.

An option has the name of its field with dashes. Its type and default come from the field; its help, metavar, panel and
the uses that refuse it come from the field's record (``trtx/config/option_field.py``).
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ValidationError

from trtx.config.option_field import OptionField, record_of
from trtx.config.wording import quoted
from trtx.errors import UsageError

Model = TypeVar("Model", bound=BaseModel)


def option_of(field: str) -> str:
    """Returns the name of the option for a field."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The options of some fields of a model, placed in the ``Annotated`` of a verb's parameter.

    The parameter gets a mapping from field to value; None means that the option was not given.
    """

    model: type[BaseModel]
    names: tuple[str, ...]  # in the order of the help
    ignored: tuple[str, ...] = ()  # uses that refuse every option of the group

    def members(self, defaults: Mapping[str, Any]) -> Mapping[str, tuple[Any, Any]]:
        """Returns annotation and default of each option. ``defaults``: those that help shows instead of the field's."""
        return {name: (self._annotation(name, defaults), None) for name in self.names}

    @property
    def uses(self) -> Mapping[str, tuple[str, ...]]:
        """The uses that refuse each option."""
        return {name: (*self.ignored, *self._record(name).ignored) for name in self.names}

    def _record(self, name: str) -> OptionField:
        record = record_of(self.model.model_fields[name])
        assert record is not None
        return record

    def _annotation(self, name: str, defaults: Mapping[str, Any]) -> Any:
        record, field = self._record(name), self.model.model_fields[name]
        if field.default is True:
            raise ValueError(
                f"{self.model.__name__}.{name} is true by default, so that its flag {option_of(name)} would change "
                "nothing; name the field after the opposite, and let it be False by default"
            )
        option = typer.Option(
            option_of(name),
            help=record.help + _default_text(defaults.get(name, field.default)),
            metavar=record.metavar,
            rich_help_panel=record.panel,
            show_default=False,
        )
        return Annotated[_typed_as(field.annotation) | None, option]


def validated(model: type[Model], given: Mapping[str, Any], options: Mapping[str, str] = MappingProxyType({})) -> Model:
    """Builds a model from options. ``options``: field -> its option without dashes, if they differ.

    Raises UsageError for invalid and contradictory values. Its message names options instead of fields.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        message, path = first["msg"].removeprefix("Value error, "), first["loc"]
        field = str(path[-1] if path[:1] == ("media",) else path[0]) if path else ""
        if field in ("", "media"):  # two fields contradict each other; the message begins with the one to change
            field = message.partition(" ")[0]
        option = option_of(options.get(field, field))
        if first["type"] == "value_error":  # the message begins with the field's name
            message = message.replace(field, option, 1)
            others = "|".join(name for name in model.model_fields if "_" in name)  # other names are plain words
            message = re.sub(rf"(?<= )({others})(?=[;,] )", lambda other: option_of(other[1]), message)
            raise UsageError(message) from error
        expected = first["msg"].removeprefix("Input should be ")
        raise UsageError(f"{option} {quoted(first.get('input'))}: expected {expected}; see --help") from error


def options_with_help(model: type[BaseModel], panel: str | None = None) -> tuple[str, ...]:
    """Returns the fields of a model that have an option, of one panel or of all."""
    records = {name: record_of(field) for name, field in model.model_fields.items()}
    return tuple(name for name, one in records.items() if one and one.help and panel in (None, one.panel))


def _typed_as(annotation: Any) -> type:
    """Returns the type to which Typer converts an option's value.

    Lists and choices stay text: lists are parsed later, and a choice's field refuses a wrong value with its own
    message.
    """
    is_optional = get_origin(annotation) is not tuple and NoneType in get_args(annotation)
    kind = next(one for one in get_args(annotation) if one is not NoneType) if is_optional else annotation
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return kind if kind in (bool, int, float, Path) else str


def _default_text(default: Any) -> str:
    if default is None or default is False or default == ():
        return ""
    values = default if isinstance(default, tuple) else (default,)
    return f" Default: {','.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}."


def spread(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that replaces a verb's group parameters, such as ``model: ModelOptions``, by their options.

    Typer itself requires each option in the signature of each verb. ``defaults``: defaults that differ in this verb.
    The attribute ``uses`` of the decorated verb has the uses that refuse each generated option.
    """

    def spread_over(verb: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, tuple[Callable[..., Any], Mapping[str, tuple[Any, Any]]]] = {}
        parameters: list[inspect.Parameter] = []
        uses: dict[str, tuple[str, ...]] = {}
        for parameter in inspect.signature(verb, eval_str=True).parameters.values():
            generated = [
                one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, OptionGroup)
            ]
            if generated:
                groups[parameter.name] = dict, generated[0].members(defaults)
                uses |= generated[0].uses
            elif isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
                groups[parameter.name] = parameter.annotation, _declared(parameter.annotation, defaults)
            else:
                parameters.append(parameter)
                continue
            for name, (annotation, default) in groups[parameter.name][1].items():
                parameters.append(parameter.replace(name=name, annotation=annotation, default=default))

        def called(**given: Any) -> None:
            held = {
                name: make(**{member: given.pop(member) for member in members})
                for name, (make, members) in groups.items()
            }
            verb(**given, **held)

        for name, count in Counter(parameter.name for parameter in parameters).items():
            if count > 1:
                raise ValueError(
                    f"{verb.__name__} has an option of the name {name} already; give the field another name"
                )
        called.__name__, called.__doc__ = verb.__name__, verb.__doc__
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        called.uses = uses  # type: ignore[attr-defined]
        return called

    return spread_over


def _declared(group: type[Any], defaults: Mapping[str, Any]) -> Mapping[str, tuple[Any, Any]]:
    """Returns annotation and default of each option of a dataclass whose fields are annotated as options."""
    hints = get_type_hints(group, include_extras=True)
    return {field.name: (hints[field.name], defaults.get(field.name, field.default)) for field in fields(group)}
