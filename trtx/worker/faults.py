"""Which of Dynamo's errors a failure becomes: it decides what the client sees and whether the worker is shunned.

``InvalidArgument`` is a 400 whose text reaches the client. ``EngineShutdown`` takes this worker out of routing and
moves its requests to another one, which runs into the same fault if the request itself is at fault: it is for a dead
engine only. What says its own status, from 400 to 499, is answered with it and its sentence, but for 422, and behind a
prefill worker: of both the 1.4.2 frontend makes a 400 whose text is JSON around the sentence, so both are plain ones.
Anything else is a 500.
"""

from __future__ import annotations

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown

from trtx.config.topology import Role
from trtx.engine.api import EngineApi, Fault
from trtx.media import MediaError
from trtx.worker.embedders import NoEncoder
from trtx.worker.embedding_cache import NotMade
from trtx.worker.request import InvalidRequest

_WITH_A_STATUS = (MediaError, NoEncoder)


def fault_of(error: Exception, api: EngineApi) -> Fault:
    """What the worker itself refuses is the request's own fault; of all else the engine says whose it is."""
    error = _behind(error)
    return "refused" if isinstance(error, (InvalidRequest, *_WITH_A_STATUS)) else api.fault(error)


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
    """What kept an embedding from being made, for several requests perhaps."""
    return error.error if isinstance(error, NotMade) and isinstance(error.error, Exception) else error
