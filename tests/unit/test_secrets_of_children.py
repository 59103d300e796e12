"""Processes that take what clients send are started without the secrets of whoever starts them."""

from __future__ import annotations

import ast

import psutil
import pytest
from source_trees import FILES, ROOT, nodes_of

from trtx.config.media import MediaLimits
from trtx.media.pool import PicturePool

pytestmark = pytest.mark.slow

ROOMS = ("launch", "media", "torch_engine", "worker", "frontend")
_WHOLE = ("dict(os.environ)", "{**os.environ", "os.environ.copy()", "env=os.environ")


async def test_a_decoder_of_images_has_no_secret_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_AUTH_PASSWORD", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    async with PicturePool(None, MediaLimits(decode_processes=1)) as pool:
        environment = psutil.Process(pool.pids[0]).environ()
    assert "PATH" in environment and "hunter2" not in environment.values()


def test_no_room_that_serves_hands_a_whole_environment_on() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ROOMS:
            text = ast.unparse(nodes_of(path)[0])
            handed = [one for one in _WHOLE if one in text]
            assert not handed, f"{path}: {handed[0]}; use without_secrets of trtx/config/secrets.py"
