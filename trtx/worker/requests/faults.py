"""Which of Dynamo's errors a failure becomes: it decides what the client sees and whether the worker is shunned.

``InvalidArgument`` is a 400 whose text reaches the client. ``EngineShutdown`` takes this worker out of routing and
moves its requests to another one, which runs into the same fault if the request itself is at fault: it is for a dead
engine only. What says its own status, from 400 to 499, is answered with it and its sentence, but for 422, and behind a
prefill worker: of both the 1.4.2 frontend makes a 400 whose text is JSON around the sentence, so both are plain ones.
Anything else is a 500.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

from trtx.config.topology import Role
from trtx.engine.api import EngineApi, Fault, Result
from trtx.media import MediaError
from trtx.worker.multimodal.embedders import NoEncoder
from trtx.worker.multimodal.embedding_cache import NotMade
from trtx.worker.requests.invalid_request import InvalidRequest

_WITH_A_STATUS = (MediaError, NoEncoder)


class EngineError(Exception):
    """``error``, as the engine itself raised it when it was asked, or in the middle of an answer: what an engine's
    death is told by. Where the same class comes from the worker's own code, the engine is none the worse."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EngineSteps:
    """The steps of ``result``. Raises EngineError for what ends them."""

    def __init__(self, result: Result) -> None:
        self._steps: AsyncIterator[Any] = aiter(result)

    def __aiter__(self) -> EngineSteps:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._steps)
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise EngineError(error) from error


def is_of_closing(error: BaseException) -> bool:
    """Whether ``error`` came up while a generator, or who waited in it, was being closed: a request that nobody reads
    any more, and no failure. Cleaning up outside of a loop ends with "no running event loop" in place of
    GeneratorExit."""
    context: BaseException | None = error
    while context is not None:
        if isinstance(context, GeneratorExit):
            return True
        context = context.__context__
    return False


def fault_of(error: Exception, api: EngineApi) -> Fault:
    """What the worker itself refuses is the request's own fault; of all else the engine says whose it is. Fatal is what
    the engine raised, alone."""
    came_of_engine = isinstance(error, EngineError)
    error = _behind(error)
    if isinstance(error, (InvalidRequest, *_WITH_A_STATUS)):
        return "refused"
    fault = api.fault(error)
    return fault if came_of_engine or fault != "fatal" else "unexpected"


def as_dynamo_error(error: Exception, fault: Fault, role: Role) -> Exception:
    error = _behind(error)
    translated: Exception
    if isinstance(error, _WITH_A_STATUS) and error.status != 422 and role != "prefill":
        translated = HttpError(error.status, str(error))
    elif fault == "fatal":
        translated = EngineShutdown(f"the engine died: {error}")
    elif fault == "refused":
        translated = InvalidArgument(str(error))
    else:
        translated = Unknown(str(error) if fault == "failed" else f"{type(error).__name__}: {error}")
    return translated


def _behind(error: Exception) -> Exception:
    """What an engine raised, or what kept an embedding from being made, for several requests perhaps."""
    if isinstance(error, EngineError):
        return error.error
    return error.error if isinstance(error, NotMade) and isinstance(error.error, Exception) else error
