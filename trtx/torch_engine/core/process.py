"""The engine's process: ``python -m trtx.torch_engine.core.process <fd>``, started by ``EngineClient``.

It owns runner, pool and transport, and runs the step loop in its main thread. A second thread reads the socket; end of
file means that the parent is gone and ends this process at once, even in the middle of a step. A third thread sends the
loop's reports.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple

from trtx.errors import UsageError
from trtx.garbage import nothing_of_it_is_garbage
from trtx.ipc.child_messages import Progress, Shutdown
from trtx.torch_engine import kv_fault
from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.grammars import Grammars
from trtx.torch_engine.core.logits_processors import Hook, LoadedProcessors, load_batched, load_processors, unloadable
from trtx.torch_engine.core.reports import ReportSender
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.sleeping import Parking
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.embeddings.handle import EmbeddingGone, EmbeddingUnreachable
from trtx.torch_engine.handoff import KvTransport
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.messages import (
    Abort,
    DropEmbeddings,
    EmbeddingTaken,
    MemoryDone,
    PutEmbedding,
    Ready,
    ReleaseMemory,
    ResumeMemory,
    Start,
    StepReport,
    Submit,
    ToEngine,
    UpdateWeights,
)
from trtx.torch_engine.parent import die_with_parent, exits_after, read_parent
from trtx.torch_engine.step import ModelRunner, StepEmbedding

if TYPE_CHECKING:
    from trtx.torch_engine.handoff.ranked import KvRanks
    from trtx.torch_engine.ranks.leader import LeadingRunner
    from trtx.torch_engine.runner import RunnerArgs


class LoadedEmbedding(NamedTuple):
    """Result of a PutEmbedding: the embedding in the runner's memory, or the exception that prevented it."""

    key: bytes
    embedding: StepEmbedding | Exception

    @property
    def answer(self) -> EmbeddingTaken:
        if not isinstance(self.embedding, Exception):
            return EmbeddingTaken(self.key)
        is_failure = not isinstance(self.embedding, ValueError)
        lost: Literal["", "gone", "unreachable"] = ""
        if isinstance(self.embedding, EmbeddingGone):
            lost = "gone"
        elif isinstance(self.embedding, EmbeddingUnreachable):
            lost = "unreachable"
        return EmbeddingTaken(self.key, str(self.embedding), is_failure, lost)


class GrammarCompiled(NamedTuple):
    """Wakes the step loop: a grammar is compiled, or can't be."""


class ProcessedSubmit(NamedTuple):
    """A Submit whose logits processors are loaded."""

    submit: Submit
    processors: LoadedProcessors


Inbox = SimpleQueue[ToEngine | LoadedEmbedding | ProcessedSubmit | GrammarCompiled | Exception]
"""Messages in order of arrival. An Exception comes from the thread that sends reports, when sending has failed."""


def main() -> None:
    die_with_parent()
    channel: Channel[ToEngine] = Channel(socket.socket(fileno=int(sys.argv[1])), ToEngine)
    inbox: Inbox = SimpleQueue()
    built: Future[ModelRunner] = Future()
    take = partial(_take, inbox=inbox, built=built)
    threading.Thread(target=read_parent, args=(channel, take), name="engine-socket", daemon=True).start()
    with exits_after(channel):
        start = inbox.get()
        assert isinstance(start, Start), f"the first message is {type(start).__name__}"
        with nothing_of_it_is_garbage():
            core, parking = _build(start, channel, on_compiled=lambda: inbox.put(GrammarCompiled()))
            built.set_result(core.runner)
            gc.collect()
        reports = ReportSender(channel.send, inbox.put)
        try:
            _loop(core, parking, reports, inbox)
        finally:
            reports.close()
        core.close()


def _take(message: ToEngine, *, inbox: Inbox, built: Future[ModelRunner]) -> None:
    """Handles a message in the socket thread; loads embeddings and logits processors right here.

    The step loop then never waits for a file or an import, and an embedding is loaded before any request submitted
    after it. This thread sends nothing: if the parent blocks in a write while nothing reads the socket, both sides
    would wait forever.
    """
    if isinstance(message, PutEmbedding):
        inbox.put(_load(message, built.result()))
    elif isinstance(message, Submit) and message.processors is not None:
        inbox.put(ProcessedSubmit(message, load_processors(message.processors)))
    else:
        inbox.put(message)


def _load(message: PutEmbedding, runner: ModelRunner) -> LoadedEmbedding:
    """Loads an embedding. Any error is stored and fails only the sequences that need the embedding."""
    try:
        return LoadedEmbedding(message.key, runner.load_embedding(message.tensor))
    except (ValueError, EmbeddingGone, EmbeddingUnreachable) as error:
        return LoadedEmbedding(message.key, error)
    except Exception as error:
        traceback.print_exc()
        problem = RuntimeError(f"{type(error).__name__}: {str(error)[:500]}; the engine's log has the rest")
        return LoadedEmbedding(message.key, problem)


