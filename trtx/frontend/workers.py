"""The route on which this frontend shows what its workers publish of themselves (``trtx.engine.worker_facts``).

Dynamo 1.4.2 counts workers (``/v1/models/<name>/ready``) and lists their addresses (``/health``), and keeps their
runtime data to itself. It takes routes from others, though: ``--frontend-route-extension``. A handler is given no model
cards, so they are read where Dynamo's file discovery keeps them; with another discovery there is no such route.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from dynamo.llm import FrontendExtensionContext, FrontendRoute

from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body


def routes() -> list[FrontendRoute]:
    """Asked by dynamo.frontend once, as it starts."""
    directory = os.environ.get("DYN_FILE_KV")
    if directory is None or os.environ.get("DYN_DISCOVERY_BACKEND") != "file":
        return []

    def answer(context: FrontendExtensionContext) -> object:
        return to_body(published_workers(Path(directory)))

    return [FrontendRoute("GET", PATH, answer)]


def published_workers(directory: Path) -> tuple[PublishedWorker, ...]:
    """The workers of trtx that are registered now, by name. A card that is being written or removed is left out."""
    found = []
    for path in sorted((directory / "v1" / "mdc").glob("*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            card = record["card_json"]
            facts = WorkerFacts.of_runtime_data(card["runtime_config"].get("runtime_data"))
            if facts is not None:
                found.append(PublishedWorker(int(record["instance_id"]), str(card["display_name"]), facts))
    return tuple(sorted(found, key=lambda worker: (worker.facts.name, worker.worker_id)))
