"""RequestOutput: whoever looks late gets everything at once, and every request ends exactly once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.results import Delivery, RequestOutput
from trtx.torch_engine.messages import Logprob, Update


def make(*, streaming: bool = True, choices: int = 1) -> RequestOutput:
    return RequestOutput(
        7,
        prompt=None,
        prompt_token_ids=[1, 2],
        num_choices=choices,
        streaming=streaming,
        on_abort=lambda: None,
        text_streams=None,
    )


async def test_one_look_takes_in_everything_that_arrived() -> None:
    output = make()
    for token in range(5):
        output.push(Delivery(0, Update(0, [token])))
    assert (await anext(output)).outputs[0].token_ids == [0, 1, 2, 3, 4]
    output.push(Delivery(0, Update(0, [5, 6])))
    output.push(Delivery(0, Update(0, [7], finish_reason="length")))
    choice = (await anext(output)).outputs[0]
    assert choice.token_ids == list(range(8))
    assert choice.token_ids_diff == [5, 6, 7]
    assert (choice.finish_reason, output.finished) == ("length", True)
    with pytest.raises(StopAsyncIteration):
        await anext(output)


async def test_what_arrives_between_two_looks_changes_nothing_that_was_seen() -> None:
    output = make()
    output.push(Delivery(0, Update(0, [1])))
    choice = (await anext(output)).outputs[0]
    output.push(Delivery(0, Update(0, [2], finish_reason="stop", stop_reason=9)))
    assert (choice.token_ids, choice.finish_reason) == ([1], None)
    await anext(output)
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([1, 2], "stop", 9)


async def test_a_consumer_keeps_up_with_another_thread_and_loses_nothing() -> None:
    output = make()
    loop = asyncio.get_running_loop()

    def push_all() -> None:
        for token in range(3000):
            waits = output.push(Delivery(0, Update(0, [token], finish_reason="length" if token == 2999 else None)))
            if waits is not None:
                waits.call_soon_threadsafe(output.wake)

    pushed = loop.run_in_executor(None, push_all)
    seen: list[int] = []
    async for step in output:
        assert step.outputs[0].token_ids_diff, "a look that brings nothing is no step"
        seen += step.outputs[0].token_ids_diff
    await pushed
    assert seen == list(range(3000))


def pushed(output: RequestOutput, update: Update) -> bool:
    """As the thread that pushes does it. Whether somebody was woken."""
    loop = output.push(Delivery(0, update))
    if loop is not None:
        loop.call_soon_threadsafe(output.wake)
    return loop is not None


async def test_what_comes_during_a_pause_wakes_nobody_and_is_one_step_after_it() -> None:
    output = make()
    pausing = asyncio.ensure_future(output.pause(0.2))
    await asyncio.sleep(0)
    assert not any(pushed(output, Update(0, [token])) for token in range(5))
    assert not pausing.done()
    async with asyncio.timeout(20):
        await pausing
    assert (await anext(output)).outputs[0].token_ids == [0, 1, 2, 3, 4]
    looking = asyncio.ensure_future(anext(output))
    await asyncio.sleep(0)
    assert pushed(output, Update(0, [5])), "the pause is over"
    assert (await looking).outputs[0].token_ids_diff == [5]


@pytest.mark.parametrize("comes", ["during", "before"])
@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_pause_ends_with_its_request(comes: str, ends_well: bool) -> None:
    output = make()

    def end() -> None:
        if ends_well:
            pushed(output, Update(0, [1], finish_reason="stop"))
        elif (loop := output.fail(RequestError("of the engine's"))) is not None:
            loop.call_soon_threadsafe(output.wake)

    if comes == "before":
        end()
    pausing = asyncio.ensure_future(output.pause(3600))
    await asyncio.sleep(0)
    if comes == "during":
        end()
    async with asyncio.timeout(20):
        await pausing
    if ends_well:
        assert (await anext(output)).finished
    else:
        with pytest.raises(RequestError, match="of the engine's"):
            await anext(output)


async def test_without_streaming_there_is_one_step_at_the_end() -> None:
    output = make(streaming=False)
    waiting = asyncio.ensure_future(output.aresult())
    await asyncio.sleep(0)
    assert output.push(Delivery(0, Update(0, [1]))) is None, "nobody needs to wake for a part"
    assert output.push(Delivery(0, Update(0, [2], finish_reason="length"))) is not None
    output.wake()
    assert (await waiting).outputs[0].token_ids == [1, 2]


def test_result_blocks_until_every_choice_has_ended() -> None:
    output = make(streaming=False, choices=2)
    output.push(Delivery(1, Update(0, [3], finish_reason="stop")))
    with pytest.raises(TimeoutError, match="request 7"):
        output.result(timeout=0.0)
    threading.Thread(target=output.push, args=(Delivery(0, Update(0, [4], finish_reason="length")),)).start()
    assert [choice.token_ids for choice in output.result(timeout=10).outputs] == [[4], [3]]


def test_an_error_comes_after_what_was_pushed_before_it() -> None:
    async def consume(output: RequestOutput) -> list[int]:
        seen: list[int] = []
        with pytest.raises(RequestError, match="no such block"):
            async for step in output:
                seen += step.outputs[0].token_ids_diff
        return seen

    output = make()
    output.push(Delivery(0, Update(0, [1, 2])))
    output.fail(RequestError("no such block"))
    assert asyncio.run(consume(output)) == [1, 2]
    with ThreadPoolExecutor() as pool, pytest.raises(RequestError):
        pool.submit(output.result, 10).result()


async def test_a_cancelled_wait_can_be_taken_up_again() -> None:
    output = make()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(output), 0.01)
    output.push(Delivery(0, Update(0, [1])))
    assert (await anext(output)).outputs[0].token_ids == [1]


def test_logprobs_of_the_chosen_tokens_are_summed() -> None:
    output = make(streaming=False)
    rows = [{5: Logprob(-0.5, 1), 6: Logprob(-0.1, 2)}, {6: Logprob(-1.0, 1)}]
    output.push(Delivery(0, Update(0, [5, 6], finish_reason="length", logprobs=rows)))
    choice = output.result(timeout=0).outputs[0]
    assert choice.cumulative_logprob == pytest.approx(-1.5)
    assert choice.logprobs == rows


def test_disaggregated_params_know_their_request_types() -> None:
    with pytest.raises(ValueError, match="'prefill_only'; expected one of context_only"):
        DisaggregatedParams(request_type="prefill_only")
    assert DisaggregatedParams(request_type="context_and_generation").handoff() is None
    params = DisaggregatedParams(request_type="generation_only", first_gen_tokens=[3], opaque_state=b"x")
    handoff = params.handoff()
    assert handoff is not None
    assert DisaggregatedParams.from_handoff(handoff) == params
