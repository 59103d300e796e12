"""The parent's side of one choice: an engine's update becomes a delivery, past its stop strings if it has any."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.text import StopStrings
from trtx.torch_engine.llmapi.results import Delivery, RequestOutput
from trtx.torch_engine.messages import Logprob, Update


@dataclass(slots=True, eq=False)
class Choice:
    """Where the tokens of one sequence go. Stop strings are looked for here, in the parent's reader thread: a request
    without them pays one comparison, and the engine's step loop never sees text."""

    index: int
    output: RequestOutput
    siblings: list[int]  # sequence ids of all choices of the request
    stop_strings: StopStrings | None = None
    _held_tokens: list[int] = field(default_factory=list)
    _held_logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    def delivery(self, update: Update) -> Delivery | None:
        """None when every new token is held back."""
        token_ids, logprobs = update.token_ids, update.logprobs
        finish_reason: str | None = update.finish_reason
        stop_reason: int | str | None = update.stop_reason
        text = None
        if self.stop_strings is not None:
            self._held_tokens += token_ids
            self._held_logprobs += logprobs or []
            released = self.stop_strings.feed(token_ids, is_last=finish_reason is not None)
            if released.stop is not None:
                finish_reason, stop_reason = "stop", released.stop
            is_news = released.num_tokens or released.text or update.prompt_logprobs or update.reused_blocks
            if finish_reason is None and not is_news:
                return None
            token_ids, text = self._held_tokens[: released.num_tokens], released.text
            logprobs = self._held_logprobs[: released.num_tokens]
            del self._held_tokens[: released.num_tokens]
            del self._held_logprobs[: released.num_tokens]
        return Delivery(
            choice=self.index,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=update.prompt_logprobs,
            reused_blocks=update.reused_blocks or None,
            handoff=update.handoff,
        )
