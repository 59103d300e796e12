"""The command class of every verb, which validates the command line as a whole before the verb runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from trtx.cli.verb_help import HELP_ALL, first_parameters, help_names, option_name, write_options
from trtx.config.files import path_problem
from trtx.config.planted_fault import refuse_planted_fault
from trtx.config.wording import quoted
from trtx.errors import UsageError


class Verb(TyperCommand):
    """A command that refuses empty values and repeated options, which would otherwise be silently dropped.

    It also refuses a planted fault (TRTX_FAULT), except in the verb that reports it.
    """

    takes_planted_fault = False

    def invoke(self, ctx: Any) -> Any:
        if not self.takes_planted_fault:
            refuse_planted_fault()
        return super().invoke(ctx)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return help_names(str(ctx.info_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        verb = str(ctx.info_name)
        shown = self.params if ctx.meta.get(HELP_ALL) else first_parameters(verb, self.params)
        write_options(shown, ctx, formatter)
        self.format_epilog(ctx, formatter)
        if len(shown) < len(self.params):
            formatter.write_paragraph()
            formatter.write_text(f"{len(self.params) - len(shown)} more options: trtx {verb} {HELP_ALL}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[HELP_ALL] = HELP_ALL in args
        if args and not ctx.resilient_parsing:
            try:
                given, _, order = self.make_parser(ctx).parse_args(args=list(args))
            except TyperException as error:
                self._tell_where_hosts_belong(str(ctx.info_name), error)
                raise
            seen = set()
            for parameter in order:
                name = spoken_name(parameter)
                takes_one = not getattr(parameter, "multiple", False) and not getattr(parameter, "is_flag", False)
                if takes_one and parameter.name in seen:
                    raise UsageError(f"{name} is given twice but takes one value; leave one of them out")
                seen.add(parameter.name)
                values = given.get(parameter.name)
                if any(isinstance(one, str) and not one.strip() for one in _each(values)):
                    what = name if getattr(parameter, "nargs", 1) == 1 else f"a value of {name}"
                    raise UsageError(f"{what} is empty, as an unset variable leaves it; give a value, or leave it out")
        rest = list(super().parse_args(ctx, args))
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, Path) and (problem := path_problem(value)):
                raise UsageError(f"{spoken_name(parameter)} {quoted(str(value))} {problem}; name another path")
        return rest

    def _tell_where_hosts_belong(self, verb: str, error: TyperException) -> None:
        """Explains how to measure a topology over hosts, if ``--hosts`` was given to a verb that measures.

        Such a verb starts only processes of one machine, and can attach to any server with ``--url``.
        """
        own = {option for parameter in self.params for option in parameter.opts}
        if getattr(error, "option_name", None) != "--hosts" or "--url" not in own:
            return
        counted = " --etcd URL" if "--etcd" in own else ""
        raise UsageError(
            f"trtx {verb} starts processes on one machine only, so it has no --hosts. Start the hosts with trtx serve "
            "--hosts and trtx serve join, and once they are ready run trtx "
            f"{verb} --url http://ADDRESS:PORT{counted} (docs/hosts.md)"
        )


def spoken_name(parameter: Any) -> str:
    """Returns the name of a parameter for messages: for an argument its metavar, as in the help."""
    name = option_name(parameter)
    metavar = None if name.startswith("-") else parameter.metavar
    return " ".join(str(metavar).replace("[", "").replace("]", "").split()) if metavar else name


def typed(context: typer.Context) -> Iterator[Any]:
    """Yields the parameters that were given on the command line."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            yield parameter


def optional(panel: str, name: str, help: str, **more: Any) -> Any:
    """Returns an option that is None unless given; the help text states the default."""
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


def given_options(context: typer.Context) -> dict[str, Any]:
    """Returns the values that were given on the command line, by parameter name."""
    return {str(one.name): context.params[str(one.name)] for one in typed(context)}


def _each(values: Any) -> Any:
    return values if isinstance(values, (list, tuple)) else (values,)
