"""When a sequence passed from one stage to the next inside the engine."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.torch_engine.messages import EngineTimes


@dataclass(slots=True, eq=False)
class SequenceStages:
    """When a sequence reached each stage, on the clock of ``Sequence.arrived_s``; 0: not reached. A preemption counts
    as part of decoding.
    """

    admitted: float = 0.0  # it got a slot and blocks for the first time
    waited_at_start: float = 0.0  # the step loop's total wait for the device, as of admitted
    read: float = 0.0  # the peer's KV had arrived, or could not be had
    is_recomputed: bool = False  # the KV could not be had
    first_token: float = 0.0  # the first token that this engine computed was known to the host
    waited_before: float = 0.0  # the same as of first_token

    def admit(self, now: float, waited: float) -> None:
        """Notes an admission; those after a preemption don't count."""
        if not self.admitted:
            self.admitted, self.waited_at_start = now, waited

    def token(self, now: float, waited: float) -> bool:
        """Notes that a token is known; returns whether it is the first one."""
        if self.first_token:
            return False
        self.first_token, self.waited_before = now, waited
        return True

    def times(self, arrived: float, now: float, waited: float) -> EngineTimes:
        """The stages as of the token known at ``now``. ``waited``: the step loop's total wait for the device."""
        began = self.read or self.admitted
        reads = self.read > 0 and not self.is_recomputed
        after = self.first_token - began if self.first_token else None
        decodes = 0 < self.first_token < now
        return EngineTimes(
            arrived_s=arrived,
            queue_s=self.admitted - arrived,
            prefill_s=None if reads else after,
            read_s=self.read - self.admitted if self.read else None,
            first_step_s=after if reads else None,
            decode_s=now - self.first_token if decodes else None,
            prefill_wait_s=None if reads or after is None else self.waited_before - self.waited_at_start,
            device_wait_s=waited - self.waited_before if decodes else None,
        )
