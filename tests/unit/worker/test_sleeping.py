"""A worker's memory controls: out of routing first, back in routing last, and back at once after a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trtx.engine.api import Engine
from trtx.engine.worker_status import WorkerStatus
from trtx.worker import sleeping
from trtx.worker.sleeping import Sleeping
from trtx.worker.status import StatusFile


class Scene:
    """A worker between an engine, Dynamo's endpoint and the launcher's status file; ``happened`` is their history."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sleeping, "GONE_SECONDS", 0.0)
        self.happened: list[str] = []
        self.unfinished = ""
        self.engine_error = self.endpoint_error = ""
        self.parked: list[str] = []
        self.worker = Sleeping("agg-0", self.engine(), self.status(), lambda: self.unfinished)
        self.worker.endpoint = self.endpoint()

    def note(self, what: str, error: str = "") -> None:
        if error:
            raise RuntimeError(error)
        self.happened.append(what)

    def engine(self) -> Engine:
        scene = self

        class Parked(Engine):
            async def release(self, tags: Sequence[str] | None, timeout_s: float) -> None:
                scene.note("release", scene.engine_error)
                scene.parked = list(tags or ["kv_cache", "model_weights"])

            async def resume(self, tags: Sequence[str] | None) -> None:
                scene.note("resume", scene.engine_error)
                scene.parked = [tag for tag in scene.parked if tags is not None and tag not in tags]

            async def update_weights(self, model: str, timeout_s: float) -> None:
                scene.note(f"update {model}", scene.engine_error)

            def parked_tags(self) -> Sequence[str]:
                return scene.parked

        return Parked()  # type: ignore[abstract]

    def endpoint(self) -> Any:
        scene = self

        class Endpoint:
            async def unregister_endpoint_instance(self) -> None:
                scene.note("leave", scene.endpoint_error)

            async def register_endpoint_instance(self) -> None:
                scene.note("join", scene.endpoint_error)

        return Endpoint()

    def status(self) -> StatusFile:
        scene = self

        class Noted(StatusFile):
            def update(self, **changes: Any) -> None:
                super().update(**changes)
                if "state" in changes:
                    scene.happened.append(changes["state"])

        return Noted(None)

    async def ask(self, control: str, **body: Any) -> tuple[str, list[str]]:
        """Returns (error or "", what happened)."""
        self.happened.clear()
        answer = await self.worker.control(control, body)
        return answer.get("message", ""), list(self.happened)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_it_leaves_routing_before_its_memory_goes_and_joins_once_all_of_it_is_back(scene: Scene) -> None:
    assert await scene.ask("release") == ("", ["asleep", "leave", "release"])
    assert scene.worker.is_closed
    assert await scene.ask("resume", tags=["model_weights"]) == ("", ["resume"])
    assert scene.worker.is_closed
    assert await scene.ask("resume", tags=["kv_cache"]) == ("", ["resume", "join", "serving"])
    assert not scene.worker.is_closed


async def test_work_that_does_not_end_in_time_is_named_and_the_worker_is_back_in_routing(scene: Scene) -> None:
    scene.unfinished = "it has 1 unread handoff"
    error, happened = await scene.ask("release", timeout_s=0.0)
    assert error == "agg-0: it has 1 unread handoff after 0 s, so nothing was done; try again, or allow more time"
    assert happened == ["asleep", "leave", "join", "serving"]
    assert not scene.worker.is_closed


@pytest.mark.parametrize("control", ["release", "update_weights"])
async def test_a_refusal_of_the_engine_is_passed_on_and_the_worker_is_back_in_routing(
    scene: Scene, control: str
) -> None:
    scene.engine_error = "no"
    error, happened = await scene.ask(control, model="/m")
    assert (error, happened) == ("agg-0: no", ["asleep", "leave", "join", "serving"])
    assert not scene.worker.is_closed


async def test_new_weights_come_out_of_routing_and_leave_a_sleeping_worker_asleep(scene: Scene) -> None:
    assert await scene.ask("update_weights", model="/m") == ("", ["asleep", "leave", "update /m", "join", "serving"])
    await scene.ask("release", tags=["kv_cache"])
    assert await scene.ask("update_weights", model="/m") == ("", ["update /m"])
    assert scene.worker.is_closed


async def test_a_worker_that_can_not_leave_or_join_routing_says_so_and_can_be_asked_again(scene: Scene) -> None:
    scene.endpoint_error = "discovery is gone"
    error, happened = await scene.ask("release")
    assert "can't leave routing (discovery is gone)" in error and happened == ["asleep", "serving"]
    scene.endpoint_error = ""
    await scene.ask("release")
    scene.endpoint_error = "discovery is gone"
    error, happened = await scene.ask("resume")
    assert "can't come back into routing (discovery is gone); wake it again" in error and happened == ["resume"]
    scene.endpoint_error = ""
    assert await scene.ask("resume") == ("", ["join", "serving"])


async def test_a_body_that_is_not_understood_does_nothing(scene: Scene) -> None:
    for body in ({"tag": "kv_cache"}, {"tags": "kv_cache"}, {"timeout_s": "soon"}):
        error, happened = await scene.ask("release", **body)
        assert error and happened == []
    error, happened = await scene.ask("update_weights")
    assert "needs model" in error and happened == []
    assert scene.worker._status.status == WorkerStatus(scene.worker._status.status.pid)
