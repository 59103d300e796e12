"""As much of Kubernetes' API server as Dynamo's discovery asks of it, over plain HTTP: list and watch with a label, and
server-side apply. Whatever the given Role does not allow is a 403, as a real one answers."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from loopback import Handler

_PATH = re.compile(r"/apis/([^/]+)/([^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?")
_KINDS = {
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "dynamoworkermetadatas": ("nvidia.com/v1alpha1", "DynamoWorkerMetadata"),
}
Verb = tuple[str, str]  # of the API, and the resource


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # of a caller that was killed
            super().handle_error(request, client_address)


def allowed_by(rules: Sequence[Mapping[str, Any]]) -> set[Verb]:
    """What a Role allows."""
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


class KubernetesApi:
    """``allowed``: by account, whose name is its token. ``asked``: what was asked and allowed, by account; ``refused``:
    what was not."""

    def __init__(self, allowed: Mapping[str, set[Verb]]) -> None:
        self._allowed = allowed
        self.asked: dict[str, set[Verb]] = {account: set() for account in allowed}
        self.refused: set[tuple[str, str, str]] = set()
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}  # by resource and name
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []  # version, resource, type, object
        self._changed = threading.Condition()
        self._is_closed = False
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, resource: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a controller would write, or a caller applies."""
        with self._changed:
            known = self._objects.get((resource, name))
            version = len(self._events) + 1
            api_version, kind = _KINDS[resource]
            stored = {"apiVersion": api_version, "kind": kind, **body}
            stored["metadata"] = {
                **(body.get("metadata") or {}),
                "name": name,
                "resourceVersion": str(version),
                "uid": f"{resource}-{name}",
            }
            self._objects[resource, name] = stored
            self._events.append((version, resource, "MODIFIED" if known else "ADDED", stored))
            self._changed.notify_all()
            return stored

    def remove(self, resource: str, name: str) -> None:
        with self._changed:
            if stored := self._objects.pop((resource, name), None):
                self._events.append((len(self._events) + 1, resource, "DELETED", stored))
                self._changed.notify_all()

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        with self._changed:
            return self._objects.get((resource, name))

    def allows(self, account: str, verb: str, resource: str) -> bool:
        with self._changed:
            is_allowed = (verb, resource) in self._allowed.get(account, ())
            if is_allowed:
                self.asked[account].add((verb, resource))
            else:
                self.refused.add((account, verb, resource))
            return is_allowed

    def listed(self, resource: str, selector: Mapping[str, str]) -> dict[str, Any]:
        api_version, kind = _KINDS[resource]
        with self._changed:
            items = [one for (of, _), one in self._objects.items() if of == resource and _matches(one, selector)]
            version = str(len(self._events))
        metadata = {"resourceVersion": version}
        return {"apiVersion": api_version, "kind": f"{kind}List", "metadata": metadata, "items": items}

    def watched(self, resource: str, selector: Mapping[str, str], since: int) -> Iterator[dict[str, Any]]:
        """Until the server is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=since: self._is_closed or len(self._events) > seen)
                if self._is_closed:
                    return
                fresh, since = self._events[since:], len(self._events)
            for _, of, change, stored in fresh:
                if of == resource and _matches(stored, selector):
                    yield {"type": change, "object": stored}


def _matches(stored: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    labels = stored["metadata"].get("labels") or {}
    return all(labels.get(name) == value for name, value in selector.items())


def _handler_of(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Api(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found, query = self._asked()
            if found is None:
                return
            resource, name = found
            selector = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
            is_watch = query.get("watch") in ("true", "1")
            verb = "get" if name else "watch" if is_watch else "list"
            if not api.allows(self._account, verb, resource):
                self._refuse(verb, resource)
                return
            if name:
                stored = api.get(resource, name)
                self._answer(200 if stored else 404, stored or {"kind": "Status", "code": 404})
                return
            if not is_watch:
                self._answer(200, api.listed(resource, selector))
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in api.watched(resource, selector, int(query.get("resourceVersion") or 0)):
                    self.chunk(json.dumps(event).encode() + b"\n")
            except OSError:
                self.close_connection = True

        def do_PATCH(self) -> None:
            found, query = self._asked()
            if found is None or found[1] is None:
                return
            resource, name = found
            body = yaml.safe_load(self.body())
            assert self.headers["Content-Type"] == "application/apply-patch+yaml", self.headers["Content-Type"]
            assert query.get("fieldManager"), "server-side apply needs a field manager"
            verbs = ["patch"] if api.get(resource, name) else ["create", "patch"]
            if not all(api.allows(self._account, verb, resource) for verb in verbs):
                self._refuse("patch", resource)
            else:
                self._answer(200, api.put(resource, name, body))

        @property
        def _account(self) -> str:
            return str(self.headers.get("Authorization", "")).removeprefix("Bearer ")

        def _asked(self) -> tuple[tuple[str, Any] | None, dict[str, str]]:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            match = _PATH.fullmatch(parts.path)
            if match is None or match[4] not in _KINDS or f"{match[1]}/{match[2]}" != _KINDS[match[4]][0]:
                api.refused.add((self._account, self.command, parts.path))
                self._answer(404, {"kind": "Status", "status": "Failure", "code": 404})
                return None, query
            return (match[4], match[5]), query

        def _refuse(self, verb: str, resource: str) -> None:
            message = f"{resource} is forbidden: cannot {verb}"
            self._answer(
                403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": message, "code": 403}
            )

        def _answer(self, code: int, document: Mapping[str, Any]) -> None:
            with contextlib.suppress(ConnectionError):  # of a caller that was killed
                self.answer(code, document)

    return Api
