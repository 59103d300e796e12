"""Which workers ``trtx sleep``, ``wake`` and ``update`` ask, in which order, and what they undo after a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from launch_builders import plan_of, process
from loopback import Handler, running

from trtx.errors import LaunchError, UsageError
from trtx.launch import ServedMemory
from trtx.topology import Plan

BOTH = ["kv_cache", "model_weights"]


class Workers:
    """Workers with system ports. ``asked``: "NAME CONTROL" in order; ``refuses``: those that refuse."""

    def __init__(self, stack: ExitStack, tmp_path: Path, roles: dict[str, Any]) -> None:
        self.asked: list[str] = []
        self.refuses: set[str] = set()
        self.without_controls: set[str] = set()
        self.parked: dict[str, list[str]] = {name: [] for name in roles}
        self.told: list[str] = []
        self.namespaces: dict[str, str] = {}  # of workers of another run
        specs = [
            replace(process(tmp_path, name, role=role), system_port=self._open(stack, name))
            for name, role in roles.items()
        ]
        self.plan: Plan = plan_of(tmp_path, *specs)

    def _open(self, stack: ExitStack, name: str) -> int:
        scene = self

        class Controls(Handler):
            def do_POST(self) -> None:
                if name in scene.without_controls:
                    self.send_error(404)
                    return
                self.answer(200, scene.answer(name, self.path.rpartition("/")[2], self.asked()))

        server = ThreadingHTTPServer(("127.0.0.1", 0), Controls)
        stack.enter_context(running(server))
        return server.server_port

    def answer(self, name: str, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if control != "memory_status":
            self.asked.append(f"{name} {control}")
        if f"{name} {control}" in self.refuses:
            return {"status": "error", "message": f"{name}: it has 2 open requests", "parked_tags": self.parked[name]}
        if control == "release":
            self.parked[name] = sorted({*self.parked[name], *body["tags"]})
        elif control == "resume":
            self.parked[name] = [tag for tag in self.parked[name] if body["tags"] and tag not in body["tags"]]
        namespace = self.namespaces.get(name, self.plan.namespace)
        parked = self.parked[name]
        return {"status": "ok", "parked_tags": parked, "is_routed": not parked, "namespace": namespace}

    def controls(self, *names: str) -> ServedMemory:
        return ServedMemory.of(self.plan, names, drain_s=1.0, tell=self.told.append)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        roles = {"frontend": "frontend", "decode-0": "decode", "prefill-0": "prefill", "encode-0": "encode"}
        yield Workers(stack, tmp_path, roles)


def test_prefill_sleeps_first_and_wakes_last_and_an_encode_worker_is_left_alone(workers: Workers) -> None:
    workers.controls().sleep(BOTH)
    workers.controls().wake(None)
    assert workers.asked == ["prefill-0 release", "decode-0 release", "decode-0 resume", "prefill-0 resume"]
    assert workers.told == [
        "prefill-0 sleeps: kv_cache, model_weights released", "decode-0 sleeps: kv_cache, model_weights released",
        "decode-0 is awake", "prefill-0 is awake",
    ]  # fmt: skip


def test_workers_that_slept_already_are_woken_if_another_one_refuses(workers: Workers) -> None:
    workers.refuses.add("decode-0 release")
    with pytest.raises(UsageError, match="^decode-0: it has 2 open requests$"):
        workers.controls().sleep(BOTH)
    assert workers.asked == ["prefill-0 release", "decode-0 release", "prefill-0 resume"]
    assert not any(workers.parked.values())


def test_a_refused_sleep_leaves_workers_asleep_that_slept_before(workers: Workers) -> None:
    workers.controls("prefill-0").sleep(BOTH)
    workers.refuses.add("decode-0 release")
    with pytest.raises(UsageError, match="2 open requests"):
        workers.controls().sleep(BOTH)
    assert workers.parked["prefill-0"] == BOTH


def test_ctrl_c_wakes_the_workers_that_the_sleep_reached(workers: Workers) -> None:
    def tell(sentence: str) -> None:
        workers.told.append(sentence)
        if len(workers.told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(workers.controls(), tell=tell).sleep(BOTH)
    assert workers.asked == ["prefill-0 release", "prefill-0 resume"]
    assert workers.told[-1] == "prefill-0 is awake again"


def test_a_worker_that_has_only_a_part_of_its_memory_still_sleeps(workers: Workers) -> None:
    workers.controls("decode-0").sleep(BOTH)
    workers.controls("decode-0").wake(["kv_cache"])
    assert workers.told[-1] == "decode-0 still sleeps: model_weights released"


def test_one_worker_can_be_named_and_an_unknown_name_is_refused(workers: Workers) -> None:
    workers.controls("decode-0").sleep(["kv_cache"])
    assert workers.asked == ["decode-0 release"]
    with pytest.raises(
        UsageError, match="--worker encode-0 is not in this topology; expected one of decode-0, prefill-0"
    ):
        workers.controls("encode-0")


def test_a_wake_leaves_workers_alone_that_are_awake_unless_all_are(workers: Workers) -> None:
    workers.controls("decode-0").sleep(BOTH)
    workers.asked.clear()
    workers.controls().wake(None)
    assert workers.asked == ["decode-0 resume"]
    workers.controls().wake(None)
    assert workers.asked[1:] == ["decode-0 resume", "prefill-0 resume"]


def test_no_worker_serves_between_the_old_weights_and_the_new_ones(workers: Workers) -> None:
    workers.controls().update_weights(Path("/m"))
    assert workers.asked == [
        "prefill-0 release", "decode-0 release", "decode-0 update_weights", "prefill-0 update_weights",
        "decode-0 resume", "prefill-0 resume",
    ]  # fmt: skip
    assert workers.told == ["decode-0 has the weights of /m", "prefill-0 has the weights of /m"]


def test_workers_that_slept_before_an_update_sleep_after_it(workers: Workers) -> None:
    workers.controls("decode-0").sleep(BOTH)
    workers.controls().update_weights(Path("/m"))
    assert workers.parked["decode-0"] == BOTH and not workers.parked["prefill-0"]
    assert workers.told[1:] == ["decode-0 has the weights of /m, and still sleeps", "prefill-0 has the weights of /m"]


@pytest.mark.parametrize(("refusing", "asleep"), [("decode-0", False), ("prefill-0", True)])
def test_after_a_refused_update_all_are_awake_or_old_and_new_weights_are_kept_apart(
    workers: Workers, refusing: str, asleep: bool
) -> None:
    workers.refuses.add(f"{refusing} update_weights")
    with pytest.raises(UsageError, match=f"^{refusing}: it has 2 open requests") as refused:
        workers.controls().update_weights(Path("/m"))
    assert any(workers.parked.values()) == asleep
    assert ("decode-0 got the new weights already, so the workers stay asleep" in str(refused.value)) == asleep


def test_ctrl_c_in_an_update_says_that_the_workers_stay_asleep(workers: Workers) -> None:
    def tell(sentence: str) -> None:
        workers.told.append(sentence)
        if len(workers.told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(workers.controls(), tell=tell).update_weights(Path("/m"))
    assert workers.parked == {"frontend": [], "decode-0": ["kv_cache"], "prefill-0": ["kv_cache"], "encode-0": []}
    assert workers.told[-1].startswith("interrupted: some workers may have the new weights")


def test_a_worker_without_controls_may_be_starting_and_no_worker_is_changed(workers: Workers) -> None:
    workers.without_controls.add("decode-0")
    with pytest.raises(UsageError, match="^decode-0 can't sleep .* it is still starting, or runs without sleep_config"):
        workers.controls().sleep(BOTH)
    assert workers.asked == []


def test_a_worker_that_does_not_answer_is_named(workers: Workers) -> None:
    gone = replace(workers.plan.workers[0], system_port=1)
    with pytest.raises(LaunchError, match="decode-0 does not answer at http://127.0.0.1:1 .*check that its trtx serve"):
        ServedMemory((gone,), "", 1.0, workers.told.append).wake(None)


@pytest.mark.parametrize("verb", ["sleep", "wake", "update"])
def test_a_port_that_another_run_has_taken_is_left_alone(workers: Workers, tmp_path: Path, verb: str) -> None:
    workers.namespaces["decode-0"] = "trtx-new"
    controls = workers.controls()
    calls = {
        "sleep": lambda: controls.sleep(BOTH), "wake": lambda: controls.wake(None),
        "update": lambda: controls.update_weights(tmp_path),
    }  # fmt: skip
    with pytest.raises(
        UsageError, match="decode-0 of this run has ended: .* of another run now, in namespace trtx-new"
    ):
        calls[verb]()
    assert workers.asked == []
