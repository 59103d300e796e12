"""The limits of a step, from the engine's arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """At most ``max_batch_size`` sequences hold a slot; a step computes at most ``max_num_tokens`` tokens."""

    max_batch_size: int
    max_num_tokens: int
    enable_chunked_prefill: bool = True
    by_priority: bool = False  # waiting_queue_policy: priority
    # Cap on the prompt tokens of a step that also has decodes: it bounds what a stream of long prompts adds to the
    # inter-token latency. None: prompts get the whole remaining budget. Without chunked prefill, the prompt that
    # reaches a cap is still computed whole.
    max_prompt_tokens_beside_decodes: int | None = None
    # A dynamic cap instead of a fixed one: it follows the arrival rate and works off waiting prompts in about this many
    # steps (:class:`PromptPace`). None: no dynamic cap.
    paced_steps: int | None = None
