"""Logits processors on the caller's side: which objects are accepted, and how they travel to the engine's process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import cloudpickle

from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.values import Unsuitable, shown

PARAMETERS = ("req_id", "logits", "token_ids", "stream_ptr", "client_id")
_EXPECTED = f"a callable with the parameters {', '.join(PARAMETERS)}, such as a LogitsProcessor, or a list of them"


def logits_processors(value: Any) -> Callable[..., None] | list[Callable[..., None]] | None:
    """Checks ``SamplingParams.logits_processor``: one processor or a list."""
    if value is None:
        return None
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(map(takes_parameters, given)):
        raise Unsuitable(_EXPECTED)
    return given if isinstance(value, (list, tuple)) else value


def takes_parameters(processor: Any) -> bool:
    """Whether ``processor`` can be called with as many arguments as TensorRT-LLM's processors, batched or not."""
    if not callable(processor):
        return False
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # written in C: unknown until it is called
        return True
    try:
        signature.bind(*PARAMETERS)
    except TypeError:
        return False
    return True


def pickled(name: str, value: Any) -> bytes:
    """Returns ``value`` in the form in which it travels to the engine's process.

    Classes and functions of the main script or of a notebook travel by value, all others by the name of their module.
    Raises RequestError for an object that can't be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise RequestError(
            f"{name} can't be sent to the engine's process: {type(error).__name__}: {str(error)[:300]}; leave "
            "open files, locks and threads out of it"
        ) from error
    return data


def pickled_batched(processor: Any) -> bytes | None:
    """Returns the argument ``batched_logits_processor`` of ``LLM`` for the engine's process. Raises ValueError."""
    if processor is None:
        return None
    if not takes_parameters(processor):
        raise ValueError(
            f"batched_logits_processor is {shown(processor)}; expected a callable with five parameters, such as a "
            "BatchedLogitsProcessor"
        )
    try:
        return pickled("batched_logits_processor", processor)
    except RequestError as error:
        raise ValueError(str(error)) from error
