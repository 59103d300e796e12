"""A route of the frontend that lists its workers with the facts that they publish (``trtx.engine.worker_facts``).

Dynamo 1.6.1 counts workers (``/v1/models/<name>/ready``) and lists their addresses (``/health``), but does not show
their runtime data. It accepts additional routes (``--frontend-route-extension``), but gives their handlers no model
cards. So this module reads the cards from Dynamo's discovery, which it finds in the frontend's environment.
"""

from __future__ import annotations

import os

from dynamo.llm import FrontendExtensionContext, FrontendResponse, FrontendRoute

from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body
from trtx.frontend.discovery import registry_of_environment
from trtx.planes.registry import Registry


def routes() -> list[FrontendRoute]:
    """The routes to add; dynamo.frontend calls this once at its start."""
    registry = registry_of_environment(os.environ)
    if registry is None:
        return []

    def answer(context: FrontendExtensionContext) -> object:
        try:
            return to_body(published_workers(registry))
        except OSError as error:
            return FrontendResponse(503, {"error": str(error)})

    return [FrontendRoute("GET", PATH, answer)]


def published_workers(registry: Registry) -> tuple[PublishedWorker, ...]:
    """The registered workers of trtx, sorted by name. Raises OSError if discovery can't be read."""
    found = []
    for card in registry.cards():
        if (facts := WorkerFacts.of_runtime_data(card.runtime_data)) is not None:
            found.append(PublishedWorker(card.worker_id, card.model, facts))
    return tuple(sorted(found, key=lambda worker: (worker.facts.name, worker.worker_id)))
