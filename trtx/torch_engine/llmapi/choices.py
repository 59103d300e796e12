"""The parent's side of one choice: turns an engine update into a delivery, after a search for stop strings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trtx.stop_strings import StopStrings
from trtx.text import TextStream, Tokenizer
from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.results import Delivery, RequestOutput
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.messages import Logprob, Update


@dataclass(slots=True, eq=False)
class Choice:
    """Destination of one sequence's tokens.

    The search for stop strings runs here, in the parent's reader thread. A request without stop strings pays one
    comparison, and the engine's step loop never handles text.
    """

    index: int
    output: RequestOutput
    siblings: list[int]  # sequence ids of all choices of the request
    stop_strings: StopStrings | None = None
    on_end: Callable[[], None] | None = None  # called once, when the engine has ended the sequence or will not start it
    is_document: bool = False  # follows a JSON grammar, so that a stop string must not cut its text
    _held_tokens: list[int] = field(default_factory=list)
    _held_logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    def delivery(self, update: Update) -> Delivery | None:
        """Returns ``update`` without tokens that a stop string may still remove; None if nothing is left to deliver.

        Raises RequestError for a stop string that cuts a document.
        """
        if self.stop_strings is None:
            return Delivery(self.index, update)
        self._held_tokens += update.token_ids
        self._held_logprobs += update.logprobs or []
        released = self.stop_strings.feed(update.token_ids, is_last=update.finish_reason is not None)
        if released.stop is not None:
            if self.is_document:
                raise RequestError(
                    f"the stop string {released.stop!r} occurs in the JSON that guided decoding asks for, and would "
                    "cut it; leave out stop"
                )
            update.finish_reason, update.stop_reason = "stop", released.stop
        count = len(released.pieces)
        is_news = count or released.text or update.prompt_logprobs or update.reused_blocks
        if update.finish_reason is None and not is_news:
            return None
        update.token_ids, update.logprobs = self._held_tokens[:count], self._held_logprobs[:count]
        del self._held_tokens[:count], self._held_logprobs[:count]
        return Delivery(self.index, update, released.text)


def find_stops(sampling: SamplingParams, tokenizer: Tokenizer | None) -> StopStrings | None:
    """Returns the stop-string search for one choice, or None without stop strings.

    Raises ValueError without a tokenizer.
    """
    if not sampling.stop_strings:
        return None
    if tokenizer is None:
        raise ValueError("SamplingParams.stop needs a tokenizer; unset skip_tokenizer_init, or use stop_token_ids")
    return StopStrings(
        sampling.stop_strings,
        TextStream(tokenizer, skip_special_tokens=sampling.skip_special_tokens),
        include=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens or 0,
    )
