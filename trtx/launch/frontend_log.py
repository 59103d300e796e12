"""What Dynamo's frontend says in its log and nowhere else: that it can't make a model of what a worker registered.

Seen with Dynamo 1.4.2: with a chat template or a tokenizer that it can't read, ``/v1/models/<name>/ready`` is 404 as
if no worker were there, and the frontend does not try again until one registers anew.
"""

from __future__ import annotations

import re

from trtx.launch.logs import Log

_REFUSED = re.compile(r'ERROR \S+: Error adding model from discovery .*?error="(.*)"\s*$')
_ERROR = re.compile(r"\sERROR\s+\S+: (.*)$")
_LEASE_LOST = "Unable to maintain lease"
_ANSWERED = "http response sent"  # about one answer to somebody, the launcher included


class FrontendLog:
    """Reads on in a frontend's log at every look."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.refusal = ""  # why it could not add the model, in its own words
        self.has_lost_lease = False  # over etcd: it knows no worker from then on, and ends a minute later
        self.last_error = ""  # the last that is about more than one request

    def look(self) -> None:
        for line in self._log.new_lines():
            if found := _REFUSED.search(line):
                self.refusal = found.group(1).replace('\\"', '"')
            self.has_lost_lease |= _LEASE_LOST in line
            if (found := _ERROR.search(line)) and _ANSWERED not in line:
                self.last_error = found.group(1)
