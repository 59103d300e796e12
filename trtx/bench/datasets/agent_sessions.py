"""Reads agent sessions in aiperf's form ``weka_trace``: a JSON file for each session, or a directory of such files.

A session lists the length and time of each request, and the blocks of its prompt that an earlier request had. It has no
text: aiperf 0.13.0 generates the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trtx.config.wording import quoted
from trtx.errors import UsageError

AGENT_SESSIONS = "weka_trace"


@dataclass(frozen=True, slots=True)
class AgentSessions:
    """The sessions of a file or directory. ``most``: the request with the most tokens, and their number."""

    sessions: int
    requests: int
    shortest: int
    longest: int
    most: tuple[str, int]

    @property
    def lengths(self) -> str:
        return f"{self.shortest} to {self.longest}" if self.shortest != self.longest else f"{self.longest}"


def read_sessions(path: Path) -> AgentSessions:
    """Reads and checks every session. Raises UsageError, which names the file and the field. Imports aiperf."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"input_file {quoted(str(path))} has no session; expected files whose names end in .json")
    most, lengths, seen = ("", 0), [], dict[str, Path]()
    for file in files:
        session = _read(file)
        if (other := seen.setdefault(session.id, file)) is not file:
            _refuse(file, f"its id is {quoted(session.id)}, which is the id of {other.name} too; give each its own")
        for where, request in _requests(session):
            lengths.append(request.output_length)
            tokens = request.input_length + request.output_length
            if request.input_length < 0 or request.output_length < 0:
                _refuse(file, f"{where} has a negative in or out; expected lengths in tokens")
            if tokens > most[1]:
                most = (f"{file.name}, {where}", tokens)
    return AgentSessions(len(files), len(lengths), min(lengths), max(lengths), most)


def _read(file: Path) -> Any:
    from aiperf.dataset.loader.weka_trace_models import WekaTrace
    from pydantic import ValidationError

    if file.suffix != ".json":
        _refuse(file, "its name doesn't end in .json, and aiperf reads only such files; rename it")
    try:
        session = WekaTrace.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        _refuse(file, f"{place}: {first['msg']}; expected a session of aiperf's weka_trace")
    except (ValueError, RecursionError) as error:
        _refuse(file, f"it is not JSON in UTF-8 ({error}); expected one session")
    if not any(_requests(session)):
        _refuse(file, "it has no request; leave it out")
    return session


def _requests(session: Any) -> Iterator[tuple[str, Any]]:
    for number, request in enumerate(session.requests):
        inner = getattr(request, "requests", None)
        if inner is None:
            yield f"requests[{number}]", request
        else:
            yield from ((f"requests[{number}].requests[{at}]", one) for at, one in enumerate(inner))


def _refuse(file: Path, problem: str) -> NoReturn:
    raise UsageError(f"input_file {quoted(str(file))}: {problem}")
