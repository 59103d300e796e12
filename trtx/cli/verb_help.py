"""The help of a verb: its most used options with ``--help``, and all of them with ``--help-all``.

The text is plain, because Rich's panels need 0.3 s (Typer 0.29) and twice as many lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HELP_ALL = "--help-all"
_NAMES_WIDTH = 28  # the help of an option with a longer name begins on the next line
_METAVARS = {"<int>": "N", "<float>": "X", "<str>": "TEXT", "<path>": "PATH"}
# verb -> the options that its --help shows. A verb without a row shows all options.
FIRST_OPTIONS: Mapping[str, str] = {
    "serve": "--model --engine --set --mode --workers --prefill --decode --gpus --host --port --router-mode --output "
    "--dry-run",
    "bench": "SWEEP_FILE --concurrency --isl --osl --trials --url --model --mode --prefill --decode --slo --baseline "
    "--max-regression --output --resume --dry-run",
    "eval": "--tasks --limit --min-score --baseline --max-drop --url --model --set --mode --gpus --output --resume",
    "eval fidelity": "--reference --prompts --max-kl --min-agreement --url --model --set --mode --output --resume",
    "eval parity": "--routes --prompts --concurrency --url --against --model --set --gpus --output --resume",
    "export kubernetes": "--model --set --mode --workers --prefill --decode --image --plain --name --namespace "
    "--model-claim --gpus-per-node --bench --output",
    "export slurm": "--model --set --mode --workers --prefill --decode --time --partition --account --nodes "
    "--gpus-per-node --container-image --bench --output",
}


def option_name(parameter: Any) -> str:
    """Returns the name of a parameter as typed: ``--output``, or ``MODEL`` for an argument."""
    longest = max((str(option) for option in parameter.opts), key=len)
    return longest if longest.startswith("-") else str(parameter.name).upper()


def help_names(verb: str) -> list[str]:
    """Returns the names of the help option of a verb."""
    return ["--help", HELP_ALL] if verb in FIRST_OPTIONS else ["--help"]


def first_parameters(verb: str, parameters: Sequence[Any]) -> Sequence[Any]:
    """Returns those of a verb's parameters that its ``--help`` shows."""
    first = FIRST_OPTIONS.get(verb)
    return parameters if first is None else [one for one in parameters if option_name(one) in first.split()]


def write_options(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Writes options, grouped by their panels."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for one in parameters:
        panel = getattr(one, "rich_help_panel", None) or ("Options" if one.opts[0].startswith("-") else "Arguments")
        panels.setdefault(panel, []).append((_names(one, ctx), " ".join(_help(one, ctx))))
    for panel, rows in panels.items():
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=_NAMES_WIDTH)


def _names(parameter: Any, ctx: Any) -> str:
    value = parameter.display_type_rich(ctx=ctx).partition(" range")[0]
    value = _METAVARS.get(value if value.endswith(">") else f"{value}>", value.strip("<>"))
    if not parameter.opts[0].startswith("-"):
        return str(parameter.metavar or value)
    names = ", ".join(sorted(parameter.opts, key=len))
    return names if parameter.is_flag else f"{names} {value}"


def _help(parameter: Any, ctx: Any) -> Iterator[str]:
    yield " ".join((parameter.help or "").split())
    default = parameter.default
    if getattr(parameter, "show_default", False) and default not in (None, False) and not callable(default):
        yield f"Default: {default}."