def _build(start: Start, channel: Channel[ToEngine], on_compiled: Callable[[], None]) -> tuple[EngineCore, Parking]:
    args = start.args
    sys.path += [path for path in start.import_path if path not in sys.path]
    batched = _batched_processor(start.batched_processor)
    channel.send(Progress(f"loading {args.model}"))
    runner, leader = _create_runner(args, channel)
    try:
        return _build_around(runner, leader, args, batched, channel, on_compiled)
    except UsageError:
        runner.close()  # ends the ranks, and removes their files
        raise


def _build_around(
    runner: ModelRunner,
    leader: LeadingRunner | None,
    args: LlmArgs,
    batched: Hook | None,
    channel: Channel[ToEngine],
    on_compiled: Callable[[], None],
) -> tuple[EngineCore, Parking]:
    def new_transport() -> KvTransport:
        return _new_transport(runner, leader.kv_ranks if leader is not None else None)

    transport = None
    if args.transport is not None:
        channel.send(Progress("registering the KV pool for handoff"))
        transport = new_transport()
    kv = args.kv_cache_config
    host_copies = None
    if kv.host_cache_size:
        total = kv.host_cache_size * args.tensor_parallel_size
        channel.send(Progress(f"allocating {total >> 20} MiB of host memory for the KV cache"))
        host_copies = _create_host_copies(kv.host_cache_size, runner, leader)
    spec = args.speculative_config
    core = EngineCore(
        runner,
        SchedulerLimits(
            args.max_batch_size,
            args.max_num_tokens,
            enable_chunked_prefill=args.enable_chunked_prefill,
            by_priority=args.scheduler_config.waiting_queue_policy == "priority",
            paced_steps=runner.paced_steps,
        ),
        max_seq_len=args.max_seq_len,
        enable_block_reuse=kv.enable_block_reuse,
        event_buffer_max_size=kv.event_buffer_max_size,
        enable_iter_perf_stats=args.enable_iter_perf_stats,
        disable_overlap_scheduler=args.disable_overlap_scheduler,
        transport=transport,
        kv_transfer_timeout_s=args.cache_transceiver_config.kv_transfer_timeout_ms / 1e3,
        grammars=_grammars(args, runner.vocab_size, on_compiled),
        batched_processor=batched,
        speculation=create_speculation(spec, runner, max_num_tokens=args.max_num_tokens) if spec is not None else None,
        host_copies=host_copies,
        secondary_offload_min_priority=kv.secondary_offload_min_priority,
    )
    channel.send(
        Ready(
            runner.num_blocks // len(runner.geometry.groups),
            runner.geometry.tokens_per_block,
            core.max_seq_len,
            core.scheduler.max_batch_size,
            runner.vocab_size,
            runner.device_memory_bytes(),
            runner.shared_weights,
        )
    )
    again = new_transport if transport is not None else None
    return core, Parking(core, can_sleep=args.sleep_config is not None, new_transport=again)


def _new_transport(runner: ModelRunner, kv_ranks: KvRanks | None) -> KvTransport:
    from trtx.torch_engine.handoff import create_transport, direct_offer
    from trtx.torch_engine.handoff.fault import FaultyTransport
    from trtx.torch_engine.handoff.ranked import RankedTransport

    # Every process of a topology gets its name in the environment: see trtx.topology.plan.
    own = create_transport(runner.pool, runner.geometry, group=os.environ.get("TRTX_TOPOLOGY"))
    if kv_ranks is not None:
        direct_offer(own)  # raises if other processes can't read the pool
    transport: KvTransport = RankedTransport(own, runner.geometry, kv_ranks)
    if (asked := os.environ.get(kv_fault.VARIABLE)) is not None:
        return FaultyTransport(transport, runner.pool, runner.geometry, kv_fault.parse_kv_fault(asked))
    return transport


def _batched_processor(pickled: bytes | None) -> Hook | None:
    """Loads ``batched_logits_processor``. Raises UsageError if this process can't."""
    try:
        return load_batched(pickled)
    except BaseException as error:  # users' code may raise anything
        raise UsageError(f"batched_logits_processor {unloadable(error)}") from error


def _grammars(args: LlmArgs, vocab_size: int, on_compiled: Callable[[], None]) -> Grammars | None:
    """Returns the compiler of grammars for guided decoding, or None if it is off.

    Raises UsageError for a tokenizer that can't be used for it.
    """
    if not args.guides:
        return None
    from trtx.torch_engine.core.grammars import load_vocabulary

    assert args.grammar_tokenizer is not None
    try:
        vocabulary = load_vocabulary(args.grammar_tokenizer, vocab_size=vocab_size, eos_ids=args.grammar_end_ids)
    except ValueError as error:
        raise UsageError(
            f"guided decoding can't use the tokenizer: {str(error)[:300]}; set guided_decoding_backend to null to go "
            "without"
        ) from error
    return Grammars(vocabulary, vocab_size=vocab_size, on_compiled=on_compiled)


