"""The dashboard of a served topology, as JSON that Grafana imports.

``schemaVersion`` 39 is that of Grafana 10.4 and 11; later versions convert it when they load it. ``unit`` ids are
those of Grafana's ``@grafana/data`` value formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from trtx.export.files import ExportedFile
from trtx.export.monitoring.panels import ROWS, Panel, PanelRow

FILE = "trtx-dashboard.json"
SCHEMA_VERSION = 39
NO_GPUS = "This topology runs on the CPU: its workers have no GPU, so there are no GPU metrics."
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _COLUMNS, _HEIGHT = 24, 3, 8
_Json = dict[str, Any]


def dashboard(*, has_gpus: bool) -> ExportedFile:
    """The dashboard; without GPUs, a text stands in the place of the panels about them."""
    document: _Json = {
        "uid": "trtx",
        "title": "trtx topology",
        "tags": ["trtx", "dynamo"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_variables())},
        "panels": list(_panels(has_gpus)),
    }
    return ExportedFile(FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _variables() -> Iterator[_Json]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    for name, label, query in (
        ("topology", "Topology", "label_values(up, topology)"),
        ("model", "Model", "label_values(dynamo_frontend_model_ready, model)"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "variables"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "hide": 0,
            "sort": 1,
        }


def _panels(has_gpus: bool) -> Iterator[_Json]:
    ids, top = count(1), 0
    for row in ROWS:
        yield {
            "id": next(ids), "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
        }  # fmt: skip
        top += 1
        if row.of_gpus and not has_gpus:
            yield _text(next(ids), NO_GPUS, top)
            top += 3
            continue
        for panel, place in zip(row.panels, _places(row, top), strict=True):
            yield _series(next(ids), panel, place)
        top += _HEIGHT * -(-len(row.panels) // _COLUMNS)


def _places(row: PanelRow, top: int) -> Iterator[_Json]:
    width = _WIDTH // _COLUMNS
    for index in range(len(row.panels)):
        yield {
            "x": index % _COLUMNS * width, "y": top + index // _COLUMNS * _HEIGHT, "w": width, "h": _HEIGHT,
        }  # fmt: skip


def _text(number: int, text: str, top: int) -> _Json:
    return {
        "id": number,
        "type": "text",
        "title": "",
        "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 3},
        "options": {"mode": "markdown", "content": text},
    }


def _series(number: int, panel: Panel, place: _Json) -> _Json:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "editorMode": "code",
                "range": True,
                "expr": query.query,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
