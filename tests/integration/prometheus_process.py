"""Prometheus and promtool of the distribution, with exported files."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import free_port, until
from services import needs

_PACKAGE = "prometheus"


def run_promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = needs("promtool", _PACKAGE)
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def api(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        body = answer.json()
        assert body["status"] == "success", f"{path} {parameters}: {body.get('error')}"
        return body["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.api("query", query=query)["result"]
        return found

    def health(self) -> dict[str, str]:
        """The health of each target, by the label ``name``."""
        return {one["labels"]["name"]: one["health"] for one in self.api("targets", state="active")["activeTargets"]}

    def alerts(self) -> dict[tuple[str, str], str]:
        """(Alert, label ``name``) -> its state."""
        return {
            (one["labels"]["alertname"], one["labels"].get("name", "")): one["state"]
            for one in self.api("alerts")["alerts"]
        }


@contextlib.contextmanager
def running_prometheus(exported: Path, data: Path) -> Iterator[Prometheus]:
    """Prometheus with the configuration in directory ``exported``, until the block is left."""
    program, port = needs("prometheus", _PACKAGE), free_port()
    with (data.parent / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={exported / 'prometheus.yml'}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")

        def is_ready() -> bool:
            assert process.poll() is None, (data.parent / "prometheus.log").read_text()
            with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
                return httpx.get(f"{running.url}/-/ready", timeout=1).status_code == 200
            return False

        until("Prometheus is ready", is_ready)
        yield running
    finally:
        process.terminate()
        process.wait(20)
