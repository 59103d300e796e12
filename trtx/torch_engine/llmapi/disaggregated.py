"""``DisaggregatedParams``: what travels from a prefill engine to a decode engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trtx.torch_engine.llmapi.request_errors import typed
from trtx.torch_engine.llmapi.values import shown
from trtx.torch_engine.messages import Handoff, Logprob, MediaSpan


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """TensorRT-LLM's parameters that travel from a prefill engine to a decode engine.

    The torch engine uses the first six, and ``media``, its own field: the placeholder ranges of a prompt's media, which
    are all that decode needs of them.
    """

    request_type: Literal["context_only", "generation_only", "context_and_generation"] | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[dict[int, Logprob]] | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    opaque_state: bytes | None = None
    first_gen_logits: Any = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: int | None = None
    ctx_usage: Any = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_item_runs: Any = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
    media: list[MediaSpan] | None = None

    def __post_init__(self) -> None:
        known = (None, "context_only", "generation_only", "context_and_generation")
        if self.request_type not in known:
            raise ValueError(
                f"request_type is {shown(self.request_type)}; expected one of {', '.join(map(str, known[1:]))}"
            )

    @classmethod
    def from_handoff(cls, handoff: Handoff) -> DisaggregatedParams:
        return cls(**msgspec.structs.asdict(handoff))

    def handoff(self) -> Handoff | None:
        """Returns None for a whole request, which needs no peer. Raises ValueError like the constructor."""
        self.__post_init__()
        if self.request_type is None or self.request_type == "context_and_generation":
            return None
        values = [getattr(self, name) for name in Handoff.__struct_fields__]
        handoff: Handoff = typed(Handoff, values, "disaggregated_params")
        return handoff
