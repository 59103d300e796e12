"""Logits processors in the step loop: users' code that edits a request's logits before a token is sampled."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trtx.torch_engine.core.scheduled_step import Step
from trtx.torch_engine.core.sequence import Sequence, State
from trtx.torch_engine.step import LogitsEdit

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Hook = Callable[..., None]
SHOWN_CHARACTERS = 300
"""Maximum length of an exception's text in a message for the client."""


@dataclass(frozen=True, slots=True)
class LoadedProcessors:
    """A request's own logits processors, or why they can't be loaded."""

    hooks: tuple[Hook, ...] = ()
    problem: str | None = None


NO_PROCESSORS = LoadedProcessors()


def load_processors(pickled: bytes | None) -> LoadedProcessors:
    """Loads a request's processors, which may import modules: call it outside the step loop. Never raises."""
    if pickled is None:
        return NO_PROCESSORS
    try:
        return LoadedProcessors(tuple(pickle.loads(pickled)))
    except BaseException as error:  # users' code may raise anything, SystemExit included
        logger.error("logits processors of a request can't be loaded", exc_info=error)
        return LoadedProcessors(problem=f"logits_processor {unloadable(error)}")


def unloadable(error: BaseException) -> str:
    """The predicate of a sentence about processors that this process can't load."""
    return (
        f"can't be loaded in the engine's process: {_shown(error)}; define it in a module that this process can import "
        "(PYTHONPATH), or in the main script"
    )


class LogitsProcessors:
    """Calls the processors of a step's sequences.

    An exception ends only the request whose processor raised it. A batched processor ends all requests of its call,
    because it is unknown whose logits it had edited already.
    """

    def __init__(self, batched: Hook | None = None) -> None:
        """``batched``: the engine's ``batched_logits_processor``."""
        self._batched = batched

    def edit(self, step: Step) -> LogitsEdit | None:
        """Returns the function that edits the logits of ``step``; None if no processor is to be called.

        Sequences that have ended since the launch are left out.
        """
        sequences = {
            sequence.slot: sequence
            for sequence in step.sequences
            if sequence.is_processed
            and sequence.state is State.RUNNING
            and sequence.held is not None
            and sequence.held.samples
        }
        if not sequences:
            return None

        return partial(self._edit, sequences)

    def _edit(
        self, sequences: Mapping[int, Sequence], rows: Mapping[int, torch.Tensor], stream_ptr: int | None
    ) -> None:
        batch = []
        for slot, sequence in sequences.items():
            for hook in sequence.processors:
                try:
                    hook(sequence.sequence_id, rows[slot], _tokens(sequence), None, None)
                except BaseException as error:
                    _end(hook, [sequence], error)
                    break
            else:
                if sequence.sampling.applies_batched:
                    batch.append((slot, sequence))
        if batch and self._batched is not None:
            try:
                self._batched(
                    [sequence.sequence_id for _, sequence in batch],
                    [rows[slot] for slot, _ in batch],
                    [_tokens(sequence) for _, sequence in batch],
                    stream_ptr,
                    [None] * len(batch),
                )
            except BaseException as error:
                _end(self._batched, [sequence for _, sequence in batch], error)


def _tokens(sequence: Sequence) -> list[list[int]]:
    """Returns a new list for each call, because the processor may change it."""
    return [sequence.prompt_token_ids + sequence.output_token_ids]


def _end(hook: Hook, sequences: list[Sequence], error: BaseException) -> None:
    """Lets ``sequences`` end with ``error`` when the step is committed. Raises device errors, which end the engine."""
    if "CUDA error" in str(error):
        raise error
    name = getattr(hook, "__name__", type(hook).__name__)
    logger.warning("logits processor %s raised an exception", name, exc_info=error)
    for sequence in sequences:
        sequence.processor_problem = (
            f"logits processor {name} failed after {len(sequence.output_token_ids)} tokens: {_shown(error)}"
        )


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}"


def load_batched(pickled: bytes | None) -> Hook | None:
    """Loads the ``batched_logits_processor`` of an engine. Raises any exception that loading it raises."""
    if pickled is None:
        return None
    loaded: Hook = pickle.loads(pickled)
    return loaded
