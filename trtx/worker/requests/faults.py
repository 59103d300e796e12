"""Maps a failure to one of Dynamo's errors.

The error determines the client's response, and whether the worker stays in routing. ``InvalidArgument`` is a 400 whose
text reaches the client. ``EngineShutdown`` takes this worker out of routing and migrates its requests to another one; a
faulty request would fail there too, so it is used for a dead engine only.

A refusal is a 400 with its message, because for an error with another status Dynamo 1.6.1's frontend shows only the
name of the status, such as "Forbidden". A 429 stays a 429, because the status tells clients to try again; behind a
prefill worker it is a 400 too. Anything else is a 500.
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
_TRY_AGAIN = 429


class EngineError(Exception):
    """Wraps ``error``, raised by the engine itself at submission or during an answer.

    Only these errors can mean that the engine is dead. The same exception class from the worker's own code says nothing
    about the engine.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EngineSteps:
    """Iterates over the steps of ``result``. Wraps the engine's exceptions in EngineError."""

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
    """Whether ``error`` arose only because a generator was closed after the client had disconnected.

    Clean-up outside an event loop raises "no running event loop" instead of GeneratorExit, so the exception's contexts
    are searched.
    """
    context: BaseException | None = error
    while context is not None:
        if isinstance(context, GeneratorExit):
            return True
        context = context.__context__
    return False


def fault_of(error: Exception, api: EngineApi) -> Fault:
    """Classifies ``error``. The worker's own refusals are faults of the request; the engine's API classifies the rest.

    Only an exception that the engine raised can be "fatal".
    """
    came_of_engine = isinstance(error, EngineError)
    error = _behind(error)
    if isinstance(error, (InvalidRequest, *_WITH_A_STATUS)):
        return "refused"
    fault = api.fault(error)
    return fault if came_of_engine or fault != "fatal" else "unexpected"


def as_dynamo_error(error: Exception, fault: Fault, role: Role) -> Exception:
    error = _behind(error)
    translated: Exception
    if isinstance(error, _WITH_A_STATUS) and error.status == _TRY_AGAIN and role != "prefill":
        translated = HttpError(error.status, str(error))
    elif fault == "fatal":
        translated = EngineShutdown(f"the engine died: {error}")
    elif fault == "refused":
        translated = InvalidArgument(str(error))
    else:
        translated = Unknown(str(error) if fault == "failed" else f"{type(error).__name__}: {error}")
    return translated


def _behind(error: Exception) -> Exception:
    """The exception wrapped in EngineError or NotMade (which several requests may share), else ``error`` itself."""
    if isinstance(error, EngineError):
        return error.error
    return error.error if isinstance(error, NotMade) and isinstance(error.error, Exception) else error
