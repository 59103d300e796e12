"""Formats the plan of an export for ``--dry-run``: processes, places, settings and reasons.

Lines have at most 80 columns unless a word is longer.
"""

from __future__ import annotations

from collections.abc import Iterator

from trtx.cli.sentences import fill
from trtx.cli.topology_text import describe_command, describe_engine_configs, describe_environment, describe_reasons
from trtx.export.outcome import Export

_WIDTH = 80


def describe_export(made: Export) -> str:
    return "\n".join(_lines(made))


def _lines(made: Export) -> Iterator[str]:
    yield "Dry run: nothing was written."
    yield ""
    yield from fill(made.about, _WIDTH)
    yield ""
    shared = dict(set.intersection(*(set(part.environment.items()) for part in made.parts)))
    yield "Environment of every process:"
    yield from describe_environment(shared)
    for part in made.parts:
        yield ""
        yield f"{part.name}: {part.where}"
        yield from describe_environment({name: told for name, told in part.environment.items() if name not in shared})
        yield from describe_command(part.command)
    yield from describe_engine_configs(made.served.engine_configs)
    yield from describe_reasons(made.reasons)
    yield ""
    yield f"Files: {', '.join(file.name for file in made.files)}"
    yield from fill(made.how, _WIDTH)
