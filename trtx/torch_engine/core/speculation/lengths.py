"""Decides how many drafted tokens each sequence of a step gets: as many as make the step produce tokens faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from trtx.torch_engine.core.speculation.drafters import Draft

_THRESHOLDS = (0.8, 0.6, 0.4, 0.25, 0.1)  # a drafted token must be accepted with at least this probability
_MARGIN = 1.02  # expected gain that a step with drafts must have
_KEPT_TIMES, _ENOUGH_TIMES = 9, 3
_BOUND_BY_READING = 256  # tokens: a pass of fewer takes about as long as reading the weights, on an H100
_REFRESH = 256  # steps with drafts after which one goes without, to measure it anew
_FIRST_TRY, _LAST_TRY = 8, 512  # steps without drafts after which one is tried in spite of the estimate
_TRIED_SHARE = 8  # a try drafts about one token for this many sequences
_SPENT_ON_TRIES = 0.01  # share of the time that tries may take: the more a try costs, the later the next one
_PRIOR_RATE, _PRIOR_WEIGHT = 0.6, 8.0
_KEPT = 0.98  # decay of the counts of a strength with each draft
_STRONGEST = 8


@dataclass(slots=True)
class AcceptanceRate:
    """Estimates the probability that the next drafted token is accepted, if those before it were."""

    tried: float = _PRIOR_WEIGHT
    accepted: float = _PRIOR_RATE * _PRIOR_WEIGHT

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one draft. Tokens after a rejected one are not counted, because nothing is known about them."""
        self.tried = self.tried * _KEPT + min(drafted, accepted + 1)
        self.accepted = self.accepted * _KEPT + accepted

    @property
    def value(self) -> float:
        return self.accepted / self.tried


@dataclass(slots=True)
class StepTimes:
    """Measured durations of steps by (batch, drafted tokens), both rounded up to powers of two. Unit: seconds."""

    _times: dict[tuple[int, int], deque[float]] = field(default_factory=dict)

    def add(self, batch: int, drafted: int, seconds: float) -> None:
        self._times.setdefault(_bucket(batch, drafted), deque(maxlen=_KEPT_TIMES)).append(seconds)

    def expected(self, batch: int, drafted: int) -> float | None:
        """The median duration of the last steps of this size; None if too few were measured."""
        times = self._times.get(_bucket(batch, drafted), ())
        return median(times) if len(times) >= _ENOUGH_TIMES else None


def _bucket(batch: int, drafted: int) -> tuple[int, int]:
    return (batch - 1).bit_length(), drafted.bit_length() if drafted < 2 else 1 + (drafted - 1).bit_length()


