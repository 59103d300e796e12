"""What is asked of a topology (the load) and who is asked (the target)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trtx.bench.statistics import samples_needed

# aiperf 0.13.0 takes 1 to 10 profile runs.
MAX_TRIALS = 10

# Fields of a request body that say what is measured, and the key of a load that they belong to. In extra_inputs they
# would win over what aiperf and the report take for asked: no TTFT is one of a body that did not stream.
_OWNED = {
    "stream": "streaming",
    "max_tokens": "osl",
    "max_completion_tokens": "osl",
    "min_tokens": "ignore_eos",
    "ignore_eos": "ignore_eos",
    "messages": "isl",
    "prompt": "isl",
    "model": None,
    "n": None,
    "best_of": None,
    "stream_options": None,
}

Concurrency = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Target:
    """A served model. Whatever answers OpenAI's API at ``url`` can be one."""

    url: str
    model: str  # the name that requests carry
    tokenizer_path: Path  # directory with the tokenizer and chat template of that model
    mode: str  # agg, disagg, or the name given to an attached deployment
    gpu_count: int | None = None  # 0: none, so figures are per worker; None: not known
    worker_count: int | None = None  # None: not known
    api_key: str | None = field(default=None, repr=False)  # sent with each request, and written nowhere


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one cell."""

    concurrency: int  # requests in flight
    request_count: int  # measured requests
    warmup_request_count: int  # requests sent before, at the same concurrency and lengths, and not measured

    @property
    def label(self) -> str:
        """Names the cell to aiperf, and its seed with it: the same in every mode, which then see the same prompts."""
        return f"c{self.concurrency}"


class LoadSpec(BaseModel):
    """The loads of a sweep, as flags or YAML give them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: tuple[Concurrency, ...] = Field(default=(1, 8, 64), min_length=1)
    isl: int = Field(default=512, ge=1)  # input tokens of a request, the chat template's included
    osl: int = Field(default=128, ge=1)  # output tokens of a request, exactly, when ignore_eos holds
    request_count: int | None = Field(default=None, ge=1)  # None: see request_count_at
    warmup_request_count: int | None = Field(default=None, ge=0)  # None: see warmup_request_count_at
    trials: int = Field(default=1, ge=1, le=MAX_TRIALS)
    seed: int = Field(default=7, ge=0)
    streaming: bool = True
    ignore_eos: bool = True
    request_timeout_s: float = Field(default=600.0, gt=0)
    extra_inputs: dict[str, Any] = Field(default_factory=dict)  # further fields of every request body

    @field_validator("concurrency")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"concurrency {','.join(map(str, value))} names a value twice; expected each once")
        return value

    @field_validator("extra_inputs")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _OWNED:
                key = _OWNED[name]
                do = f"say it with load.{key}" if key else "leave it out"
                raise ValueError(f"extra_inputs.{name} would change what is measured, which trtx sets itself; {do}")
        return value

    def request_count_at(self, concurrency: int) -> int:
        """Measured requests at one concurrency.

        Without a number given: at least as many as p90 needs, and four rounds of the concurrency, so that
        filling up and running dry are the smaller part of the measured time (aiperf's own default is two).
        """
        return self.request_count or max(samples_needed(90), 4 * concurrency)

    def warmup_request_count_at(self, concurrency: int) -> int:
        """Unmeasured requests before them. Without a number given: one full round, and at least four."""
        return max(4, concurrency) if self.warmup_request_count is None else self.warmup_request_count

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(Load(c, self.request_count_at(c), self.warmup_request_count_at(c)) for c in self.concurrency)

    @property
    def request_body(self) -> dict[str, Any]:
        """Fields that every request carries beside those that aiperf writes.

        ``ignore_eos`` and ``min_tokens`` at the top level make the output length exact. Dynamo 1.4.2 takes them
        there, and answers HTTP 400 to the older ``nvext.ignore_eos``.
        """
        exact = {"ignore_eos": True, "min_tokens": self.osl} if self.ignore_eos else {}
        return {**exact, **self.extra_inputs}
