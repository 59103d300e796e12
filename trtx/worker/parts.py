"""The objects that all requests of one worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtx.worker.leaving import Leaving
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import WorkerMetrics
from trtx.worker.multimodal.embedding_encoder import EmbeddingEncoder
from trtx.worker.multimodal.handle_encoder import HandleEncoder
from trtx.worker.multimodal.media_loader import MediaLoader
from trtx.worker.multimodal.prompt_media_loader import PromptMediaLoader
from trtx.worker.options import WorkerOptions
from trtx.worker.polling import EnginePoll
from trtx.worker.requests.open_requests import OpenRequests
from trtx.worker.requests.span_export import SpanExport
from trtx.worker.requests.stage_log import StageLog
from trtx.worker.sleeping import Sleeping


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The engine of a worker and the records that its requests write to."""

    options: WorkerOptions
    loaded: LoadedEngine
    new_id: Callable[[], int | None]
    poll: EnginePoll
    metrics: WorkerMetrics
    open_requests: OpenRequests
    leaving: Leaving
    sleeping: Sleeping
    media_loader: MediaLoader | PromptMediaLoader | None = None  # None for a worker that takes no images
    encoder: HandleEncoder | EmbeddingEncoder | None = None  # set for role encode only
    ended: StageLog | None = None  # takes a row of each ended request; None: there is no status file
    spans: SpanExport | None = None  # None: no collector takes them
