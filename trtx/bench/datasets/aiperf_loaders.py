"""Uses aiperf 0.13.0's own loaders to recognise files in formats that trtx can't check itself."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtx.bench.datasets.reading import open_records
from trtx.config.wording import quoted
from trtx.errors import UsageError


def loader_of(path: Path, form: Any) -> str:
    """Returns the name of ``form`` if aiperf's loader for it accepts the file. Raises UsageError otherwise."""
    from aiperf.plugin import plugins
    from aiperf.plugin.enums import PluginType

    loader = plugins.get_class(PluginType.CUSTOM_DATASET_LOADER, form)
    first: Any = None
    if path.is_file():
        try:
            first = next(iter(open_records(path)), None)
        except UsageError:
            first = None
    try:
        fits = loader.can_load(first.value if first is not None else None, str(path))
    except Exception:  # a loader may raise any error for a file that it doesn't expect
        fits = False
    if not fits:
        raise UsageError(
            f"input_file {quoted(str(path))} has no records of custom_dataset_type {form}, according to aiperf's "
            "loader; leave the type out, or correct it"
        )
    return str(form)


def recognised(path: Path, first: Any, *, without: Collection[str]) -> str | None:
    """The aiperf form whose loader accepts the file; None if no loader does, or several do.

    ``first``: the first record. ``without``: forms whose loaders are not tried.
    """
    from aiperf.plugin import plugins
    from aiperf.plugin.enums import PluginType

    found = []
    log = logging.getLogger("aiperf.common.utils")
    before, log.disabled = log.disabled, True  # it warns about each line that is not JSON
    try:
        for entry, loader in plugins.iter_all(PluginType.CUSTOM_DATASET_LOADER):
            with suppress(Exception):  # as in loader_of
                if entry.name not in without and loader.can_load(first, str(path)):
                    found.append(str(entry.name))
    finally:
        log.disabled = before
    return found[0] if len(found) == 1 else None
