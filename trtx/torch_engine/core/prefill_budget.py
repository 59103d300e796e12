"""The prefill token budget: how many prompt tokens a step computes besides its decodes.

Requests of clients that wait for a response before they send the next request arrive in waves, because requests that
start together end together. If the prompts of a wave are computed all at once, they stall the running decodes, and
later steps have decodes only. That is inefficient: a step with decodes reads the weights anyway, so additional prompt
tokens cost little there. To smooth the waves, each step computes as many prompt tokens as arrive on average. A decode
produces one of its request's ``outputs`` tokens, so the budget is ``prompt / outputs`` tokens for each decode in the
step.

The budget never exceeds the size of the widest forward with a CUDA graph. Wider forwards would not smooth a wave.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtx.config.torch_passes import WIDEST

TILE_TOKENS = 128
"""Rows of the large matmul tiles: a forward of whole tiles wastes no work."""
_LEAST_SHARE = 128
_ALONE = 1024  # for a step without decodes: full matmul speed, but short enough that finished prompts soon decode
_LONE_TOKENS = 1.5  # average outputs of a request: prefill workers also answer an occasional canary
_SLACK = 1.1  # budget above the average arrival rate, so that a backlog shrinks
_KEPT = 0.98  # decay of the averages with each ended request: about the last 50 count


@dataclass(slots=True)
class PromptPace:
    """Computes the budget from the averages of ended requests.

    ``steps``: the budget is at least 1/``steps`` of the waiting prompt tokens, whatever the averages are.
    """

    steps: int
    _requests: float = 0.0
    _prompt_tokens: float = 0.0
    _outputs: float = 0.0

    def ended(self, prompt_tokens: int, outputs: int) -> None:
        """Updates the averages with an ended request: prompt tokens that the engine computed, and output tokens."""
        self._requests = self._requests * _KEPT + 1
        self._prompt_tokens = self._prompt_tokens * _KEPT + prompt_tokens
        self._outputs = self._outputs * _KEPT + outputs

    def share(self, num_decodes: int, there: int) -> int:
        """Returns a step's prompt token budget. ``there``: number of prompt tokens that are waiting.

        The budget is rounded up so that prompt tokens and decodes together fill whole matmul tiles.
        """
        if not num_decodes:
            # Requests that end with their first token, as on prefill workers, have no decodes that could be stalled.
            return there if 0 < self._outputs < _LONE_TOKENS * self._requests else _ALONE
        wanted = -(-there // self.steps)
        if self._outputs:
            wanted = max(wanted, int(_SLACK * num_decodes * self._prompt_tokens / self._outputs))
        wanted = max(_LEAST_SHARE, min(wanted, WIDEST - num_decodes))
        return wanted + -(num_decodes + wanted) % TILE_TOKENS
