"""The templates of the report pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trtx.bench.judge.judgement import Verdict

_CLASSES = {Verdict.PASS: "good-text", Verdict.NO_VERDICT: "open-text"}


def rendered(template: str, content: Mapping[str, Any]) -> str:
    """A page from one of the templates of this package."""
    return _environment().get_template(template).render(content)


def in_script(value: Any) -> Markup:
    """JSON without a raw "<", so that no label can close the script element."""
    return Markup(json.dumps(value, sort_keys=True).replace("<", "\\u003c"))


@cache
def plotly_source() -> Markup:
    """Plotly's source, which makes the page independent of the network."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trtx.report", ""),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["verdict_class"] = {one.value: _CLASSES.get(one, "failed-text") for one in Verdict}
    return environment
