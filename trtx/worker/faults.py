"""Which of Dynamo's errors a failure becomes: it decides what the client sees and whether the worker is shunned.

``InvalidArgument`` is a 400 whose text reaches the client. ``EngineShutdown`` takes this worker out of routing and
moves its requests to another one, which runs into the same fault if the request itself is at fault: it is for a dead
engine only. Anything else is a 500.
"""

from __future__ import annotations

from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown

from trtx.engine import EngineApi
from trtx.worker.request import InvalidRequest


def is_fatal(error: Exception, api: EngineApi) -> bool:
    """Whether an exception while serving means that the engine can't be trusted any more.

    TensorRT-LLM says RequestError for one request's fault; after any other exception its executor is shutting down or
    in a state that nobody knows, whatever its health call says (Dynamo's own backend ends its process too).
    """
    return not api.survives_errors and not isinstance(error, (InvalidRequest, api.RequestError))


def as_dynamo_error(error: Exception, api: EngineApi, *, engine_is_dead: bool) -> DynamoException:
    """What the client is at fault for is its 400: a refusal, unless the engine says that the request is in order."""
    if engine_is_dead:
        return EngineShutdown(f"the engine died: {error}")
    if api.RequestFailed is not None and isinstance(error, api.RequestFailed):
        return Unknown(str(error))
    if isinstance(error, (InvalidRequest, api.RequestError)):
        return InvalidArgument(str(error))
    return Unknown(f"{type(error).__name__}: {error}")