class DraftLengths:
    """Chooses draft lengths from measured acceptance and measured durations of steps.

    A step's throughput is estimated as expected tokens per second. Where no draft is expected to pay, a few tokens are
    still tried now and then, so that the estimates follow the requests. The tries become rarer until drafts pay again.
    """

    def __init__(
        self, most: int, *, max_concurrency: int | None = None, schedule: Mapping[int, int] | None = None
    ) -> None:
        """``most``: max_draft_len.

        ``schedule``: draft_len_schedule, which decides alone. Its keys are batch sizes: a batch gets the length of the
        smallest key that is at least its size, and no draft beyond the largest key.
        """
        self._most = most
        self._max_concurrency = max_concurrency
        self._schedule = sorted(schedule.items()) if schedule else None
        self._times = StepTimes()
        self._rates: dict[int, AcceptanceRate] = {}
        self._since_plain = 0
        self._since_draft = 0
        self._next_try = _FIRST_TRY
        self._is_try = False  # whether the last choice drafts in spite of the estimate

    def limit(self, batch: int) -> int:
        """The largest draft length that the configuration allows at ``batch`` decoding sequences."""
        if self._max_concurrency is not None and batch > self._max_concurrency:
            return 0
        if self._schedule is not None:
            scheduled = next((length for size, length in self._schedule if batch <= size), 0)
            return min(self._most, scheduled)
        return self._most

    def may_pay(self, batch: int) -> bool:
        """Whether :meth:`choose` could draft anything at ``batch`` decoding sequences, whatever the drafts are.

        It costs microseconds. The search for the drafts of a large batch costs a millisecond.
        """
        most_tokens = batch * self.limit(batch)
        if self._schedule is not None or not most_tokens:
            return bool(most_tokens)
        plain = self._times.expected(batch, 0)
        if plain is None or self._since_plain >= _REFRESH:
            return False
        if self._since_draft >= self._next_try:
            return True
        rate = max((one.value for one in self._rates.values()), default=0.0)
        rate = max(rate, AcceptanceRate().value)  # other matches may be longer than those that were seen
        for exponent in range(most_tokens.bit_length() + 1):  # durations are known by powers of two
            total = min(1 << exponent, most_tokens)
            gain = rate * total if total <= batch else batch * _expected(rate, -(-total // batch))
            if (batch + gain) / self._seconds(batch, total, plain) > _MARGIN * batch / plain:
                return True
        return False

    def _seconds(self, batch: int, drafted: int, plain: float) -> float:
        return self._times.expected(batch, drafted) or plain * _slowdown(batch, drafted)

    def choose(self, batch: int, drafts: Sequence[Draft]) -> list[int]:
        """Returns the number of tokens to verify for each draft in a step of ``batch`` decoding sequences."""
        whole = [len(draft.tokens) for draft in drafts]
        if self._schedule is not None or not any(whole):
            return whole
        plain = self._times.expected(batch, 0)
        if plain is None or self._since_plain >= _REFRESH:
            return [0] * len(drafts)
        best, chosen = _MARGIN * batch / plain, [0] * len(drafts)
        rates = [self._rate(draft).value for draft in drafts]
        for threshold in _THRESHOLDS:
            lengths = [_length(rate, length, threshold) for rate, length in zip(rates, whole, strict=True)]
            total = sum(lengths)
            if not total:
                continue
            gain = sum(_expected(rate, length) for rate, length in zip(rates, lengths, strict=True))
            seconds = self._seconds(batch, total, plain)
            if (batch + gain) / seconds > best:
                best, chosen = (batch + gain) / seconds, lengths
        self._is_try = not any(chosen) and self._since_draft >= self._next_try
        return _few(whole, max(1, batch // _TRIED_SHARE)) if self._is_try else chosen

    def verified(self, draft: Draft, drafted: int, accepted: int) -> None:
        """Learns how many of ``drafted`` tokens were accepted."""
        self._rate(draft).add(drafted, accepted)

    def stepped(self, batch: int, drafted: int, seconds: float) -> None:
        """Learns the duration of a step that had only decoding sequences, with ``drafted`` drafted tokens in all."""
        self._times.add(batch, drafted, seconds)
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted:
            self._drafted(self._steps_lost(batch, seconds))
        else:
            self._since_draft += 1

    def wasted(self, drafts: Sequence[Draft]) -> None:
        """Learns that a step could verify no token of ``drafts``, for example because the grammars allow none."""
        for draft in drafts:
            self._rate(draft).add(1, 0)
        self._drafted(0.0)

    def _steps_lost(self, batch: int, seconds: float) -> float:
        """Estimates the extra cost of a step with drafts that took ``seconds``. Unit: steps without drafts.

        The factor 2: neither this step nor the next one overlaps with the step before it.
        """
        plain = self._times.expected(batch, 0)
        return 0.0 if plain is None else 2 * max(0.0, seconds / plain - 1)

    def _drafted(self, steps_lost: float) -> None:
        self._since_draft = 0
        if self._is_try:
            self._next_try = min(max(2 * self._next_try, round(steps_lost / _SPENT_ON_TRIES)), _LAST_TRY)
        else:
            self._next_try = _FIRST_TRY

    def _rate(self, draft: Draft) -> AcceptanceRate:
        return self._rates.setdefault(min(draft.strength, _STRONGEST), AcceptanceRate())


def _slowdown(batch: int, drafted: int) -> float:
    """Estimates the ratio of a step's unknown duration to that of a step without drafts."""
    return max(1.0, (batch + drafted) / max(batch, _BOUND_BY_READING))


def _few(whole: Sequence[int], most: int) -> list[int]:
    """Returns draft lengths: the whole length for the first drafts, until they have ``most`` tokens in all, then 0."""
    lengths = [0] * len(whole)
    for index, length in enumerate(whole):
        if sum(lengths) < most:
            lengths[index] = length
    return lengths


def _length(rate: float, most: int, threshold: float) -> int:
    """Number of leading tokens whose probability to be accepted is at least ``threshold``."""
    length, chance = 0, rate
    while length < most and chance >= threshold:
        length, chance = length + 1, chance * rate
    return length


def _expected(rate: float, length: int) -> float:
    """Expected number of accepted tokens among ``length`` drafted ones."""
    return float(length) if rate >= 1.0 else rate * (1 - rate**length) / (1 - rate)
