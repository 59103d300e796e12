"""``python3 -m trtx.checkpoint.fetch`` from as much of a hub as huggingface_hub asks of one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Handler, serving

pytestmark = pytest.mark.slow
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"weights", "notes.bin": b"not asked for"}
TOKEN = "hf_secret"


class _Hub(Handler):
    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, b"{}")
        if self.path.startswith(f"/api/models/someone/small/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in FILES]
            return self._answer(200, json.dumps({"id": "someone/small", "sha": COMMIT, "siblings": siblings}).encode())
        if self.path.startswith(f"/api/models/someone/small/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in FILES.items()
            ]
            return self._answer(200, json.dumps(tree).encode())
        name = self.path.removeprefix(f"/someone/small/resolve/{COMMIT}/")
        return self._answer(200 if name in FILES else 404, FILES.get(name, b"{}"))

    def _answer(self, code: int, body: bytes) -> None:
        digest = hashlib.sha1(body).hexdigest()
        self.answer(code, body, {"Content-Type": "application/json", "X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})


@pytest.fixture
def hub() -> Iterator[str]:
    _Hub.asked = []
    with serving(_Hub) as url:
        yield url


def fetched(hub: str, home: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-m", "trtx.checkpoint.fetch", "someone/small", "--revision", COMMIT, *words],
        env={**os.environ, **variables, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


def test_a_commit_of_the_hub_is_fetched_with_the_secrets_token(hub: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    described = fetched(hub, tmp_path / "home", "--directory", str(target), "--without-weights")
    assert described.returncode == 0, described.stderr
    assert names(target) == {"config.json", "tokenizer.json"}
    whole = fetched(hub, tmp_path / "home", "--directory", str(target))
    assert whole.returncode == 0, whole.stderr
    assert names(target) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not [path for path in _Hub.asked if "notes.bin" in path]


def test_a_wrong_token_is_one_sentence_without_it(hub: str, tmp_path: Path) -> None:
    done = fetched(hub, tmp_path / "home", "--directory", str(tmp_path / "model"), token="hf_wrong")
    assert done.returncode == 2
    assert "'someone/small' can't be fetched" in done.stderr
    assert "hf_wrong" not in done.stderr and done.stderr.count("\n") == 1


def test_of_the_weights_those_of_the_index_are_fetched_and_no_second_copy(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"a": parts[0], "b": parts[1]}}
    monkeypatch.delitem(FILES, "model.safetensors")
    monkeypatch.setitem(FILES, "model.safetensors.index.json", json.dumps(index).encode())
    for name in (*parts, "consolidated.safetensors", "adapter_model.safetensors"):
        monkeypatch.setitem(FILES, name, b"weights")
    target = tmp_path / "model"
    done = fetched(hub, tmp_path / "home", "--directory", str(target))
    assert done.returncode == 0, done.stderr
    assert names(target) == {"config.json", "tokenizer.json", "model.safetensors.index.json", *parts}
    assert not [path for path in _Hub.asked if "consolidated" in path or "adapter" in path]
