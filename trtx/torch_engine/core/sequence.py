"""One sequence inside the engine: its request, its progress, and the slot and blocks that it holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from trtx.torch_engine.core.block_names import block_name, root_name
from trtx.torch_engine.core.grammar_matcher import GrammarProblem, TokenMatcher
from trtx.torch_engine.core.media import media_identity, rows_between
from trtx.torch_engine.core.sequence_stages import SequenceStages
from trtx.torch_engine.core.speculation.drafted import Drafted
from trtx.torch_engine.messages import Handoff, KvRetention, KvTransfer, Logprob, MediaSpan, Submit, Update
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT, Sampled, ScheduledSequence, StepEmbedding


class State(Enum):
    """[COMPILING ->] [FOLLOWING ->] WAITING -> [READING ->] RUNNING -> FINISHED.

    Preemption returns to WAITING; an abort ends it in any state.
    """

    COMPILING = "compiling"  # waits for its grammar; the scheduler does not know it yet
    FOLLOWING = "following"  # waits for the prompt that another choice computes; the scheduler does not know it yet
    WAITING = "waiting"  # holds no slot and no blocks
    READING = "reading"  # holds a slot and blocks that KV is being read into, from a peer or from host memory
    RUNNING = "running"  # holds a slot and blocks, and computes
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence's request and state.

    Positions ``[0, num_computed)`` have their KV in ``block_ids`` (except blocks before a window), or a step in flight
    writes it. ``num_tokens`` counts the prompt and output tokens that are known, or that a step in flight samples.

    These two numbers describe all progress. A sequence with ``num_tokens - num_computed == 1`` decodes; with more, it
    still has a part of its prompt to compute (or, after a preemption, of its past). Both grow when a step is launched;
    the step's commit adds the sampled token and raises ``num_written``. ``held`` is the runner's view of the sequence.
    """

    sequence_id: int
    arrival: int  # arrival number
    arrived_s: float  # clock: time.perf_counter
    prompt_token_ids: list[int]
    sampling: SamplingPlan
    end_ids: frozenset[int]
    max_tokens: int  # limited by the context
    most_tokens: int  # max_tokens plus the prompt's length
    seed: int
    priority: float = 0.5
    cache_salt: str | None = None
    handoff: Handoff | None = None
    media: list[MediaSpan] = field(default_factory=list)
    routing_token_ids: list[int] | None = None
    # Positions before this one are computed in prompt chunks, never as a decode: the first position, and all positions
    # up to the end of the last media item.
    chunked_until: int = 1

    state: State = State.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    num_written: int = 0  # leading positions whose KV is in block_ids and readable by all
    num_steps: int = 0  # steps in flight that include this sequence
    is_new_in_slot: bool = False
    block_ids: list[list[int]] = field(default_factory=list)  # one list for each KV cache group: core.kv_cache_groups
    num_left: list[int] = field(default_factory=list)  # for each group: leading entries already released
    room: int = 0  # positions that block_ids cover
    slot: int = -1
    held: ScheduledSequence | None = None
    block_names: list[bytes] = field(default_factory=list)  # of full blocks of known tokens; extended on demand
    num_registered: int = 0  # leading blocks that the pool knows by name
    num_reused: int = 0  # leading blocks found in the prefix cache at the last admission
    num_found: int = 0  # leading tokens that this admission did not compute: KV from the prefix cache or a peer
    is_resumed: bool = False  # was preempted before
    is_cancelled: bool = False  # cancelled while READING: ended for the client, but its blocks are still written to
    has_read: bool = False  # the peer's KV was read or is unavailable. Its lease has ended: never read again
    transfer: KvTransfer | None = None  # outcome of the read, until it is reported
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    first_gen_update: Update | None = None  # the prefill side's tokens; reported once the sequence is sure to go on
    stop_ids: frozenset[int] = frozenset()
    banned_ids: tuple[int, ...] = ()  # end and stop ids within the vocabulary; banned until min_tokens is reached
    min_tokens: int = 0
    matcher: TokenMatcher | None = None  # its place in its grammar; set before it waits
    processors: tuple[Callable[..., None], ...] = ()  # its own logits processors
    processor_problem: str = ""  # a logits processor has failed: why the sequence ends with its next commit
    follows: int | None = None  # id of the choice whose prompt it can share
    retention: KvRetention | None = None
    skips_host: bool = False  # KV in host memory did not come in time: it is computed
    embeddings: list[StepEmbedding | None] = field(default_factory=list)  # of ``media``; empty once no step needs them
    stages: SequenceStages = field(default_factory=SequenceStages)
    drafting: object | None = None  # what the source of drafts knows of it
    drafted: Drafted | None = None  # drafted tokens of the step in flight
    dropped: list[int] = field(default_factory=list)  # sampled by the last step after a wrong guess

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
            follows=submit.follows,
            retention=submit.retention,
        )

    @property
    def num_known(self) -> int:
        """Number of leading tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decode(self) -> bool:
        """True if one token is left to compute, and the next token is sampled from it."""
        return self.num_tokens - self.num_computed == 1 and self.num_computed >= self.chunked_until

    @property
    def is_complete(self) -> bool:
        """True if the last token is known or being sampled: no more launches, whatever that token is."""
        return self.num_tokens >= self.most_tokens

    @property
    def is_processed(self) -> bool:
        """Whether logits processors edit its logits."""
        return bool(self.processors) or self.sampling.applies_batched

    @property
    def is_context_only(self) -> bool:
        return self.handoff is not None and self.handoff.request_type == "context_only"

    @property
    def wants_read(self) -> bool:
        """True if the prompt's KV is still to be read from a peer.

        False after a preemption: the prompt is then recomputed.
        """
        return (
            self.handoff is not None
            and self.handoff.request_type == "generation_only"
            and self.handoff.opaque_state is not None
            and not self.has_read
        )

    @property
    def first_gen_tokens(self) -> list[int]:
        """Tokens that the prefill side sampled for a generation_only request, else []."""
        handoff = self.handoff
        if handoff is None or handoff.request_type != "generation_only":
            return []
        return handoff.first_gen_tokens or []

    @property
    def emits_first_gen_tokens(self) -> bool:
        """Whether the tokens that the prefill worker generated are still to be added to the output."""
        return bool(self.first_gen_tokens) and not self.output_token_ids

    def tokens(self, start: int, end: int) -> list[int]:
        """Returns the known tokens at positions ``[start, end)``."""
        prompt_length = len(self.prompt_token_ids)
        if end <= prompt_length:
            return self.prompt_token_ids[start:end]
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : end - prompt_length]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt_length]

    def names(self, count: int, tokens_per_block: int) -> list[bytes]:
        """Names of the first ``count`` full blocks. Returns the sequence's own list, which may be longer."""
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
        """Token ids at positions ``[start, end)`` as KV events report them.

        None: the range has media without routing ids.
        """
        if (routing := self.routing_token_ids) is not None:
            return routing[start:end] + self.tokens(max(start, len(routing)), max(end, len(routing)))
        if self.media and media_identity(self.media, start, end):
            return None
        return self.tokens(start, end)

    def hold(self, slot: int, block_ids: list[list[int]], num_left: list[int], room: int, num_computed: int) -> None:
        """Gives the sequence a slot and blocks at admission; the first ``num_computed`` tokens have their KV there."""
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
            is_guided=self.matcher is not None,
            is_processed=self.is_processed,
        )
        self.skip_media(num_computed)

    @property
    def held_blocks(self) -> list[list[int]]:
        """For each group: the blocks that the sequence still holds."""
        return [blocks[left:] for blocks, left in zip(self.block_ids, self.num_left, strict=True)]

    def skip_media(self, num_computed: int) -> None:
        """Drops the media embeddings once the KV of all media is computed, or a step in flight computes it."""
        if num_computed >= self.chunked_until:
            self.embeddings = []

    def launch(self, count: int, drafted: Drafted | None = None) -> ScheduledSequence:
        """Marks the next ``count`` tokens as in flight, and the drafted tokens after them.

        ``num_computed`` includes the drafted tokens until :func:`.speculation.accepting.accept_drafted` knows which are
        accepted. Returns the runner's view, which the next launch changes in place.
        """
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
        held.dropped_token_ids, self.dropped = self.dropped, []
        self.drafted, held.num_drafts = drafted, 0
        if drafted is not None:
            assert held.samples and self.num_known == end, "a draft continues known tokens"
            held.new_token_ids = held.new_token_ids + drafted.tokens
            held.num_drafts = len(drafted.tokens)
            end += held.num_drafts
        self.num_computed = end
        self.num_tokens += held.samples
        self.num_steps += 1
        return held

    def advance(self, sampled: Sampled, end: int) -> Update | None:
        """Applies a step that has written the KV up to position ``end``. Returns None if there is nothing to report."""
        start, self.num_written = self.num_written, end
        if sampled.prompt_logprobs is not None and not self.output_token_ids:
            # A preempted prompt is recomputed from its start: keep only logprobs that are new.
            self.prompt_logprobs += sampled.prompt_logprobs[len(self.prompt_logprobs) - start :]
        if self.matcher is not None and self.matcher.is_complete:
            return Update(self.sequence_id, [], finish_reason="stop", prompt_logprobs=self.prompt_logprobs or None)
        if sampled.token_id is None:
            return None
        is_first_output = not self.output_token_ids
        update = self.accept(sampled.token_id, sampled.logprobs)
        if is_first_output:
            update.reused_blocks = self.num_reused
            update.prompt_logprobs = self.prompt_logprobs or None
        return update

    def accept_first_gen_tokens(self) -> Update:
        """Appends the tokens that the prefill side sampled.

        Keeps the update in ``first_gen_update`` unless a token ends it.
        """
        assert self.handoff is not None
        logprobs = self.handoff.first_gen_log_probs if self.sampling.logprobs is not None else None
        whole = Update(self.sequence_id, [], logprobs=[] if logprobs else None)
        for index, token_id in enumerate(self.first_gen_tokens):
            self.num_tokens += 1
            update = self.accept(token_id, logprobs[index] if logprobs else None)
            whole.extend(update)
            if update.finish_reason is not None:
                break
        else:
            self.first_gen_update = whole
        return whole

    def accept(self, token_id: int, logprobs: dict[int, Logprob] | None) -> Update:
        """Appends one generated token, which ``num_tokens`` already counts.

        Returns the client's update with the finish reason, on which the caller acts. An end id stays in the client's
        tokens, as on TensorRT-LLM's pytorch backend; a stop token id stays only with ``include_stop_str_in_output``.
        Raises GrammarProblem for a token that the sequence's grammar excludes, or after which nothing may follow
        although ``min_tokens`` is not reached.
        """
        # False for a banned id that a prefill side with other parameters sampled.
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
        elif self.matcher is not None and self.matcher.accept(token_id):
            if len(self.output_token_ids) < self.min_tokens:
                raise GrammarProblem(self.matcher.too_short())
            update.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.max_tokens:
            update.finish_reason = "length"
        return update


def _chunked_until(submit: Submit) -> int:
    return max(1, submit.media[-1].start + submit.media[-1].length) if submit.media else 1
