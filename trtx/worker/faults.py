"""Which of Dynamo's errors a failure becomes: it decides what the client sees and whether the worker is shunned.

``InvalidArgument`` is a 400 whose text reaches the client. ``EngineShutdown`` takes this worker out of routing and
moves its requests to another one, which runs into the same fault if the request itself is at fault: it is for a dead
engine only. Anything else is a 500.
"""

from __future__ import annotations

from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown

from trtx.engine.api import EngineApi, Fault
from trtx.worker.request import InvalidRequest


def fault_of(error: Exception, api: EngineApi) -> Fault:
    """What the worker itself refuses is the request's own fault; of all else the engine says whose it is."""
    return "refused" if isinstance(error, InvalidRequest) else api.fault(error)


def as_dynamo_error(error: Exception, fault: Fault) -> DynamoException:
    if fault == "fatal":
        return EngineShutdown(f"the engine died: {error}")
    if fault == "refused":
        return InvalidArgument(str(error))
    return Unknown(str(error) if fault == "failed" else f"{type(error).__name__}: {error}")
