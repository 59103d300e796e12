"""Finds errors in the log of Dynamo's frontend, which reports nowhere else that it can't load a registered model.

Seen with Dynamo 1.6.1: if the frontend can't read the chat template or the tokenizer, ``/v1/models/<name>/ready``
returns 404 as if there were no worker, while the frontend tries again and again.
"""

from __future__ import annotations

import json
import re

from trtx.launch.logs import Log

_NOT_ADDED = "Model materialization failed; "
_REFUSED = re.compile(rf'WARN \S+: {_NOT_ADDED}.*?error="(.*)"\s*$')
_ERROR = re.compile(r"\sERROR\s+\S+: (.*)$")
_LEASE_LOST = "Unable to maintain lease"
_ANSWERED = "http response sent"  # about a single response, including responses to the launcher


class FrontendLog:
    """Follows a frontend's log; :meth:`look` reads the new lines."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.refusal = ""  # why the frontend could not add the model, in its own words
        self.has_lost_lease = False  # with etcd: from then on it knows no workers, and it exits a minute later
        self.last_error = ""  # the last error that concerns more than one request

    def look(self) -> None:
        for line in self._log.new_lines():
            self.has_lost_lease |= _LEASE_LOST in line
            if line.startswith("{"):
                self._look_at_json(line)
                continue
            if found := _REFUSED.search(line):
                self.refusal = found.group(1).replace('\\"', '"')
            if (found := _ERROR.search(line)) and _ANSWERED not in line:
                self.last_error = found.group(1)

    def _look_at_json(self, line: str) -> None:
        """Reads a line of ``--log-format json``."""
        try:
            entry = json.loads(line)
            level, message = entry["level"], str(entry["message"])
        except (ValueError, LookupError, TypeError):
            return
        if level == "WARN" and message.startswith(_NOT_ADDED):
            self.refusal = str(entry.get("error", message))
        elif level == "ERROR" and _ANSWERED not in message:
            self.last_error = message
