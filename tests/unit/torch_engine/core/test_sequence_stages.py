"""The moments that a sequence passes in the engine, and the times between them."""

from __future__ import annotations

from trtx.torch_engine.core.sequence_stages import SequenceStages


def stages(**moments: float) -> SequenceStages:
    return SequenceStages(admitted=2.0, waited_at_start=0.5, **moments)


def test_a_whole_request_has_queue_prefill_and_decode() -> None:
    one = stages()
    assert one.token(5.0, 2.5)
    assert not one.token(6.0, 3.0)

    times = one.times(1.0, 9.0, 6.0)

    assert (times.queue_s, times.prefill_s, times.decode_s) == (1.0, 3.0, 4.0)
    assert (times.prefill_wait_s, times.device_wait_s) == (2.0, 3.5)
    assert (times.read_s, times.first_step_s) == (None, None)


def test_a_decode_request_has_a_read_and_a_first_step_in_place_of_a_prefill() -> None:
    one = stages(read=3.5)
    one.token(4.0, 1.0)

    times = one.times(1.0, 4.0, 1.0)

    assert (times.read_s, times.first_step_s, times.prefill_s, times.decode_s) == (1.5, 0.5, None, None)


def test_a_prompt_that_is_computed_after_a_failed_read_is_a_prefill() -> None:
    one = stages(read=3.5, is_recomputed=True)
    one.token(6.0, 1.0)

    times = one.times(1.0, 6.0, 1.0)

    assert (times.read_s, times.prefill_s, times.first_step_s) == (1.5, 2.5, None)


def test_without_a_token_nothing_was_prefilled() -> None:
    times = stages().times(1.0, 3.0, 1.0)

    assert (times.queue_s, times.prefill_s, times.decode_s, times.prefill_wait_s) == (1.0, None, None, None)


def test_a_preemption_does_not_begin_a_new_queue() -> None:
    one = stages()
    one.admit(7.0, 4.0)

    assert one.times(1.0, 8.0, 4.0).queue_s == 1.0
