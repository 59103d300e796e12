"""One sequence inside the engine: what was asked, how far it got, what it holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from trtx.torch_engine.core.block_pool import block_name, root_name
from trtx.torch_engine.core.media import media_identity, rows_between
from trtx.torch_engine.media_positions import stretch
from trtx.torch_engine.messages import Handoff, KvTransfer, Logprob, MediaSpan, Submit, Update
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT, Embedding, Sampled, ScheduledSequence


class State(Enum):
    """WAITING -> [READING ->] RUNNING -> FINISHED; preemption goes back to WAITING, abort ends at any point."""

    WAITING = "waiting"  # holds nothing
    READING = "reading"  # holds a slot and blocks that a peer's KV is being read into
    RUNNING = "running"  # holds a slot and blocks, and is computed
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Positions ``[0, num_computed)`` have their KV in ``block_ids``, as far as anybody still sees it, or get it from a
    step under way; ``num_tokens`` are known (prompt and output), or are being sampled by such a step.

    Two numbers say everything about progress: a sequence whose ``num_tokens - num_computed`` is 1 decodes, one with
    more has a prompt (or, resumed after preemption, its past) to compute. Both grow when a step is launched; its end
    brings the token and ``num_written``. ``held`` is what the runner sees of it.
    """

    sequence_id: int
    arrival: int  # its place in the order of arrival
    arrived_s: float  # on the clock of time.perf_counter
    prompt_token_ids: list[int]
    sampling: SamplingPlan
    end_ids: frozenset[int]
    max_tokens: int  # clamped to the context
    most_tokens: int  # with those of the prompt
    seed: int
    priority: float = 0.5
    cache_salt: str | None = None
    handoff: Handoff | None = None
    media: list[MediaSpan] = field(default_factory=list)
    routing_token_ids: list[int] | None = None
    # Positions before it are computed in prompt chunks, never as a decode: the first one, all before the end of the
    # last media, and with a video all of the prompt: text behind one may have other positions than what is generated.
    chunked_until: int = 1

    state: State = State.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    num_written: int = 0  # leading positions whose KV is in block_ids, for everybody to use
    num_steps: int = 0  # launched with this sequence in them, and not committed
    is_new_in_slot: bool = False
    block_ids: list[list[int]] = field(default_factory=list)  # one list a layer group: core.layer_groups
    num_left: list[int] = field(default_factory=list)  # of each of them: leading entries that it does not hold any more
    room: int = 0  # positions that block_ids are for
    slot: int = -1
    held: ScheduledSequence | None = None
    block_names: list[bytes] = field(default_factory=list)  # of full blocks of known tokens, extended on demand
    num_registered: int = 0  # leading blocks that the pool knows by name
    num_reused: int = 0  # leading blocks found in the prefix cache at the last admission
    num_found: int = 0  # leading tokens whose KV nobody computed since: from the prefix cache, or its peer's
    is_resumed: bool = False  # was preempted before
    is_cancelled: bool = False  # while READING: ended for the client, its blocks still belong to the transport
    has_read: bool = False  # its peer's KV was read, or is not to be had. The lease has ended: never read it again
    transfer: KvTransfer | None = None  # what became of that, until the caller was told
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    first_gen_update: Update | None = None  # the prefill side's tokens, told to the client once they are sure to go on
    stop_ids: frozenset[int] = frozenset()
    banned_ids: tuple[int, ...] = ()  # what would end it, as far as the model has it: not before min_tokens
    min_tokens: int = 0
    embeddings: list[Embedding | None] = field(default_factory=list)  # of ``media``; empty once no step needs them more

    @classmethod
    def from_submit(
        cls, submit: Submit, *, arrival: int, arrived_s: float, max_seq_len: int, vocab_size: int
    ) -> Sequence:
        sampling = submit.sampling
        prompt = submit.prompt_token_ids
        handoff = submit.handoff
        context_only = handoff is not None and handoff.request_type == "context_only"
        end_ids, stop_ids = frozenset(sampling.end_ids), frozenset(sampling.stop_ids)
        ends = end_ids | stop_ids if sampling.min_tokens else ()
        max_tokens = 1 if context_only else min(sampling.max_tokens, max_seq_len - len(prompt))
        return cls(
            sequence_id=submit.sequence_id,
            arrival=arrival,
            arrived_s=arrived_s,
            prompt_token_ids=prompt,
            sampling=sampling,
            end_ids=end_ids,
            max_tokens=max_tokens,
            most_tokens=len(prompt) + max_tokens,
            seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            handoff=handoff,
            media=submit.media,
            routing_token_ids=submit.routing_token_ids,
            chunked_until=_chunked_until(submit),
            num_tokens=len(prompt),
            stop_ids=stop_ids,
            banned_ids=tuple(sorted(token_id for token_id in ends if 0 <= token_id < vocab_size)),
            min_tokens=sampling.min_tokens,
        )

    def leave_room(self, max_seq_len: int) -> str | None:
        """For positions of media beyond their tokens, so that none is past ``max_seq_len``. What is wrong where no room
        for a token is left; None: there is."""
        more = stretch(self.media)
        room = max_seq_len - len(self.prompt_token_ids) - more
        if room < 1:
            return (
                f"the prompt has {len(self.prompt_token_ids)} tokens, and a video in it plays {more} positions longer; "
                f"expected fewer than {max_seq_len} together, the longest sequence here; send a shorter video"
            )
        self.max_tokens = min(self.max_tokens, room)
        self.most_tokens = len(self.prompt_token_ids) + self.max_tokens
        return None

    def ban_problem(self, vocab_size: int) -> str | None:
        """Why no token could be first; None where one can. Beside what is banned, which it has to name."""
        if len(self.banned_ids) < vocab_size:
            return None
        return (
            f"min_tokens is {self.min_tokens}, and end_id and stop_token_ids hold all {vocab_size} tokens of the "
            "model, so that none could be first; expected at least one token that ends nothing"
        )

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decode(self) -> bool:
        """One token is left to compute, and the next one follows from it."""
        return self.num_tokens - self.num_computed == 1 and self.num_computed >= self.chunked_until

    @property
    def is_complete(self) -> bool:
        """Its last token is there or being sampled: there is nothing left to launch, whatever that token is."""
        return self.num_tokens >= self.most_tokens

    @property
    def is_context_only(self) -> bool:
        return self.handoff is not None and self.handoff.request_type == "context_only"

    @property
    def wants_read(self) -> bool:
        """Its prompt's KV is to be read from a peer. One that was preempted after that computes its prompt here."""
        return (
            self.handoff is not None
            and self.handoff.request_type == "generation_only"
            and self.handoff.opaque_state is not None
            and not self.has_read
        )

    @property
    def first_gen_tokens(self) -> list[int]:
        """What the prefill side sampled of a generation_only request."""
        handoff = self.handoff
        if handoff is None or handoff.request_type != "generation_only":
            return []
        return handoff.first_gen_tokens or []

    @property
    def emits_first_gen_tokens(self) -> bool:
        """The prefill side's first tokens were not taken over yet."""
        return bool(self.first_gen_tokens) and not self.output_token_ids

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens at positions ``[start, end)``."""
        prompt_length = len(self.prompt_token_ids)
        if end <= prompt_length:
            return self.prompt_token_ids[start:end]
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : end - prompt_length]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt_length]

    def names(self, count: int, tokens_per_block: int) -> list[bytes]:
        """Names of the first ``count`` full blocks; the list is the sequence's own, maybe longer."""
        known = self.block_names
        parent = known[-1] if known else root_name(self.cache_salt)
        for index in range(len(known), count):
            start = index * tokens_per_block
            end = start + tokens_per_block
            media = media_identity(self.media, start, end) if self.media else b""
            parent = block_name(parent, self.tokens(start, end), media)
            known.append(parent)
        return known

    def event_tokens(self, start: int, end: int) -> list[int] | None:
        """Positions ``[start, end)`` as a router knows them. None: media lies there, for which nobody gave ids."""
        if (routing := self.routing_token_ids) is not None:
            return routing[start:end] + self.tokens(max(start, len(routing)), max(end, len(routing)))
        if self.media and media_identity(self.media, start, end):
            return None
        return self.tokens(start, end)

    def hold(self, slot: int, block_ids: list[list[int]], num_left: list[int], room: int, num_computed: int) -> None:
        """Admission: the sequence now owns a slot and blocks, the first ``num_computed`` tokens' KV among them."""
        self.slot = slot
        self.block_ids, self.num_left, self.room = block_ids, num_left, room
        self.num_computed = self.num_written = self.num_found = num_computed
        self.is_new_in_slot = True
        self.held = ScheduledSequence(
            slot=slot,
            is_first=True,
            new_token_ids=[],
            start=0,
            block_ids=block_ids,
            samples=False,
            sampling=self.sampling,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            seed=self.seed,
            media=self.media,
        )
        self.skip_media(num_computed)

    @property
    def held_blocks(self) -> list[list[int]]:
        """Of each group those of ``block_ids`` that it holds."""
        return [blocks[left:] for blocks, left in zip(self.block_ids, self.num_left, strict=True)]

    def skip_media(self, num_computed: int) -> None:
        """Lets go of the embeddings once the KV of all media is there, or in a step under way."""
        if num_computed >= self.chunked_until:
            self.embeddings = []

    def launch(self, count: int) -> ScheduledSequence:
        """A step computes the next ``count`` tokens: the runner's view of that. Changed in place by the next launch."""
        held = self.held
        assert held is not None
        held.is_first, self.is_new_in_slot = self.is_new_in_slot, False
        start = held.start = self.num_computed
        end = start + count
        held.samples = end == self.num_tokens
        prompt, output = self.prompt_token_ids, self.output_token_ids
        if count == 1 and held.samples and start >= len(prompt):
            held.new_token_ids = [output[-1] if start < len(prompt) + len(output) else FROM_SLOT]
        else:
            held.new_token_ids = self.tokens(start, end)
        if self.media:
            held.embeddings = rows_between(self.media, self.embeddings, start, end)
            self.skip_media(end)
        if self.min_tokens:
            held.banned_ids = () if self.num_tokens - len(prompt) >= self.min_tokens else self.banned_ids
        self.num_computed = end
        self.num_tokens += held.samples
        self.num_steps += 1
        return held

    def advance(self, sampled: Sampled, end: int) -> Update | None:
        """A step has written the KV before position ``end``. None for a prompt chunk that says nothing yet."""
        start, self.num_written = self.num_written, end
        if sampled.prompt_logprobs is not None and not self.output_token_ids:
            # A preempted prompt is computed again from its start: only what is new counts.
            self.prompt_logprobs += sampled.prompt_logprobs[len(self.prompt_logprobs) - start :]
        if sampled.token_id is None:
            return None
        is_first_output = not self.output_token_ids
        update = self.accept(sampled.token_id, sampled.logprobs)
        if is_first_output:
            update.reused_blocks = self.num_reused
            update.prompt_logprobs = self.prompt_logprobs or None
        return update

    def accept_first_gen_tokens(self) -> Update:
        """Takes over the tokens that the prefill side sampled. Kept in ``first_gen_update`` unless they end it."""
        assert self.handoff is not None
        logprobs = self.handoff.first_gen_log_probs if self.sampling.logprobs is not None else None
        whole = Update(self.sequence_id, [], logprobs=[] if logprobs else None)
        for index, token_id in enumerate(self.first_gen_tokens):
            self.num_tokens += 1
            update = self.accept(token_id, logprobs[index] if logprobs else None)
            whole.token_ids += update.token_ids
            if whole.logprobs is not None:
                whole.logprobs += update.logprobs or []
            whole.finish_reason, whole.stop_reason = update.finish_reason, update.stop_reason
            if update.finish_reason is not None:
                break
        else:
            self.first_gen_update = whole
        return whole

    def accept(self, token_id: int, logprobs: dict[int, Logprob] | None) -> Update:
        """Appends one generated token, which ``num_tokens`` counts already, decides whether it ends the sequence, and
        says what the client sees of it.

        An end id stays in the client's tokens, as on TensorRT-LLM's pytorch backend; a stop token id only if
        ``include_stop_str_in_output``. The caller acts on ``finish_reason``.
        """
        # False for a banned id where a prefill side with other parameters sampled it.
        may_end = len(self.output_token_ids) >= self.min_tokens
        self.output_token_ids.append(token_id)
        update = Update(self.sequence_id, [token_id])
        if logprobs is not None:
            update.logprobs = [logprobs]
        if may_end and token_id in self.end_ids:
            update.finish_reason = "stop"
        elif may_end and token_id in self.stop_ids:
            update.finish_reason, update.stop_reason = "stop", token_id
            if not self.sampling.keeps_stop_id:
                update.token_ids = []
                update.logprobs = None
        elif len(self.output_token_ids) >= self.max_tokens:
            update.finish_reason = "length"
        return update


def _chunked_until(submit: Submit) -> int:
    return max(1, submit.media[-1].start + submit.media[-1].length) if submit.media else 1