def runner_args(args: LlmArgs) -> RunnerArgs:
    """Translates ``LlmArgs`` into the runner's arguments. Raises UsageError for a value that no runner supports."""
    from trtx.torch_engine.runner import DraftArgs, RunnerArgs

    kv, graphs, spec = args.kv_cache_config, args.cuda_graph_config, args.speculative_config
    draft = None
    if spec is not None and spec.draft_model is not None:
        draft = DraftArgs(spec.decoding_type, spec.draft_model, spec.eagle3_layers_to_capture)
    return RunnerArgs(
        model_dir=Path(args.model),
        dtype=args.dtype,
        tokens_per_block=kv.tokens_per_block,
        max_tokens=kv.max_tokens,
        free_gpu_memory_fraction=kv.free_gpu_memory_fraction,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=args.max_seq_len,
        kv_dtype=kv.dtype,
        cuda_graphs=graphs is not None,
        moe_expert_parallel_size=args.rank_sizes.expert_ranks,
        deterministic=args.deterministic,
        guided=args.guides,
        max_draft_len=spec.max_draft_len if spec is not None else 0,
        draft=draft,
        sleeps=args.sleep_config is not None,
        weight_group=args.weight_group,
        keeps_weights=args.sleep_config is None or args.sleep_config.keeps_weights,
        cuda_graph_batch_sizes=tuple(graphs.batch_sizes) if graphs is not None and graphs.batch_sizes else None,
    )


def _create_runner(args: LlmArgs, channel: Channel[ToEngine]) -> tuple[ModelRunner, LeadingRunner | None]:
    """Returns the runner, and the same one once more if it leads several ranks."""
    if args.tensor_parallel_size == 1:
        from trtx.torch_engine.runner import create_runner

        _check_host_memory(args)
        return create_runner(runner_args(args)), None
    from trtx.torch_engine.ranks.children import start_ranks

    ranks = start_ranks(args.tensor_parallel_size, partial(_end, channel))
    from trtx.torch_engine.ranks.leader import create_ranked_runner

    _check_host_memory(args)
    leader = create_ranked_runner(runner_args(args), ranks, hands_off=args.transport is not None)
    return leader, leader


def _create_host_copies(num_bytes: int, runner: ModelRunner, leader: LeadingRunner | None) -> BlockCopies:
    if leader is not None:
        return leader.create_host_copies(num_bytes)
    from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of

    return create_host_copies(pools_of(runner), num_bytes, len(runner.geometry.groups))


def _check_host_memory(args: LlmArgs) -> None:
    """Raises UsageError if this machine lacks the memory of the host tier."""
    if args.kv_cache_config.host_cache_size:
        from trtx.torch_engine.runner.host_copies import check_host_memory

        check_host_memory(args.kv_cache_config.host_cache_size, args.tensor_parallel_size)


def _end(channel: Channel[ToEngine], error: Exception) -> None:
    """Ends this process because another rank has ended: a collective would wait for that rank forever."""
    with exits_after(channel):
        raise error


def _loop(core: EngineCore, parking: Parking, reports: ReportSender, inbox: Inbox) -> None:
    """Steps while there is work, and sleeps on the inbox while there is none. Returns on ``Shutdown``."""

    def answer(message: StepReport | MemoryDone | None) -> None:
        if message is not None:
            reports.put(message)

    while True:
        wait_s = core.wait_s
        if wait_s is None:
            wait_s = parking.wait_s
        try:
            while True:
                message = inbox.get(timeout=wait_s) if wait_s != 0.0 else inbox.get_nowait()
                wait_s = 0.0
                if isinstance(message, Submit):
                    answer(parking.submit(message))
                elif isinstance(message, ProcessedSubmit):
                    answer(parking.submit(message.submit, message.processors))
                elif isinstance(message, Abort):
                    answer(parking.abort(message.sequence_ids))
                elif isinstance(message, LoadedEmbedding):
                    core.scheduler.media.put(message.key, message.embedding)
                    reports.put(message.answer)
                elif isinstance(message, DropEmbeddings):
                    core.scheduler.media.drop(message.keys)
                elif isinstance(message, (ReleaseMemory, ResumeMemory, UpdateWeights)):
                    parking.add(message)
                elif isinstance(message, Shutdown):
                    return
                elif isinstance(message, Exception):
                    raise message
        except Empty:
            pass
        answers = parking.act()
        report = core.step()
        answer(report)
        for done in answers:  # after the report, which has the KV events
            answer(done)


if __name__ == "__main__":
    main()
