"""The attached servers of ``trtx eval parity --url``, with their properties and capabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import httpx

from trtx.config.wording import with_list
from trtx.errors import NoVerdictError, UsageError
from trtx.evals.parity import Pass, Server, find_server, parity_directory
from trtx.experiment.bench.spec import Attach
from trtx.experiment.deployment import api_key, ask_context_length, ask_deployment
from trtx.experiment.parity.spec import ParitySpec
from trtx.report.parity import SERVERS, KnownServer, KnownServers
from trtx.runs.forms import Deployment
from trtx.tls import trust_of

PATIENCE_S = 5.0
_PAUSE_S = 0.5


def server_of(known: KnownServer) -> Server:
    """The server to send requests to. Raises UsageError if it needs an API key that is no longer available."""
    one = known.deployment
    return Server(one.url, one.model, api_key(one), known.takes_nvext, known.gives_prompt_logprobs)


def ask_deployments(spec: ParitySpec) -> dict[str, Deployment]:
    """The attached deployments by label. Raises UsageError if one doesn't answer, or if both are the same."""
    found = {label: _ask(attach, spec) for label, attach in spec.attached.items()}
    if len(found) == 2 and len({(one.url, one.model) for one in found.values()}) == 1:
        one = next(iter(found.values()))
        raise UsageError(
            f"--url and --against name the same model of the same server ({one.model} at {one.url}), so it would be "
            "compared with itself; name another server, or a model for trtx to serve"
        )
    return found


def _ask(attach: Attach, spec: ParitySpec) -> Deployment:
    """Queries a deployment. The reference server may know its only model under a different name from the compared
    server's.
    """
    try:
        return ask_deployment(attach)
    except UsageError:
        if attach is not spec.against or spec.attach is None or spec.attach.model is None:
            raise
        return ask_deployment(attach.model_copy(update={"model": spec.attach.model}))


def check_lengths_of(spec: ParitySpec, deployments: Mapping[str, Deployment]) -> None:
    """Raises UsageError if prompt and answer exceed the context length that a server reports."""
    asked = spec.isl + spec.osl
    for one in deployments.values():
        most = ask_context_length(one)
        if most is not None and asked > most:
            raise UsageError(
                f"--isl {spec.isl} and --osl {spec.osl} make {asked} tokens, but the context length of "
                f"{one.model} at {one.url} is {most}; lower them"
            )


def probe(deployments: Mapping[str, Deployment], ids: tuple[int, ...]) -> dict[str, KnownServer]:
    """Probes each server's capabilities with tokens from ``ids``. Raises UsageError for a server that can't be
    compared.
    """
    found = {}
    for label, one in deployments.items():
        server = find_server(one.url, one.model, api_key(one), ids)
        found[label] = KnownServer(one, server.takes_nvext, server.gives_prompt_logprobs)
    return found


def write_servers(run_dir: Path, servers: Mapping[str, KnownServer]) -> None:
    parity_directory(run_dir).mkdir(exist_ok=True)
    SERVERS.write(parity_directory(run_dir), KnownServers(dict(servers)))


def read_servers(run_dir: Path) -> dict[str, KnownServer]:
    """The servers of a run; empty if trtx served everything, or if the run ended before it wrote them."""
    found = SERVERS.find(parity_directory(run_dir), KnownServers)
    return {} if found is None else found.servers


def check_same(run_dir: Path, now: Mapping[str, Deployment]) -> None:
    """Raises UsageError if a server's published information has changed since its passes."""
    for label, known in read_servers(run_dir).items():
        before, after = known.deployment, now[label]
        differing = [
            f"{one.name} of --{label} was {getattr(before, one.name)} and is {getattr(after, one.name)}"
            for one in fields(Deployment)
            if getattr(before, one.name) != getattr(after, one.name)
        ]
        if differing:
            problem = f"{run_dir} can't be resumed, because its passes would not be comparable; start a new run"
            raise UsageError(with_list(problem, differing))


class ServerPresence:
    """Checks whether a server still exists after a request got no answer at all."""

    def __init__(self, deployment: Deployment, check: Callable[[], None]) -> None:
        self._deployment = deployment
        self._check = check
        self._told: str | None = None

    def look(self, now: Pass) -> None:
        """Raises NoVerdictError if the server no longer lists its models."""
        if now.unreached is None:
            return
        self._told, now.unreached = now.unreached, None
        key = api_key(self._deployment)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        deadline = time.monotonic() + PATIENCE_S
        trust = trust_of(self._deployment.url)
        with httpx.Client(timeout=PATIENCE_S, trust_env=False, headers=headers, verify=trust) as client:
            while not self._is_there(client):
                self._check()
                if time.monotonic() > deadline:
                    raise NoVerdictError(
                        f"{self._deployment.url} no longer answers ({self._told}); finished passes are kept, so "
                        "continue with --resume once the server is back"
                    )
                time.sleep(_PAUSE_S)

    def _is_there(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self._deployment.url}/v1/models").is_success
        except httpx.HTTPError:
            return False
