"""An abort goes to the engine at once, or after the first token where KV is still on its way."""

from __future__ import annotations

import asyncio

from trtx.torch_engine.llmapi.results import Delivery, RequestOutput
from trtx.torch_engine.messages import Update
from trtx.worker.requests.open_requests import OpenRequest


class Asked:
    """A request of the torch engine, fed by hand, that notes when it was aborted."""

    def __init__(self) -> None:
        self.aborted_after: int | None = None
        self.result = RequestOutput(
            1,
            prompt=None,
            prompt_token_ids=[1],
            num_choices=1,
            streaming=True,
            on_abort=self._on_abort,
            text_streams=None,
        )

    def _on_abort(self) -> None:
        self.aborted_after = len(self.result.outputs[0].token_ids)
        self.give(finish_reason="cancelled")

    def give(self, *token_ids: int, finish_reason: str | None = None) -> None:
        loop = self.result.push(Delivery(0, Update(0, list(token_ids), finish_reason)))
        if loop is not None:
            loop.call_soon_threadsafe(self.result.wake)


async def test_an_abort_while_kv_arrives_waits_for_the_first_token_and_is_then_made_good() -> None:
    asked = Asked()
    opened = OpenRequest(asked.result, is_receiving=True)
    opened.abort()
    seeing_out = asyncio.create_task(opened.see_out())
    await asyncio.sleep(0)
    assert asked.aborted_after is None
    asked.give(7)
    await asyncio.wait_for(seeing_out, 5)
    assert asked.aborted_after == 1
    assert asked.result.finished


def test_without_kv_on_its_way_an_abort_is_passed_on_at_once() -> None:
    asked = Asked()
    OpenRequest(asked.result, is_receiving=False).abort()
    assert asked.aborted_after == 0


async def test_a_request_that_has_ended_is_not_aborted_any_more() -> None:
    asked = Asked()
    asked.give(7, finish_reason="length")
    opened = OpenRequest(asked.result, is_receiving=False)
    await opened.see_out()
    opened.abort()
    assert asked.aborted_after is None
