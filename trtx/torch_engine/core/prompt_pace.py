"""How many prompt tokens a step computes beside its decodes, so that prompts keep pace and come evenly.

Clients that wait for an answer before they ask again come in waves, as all that begin together end together. A wave
computed at once makes those that decode wait, and then decodes fill no pass: a prompt's tokens beside decodes cost less
than alone, as the weights are read anyway. What evens waves out is a share a step that is what comes in the long run: a
decode's step is one of its request's ``outputs``, so it brings ``prompt / outputs`` of a prompt's tokens with it.

No share is more than what fills the widest pass that has a graph: a wave computed in wider ones stays a wave.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtx.config.torch_passes import WIDEST

TILE_TOKENS = 128
"""Rows of the large tiles that products are made of: a pass of whole ones wastes nothing."""
_LEAST_SHARE = 128
_ALONE = 1024  # of a step without decodes: enough for products at full speed, and those done first decode meanwhile
_LONE_TOKENS = 1.5  # a request, on average: a prefill worker answers a canary now and then
_SLACK = 1.1  # more than what comes on average, so that what has gathered is worked off
_KEPT = 0.98  # of what is known when one more request has ended: the last 50 count


@dataclass(slots=True)
class PromptPace:
    """``steps``: of what is there, a step takes at least one part in so many, whatever came before."""

    steps: int
    _requests: float = 0.0
    _prompt_tokens: float = 0.0
    _outputs: float = 0.0

    def ended(self, prompt_tokens: int, outputs: int) -> None:
        """A request has: it made the engine compute so many tokens of its prompt, and generated ``outputs``."""
        self._requests = self._requests * _KEPT + 1
        self._prompt_tokens = self._prompt_tokens * _KEPT + prompt_tokens
        self._outputs = self._outputs * _KEPT + outputs

    def share(self, num_decodes: int, there: int) -> int:
        """Prompt tokens of a step with so many decodes, where ``there`` are left of prompts that could be computed.

        With the decodes they make whole tiles.
        """
        if not num_decodes:
            # Where requests end with their first token, as on prefill workers, nobody decodes meanwhile.
            return there if 0 < self._outputs < _LONE_TOKENS * self._requests else _ALONE
        wanted = -(-there // self.steps)
        if self._outputs:
            wanted = max(wanted, int(_SLACK * num_decodes * self._prompt_tokens / self._outputs))
        wanted = max(_LEAST_SHARE, min(wanted, WIDEST - num_decodes))
        return wanted + -(num_decodes + wanted) % TILE_TOKENS
