"""The checks that refuse a new sequence, because of its request or of this engine's limits."""

from __future__ import annotations

from trtx.torch_engine.core.media import media_problem
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.media_positions import stretch
from trtx.torch_engine.messages import Logprob
from trtx.torch_engine.step import ModelRunner

MAX_PROMPT_LOGPROBS = 1 << 22
"""Limit for one request, over all tokens of its prompt: 0.8 GB of memory in this process, 80 MB on the socket."""


class Admission:
    """Knows what an engine can compute."""

    def __init__(
        self, runner: ModelRunner, limits: SchedulerLimits, *, max_seq_len: int, bound_by: str, has_transport: bool
    ) -> None:
        """``bound_by``: names the setting that limits sequences to ``max_seq_len`` tokens, for messages."""
        self._runner = runner
        self._limits = limits
        self._max_seq_len, self._bound_by = max_seq_len, bound_by
        self._has_transport = has_transport

    def problem(self, sequence: Sequence) -> str | None:
        """Returns why a new sequence can't be computed here, for the client; None if it can.

        Lowers ``max_tokens`` of a sequence with videos, so that all positions fit.
        """
        prompt, handoff = sequence.prompt_token_ids, sequence.handoff
        length = len(prompt)
        if not prompt:
            return "the prompt has no tokens; expected at least 1"
        if length >= self._max_seq_len:
            return (
                f"the prompt has {length} tokens; expected at most {self._max_seq_len - 1}, which with one generated "
                f"token is the longest sequence here ({self._max_seq_len}, bound by the {self._bound_by}); shorten it"
            )
        needs_grids = self._runner.needs_grids
        problem = media_problem(sequence.media, sequence.routing_token_ids, length, needs_grids=needs_grids)
        if problem is not None:
            return problem
        if needs_grids and (problem := _leave_room(sequence, self._max_seq_len)) is not None:
            return problem
        vocab_size = self._runner.vocab_size
        for name, tokens in (("the prompt has", prompt), ("first_gen_tokens have", sequence.first_gen_tokens)):
            if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
                outside = next(token for token in tokens if not 0 <= token < vocab_size)
                return f"{name} token id {outside}; expected 0 to {vocab_size - 1}, as the model has it"
        if (problem := _ban_problem(sequence, vocab_size)) is not None:
            return problem
        if sequence.sampling.grammar is not None and self._runner.masks is None:
            return (
                "the request asks for guided decoding, which is off; set guided_decoding_backend to llguidance in the "
                "engine config"
            )
        asked = sequence.sampling.prompt_logprobs
        if asked is not None and length * (asked + 1) > MAX_PROMPT_LOGPROBS:
            return (
                f"prompt_logprobs is {asked} for a prompt of {length} tokens; expected at most {MAX_PROMPT_LOGPROBS} "
                "entries in all; ask for fewer or shorten the prompt"
            )
        request_type = handoff.request_type if handoff is not None else None
        if (
            not self._limits.enable_chunked_prefill
            and length > self._limits.max_num_tokens
            and request_type != "generation_only"
        ):
            return (
                f"the prompt has {length} tokens; expected at most max_num_tokens, which is "
                f"{self._limits.max_num_tokens}, while enable_chunked_prefill is off; turn it on or shorten the prompt"
            )
        if request_type == "generation_only" and not (handoff and handoff.first_gen_tokens):
            return "a generation_only request has no first_gen_tokens; pass on the prefill side's disaggregated_params"
        logprobs = handoff.first_gen_log_probs if handoff is not None else None
        if logprobs and not _fit(logprobs, sequence.first_gen_tokens):
            return "first_gen_log_probs do not fit first_gen_tokens; pass on the prefill side's disaggregated_params"
        needs_transport = request_type == "context_only" or sequence.wants_read
        if needs_transport and not self._has_transport:
            return (
                f"a {request_type} request needs a KV transport, and this engine has none; "
                "set cache_transceiver_config: {backend: NIXL} in its engine config"
            )
        return None


def _fit(logprobs: list[dict[int, Logprob]], tokens: list[int]) -> bool:
    """True if there is one logprobs entry for each token, and each entry contains its token."""
    return len(logprobs) == len(tokens) and all(t in entry for t, entry in zip(tokens, logprobs, strict=True))


def _leave_room(sequence: Sequence, max_seq_len: int) -> str | None:
    """Lowers ``max_tokens`` for media with more positions than tokens, so that all positions fit ``max_seq_len``.

    Returns an error text if no room for an output token is left, else None.
    """
    length, more = len(sequence.prompt_token_ids), stretch(sequence.media)
    room = max_seq_len - length - more
    if room < 1:
        return (
            f"the prompt has {length} tokens, and a video in it plays {more} positions longer; "
            f"expected fewer than {max_seq_len} together, the longest sequence here; send a shorter video"
        )
    sequence.max_tokens = min(sequence.max_tokens, room)
    sequence.most_tokens = length + sequence.max_tokens
    return None


def _ban_problem(sequence: Sequence, vocab_size: int) -> str | None:
    """Returns why no token could be sampled first, or None.

    Only banned ids can cause that: all of the vocabulary is banned.
    """
    if len(sequence.banned_ids) < vocab_size:
        return None
    return (
        f"min_tokens is {sequence.min_tokens}, and end_id and stop_token_ids hold all {vocab_size} tokens of the "
        "model, so that none could be first; expected at least one token that ends nothing"
    )
