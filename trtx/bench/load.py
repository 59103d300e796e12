"""The load sent to a topology, and the target that receives it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from trtx.bench.answer_formats import RequestedFormat, WrongFormat
from trtx.bench.datasets.agent_sessions import AGENT_SESSIONS
from trtx.bench.judge.steadiness import warm_up_needed
from trtx.bench.load_field import LoadField, plain
from trtx.bench.owned_fields import OWNED_FIELDS
from trtx.bench.prompts import MAX_LENGTH, MAX_REQUESTS, Prompts
from trtx.stats.percentiles import samples_needed

_TIMED = "mooncake_trace"  # aiperf's trace format: each line has a request and its time
MAX_TRIALS = 100  # limits the cost of a typing mistake
MAX_CONCURRENCY = 65_000  # connection limit of aiperf 0.13.0, and roughly the number of ports of an address
MAX_RATE = 1_000_000.0  # requests/s
MIN_RATE = 0.0001  # one request in three hours
MAX_TIMEOUT_S = 604_800.0  # one week
MAX_SEED = 2**53 - 1  # JSON readers lose digits of larger integers

Concurrency = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE, allow_inf_nan=False)]
Arrival = Literal["poisson", "constant"]
Scenario = Literal["inferencex-agentx-mvp"]  # all that aiperf 0.13.0 has


@dataclass(frozen=True, slots=True)
class Target:
    """A served model: any server that answers OpenAI's API at ``url``."""

    url: str
    model: str  # the model name in requests
    tokenizer_path: Path  # directory with the model's tokenizer and chat template
    topology: str  # label: agg, disagg-1p2d, or the name given to an attached deployment
    gpu_count: int | None = None  # 0: no GPU, so metrics are per worker; None: unknown
    worker_count: int | None = None  # None: unknown
    routes_by_prefix: bool | None = None  # the router prefers workers that cache a prompt's prefix; None: unknown
    api_key: str | None = field(default=None, repr=False)  # sent with each request, never written
    certificate: Path | None = None  # PEM certificate of a TLS server that trtx started
    gpu_hour_price: float | None = None  # of one GPU, in any currency; None: no price was given


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one cell: a fixed number of requests in flight, a request rate, or a trace's own times."""

    label: str  # names the cell within its topology and seeds its prompts: the same in every topology
    concurrency: int | None  # requests in flight; None: determined by the arrivals
    request_rate: float | None  # requests/s, open loop; None with concurrency None: a trace's times
    isl: int | None  # mean input tokens per request or session turn; None: the dataset's
    osl: int | None  # mean output tokens per request; None: the dataset's
    request_count: int  # measured requests
    warmup_request_count: int  # unmeasured requests, sent before in the same way

    @property
    def asked(self) -> str:
        """The load in words: ``concurrency 8``, ``2.5 requests/s``, or ``its own times`` for a trace."""
        if self.concurrency is None and self.request_rate is None:
            return "its own times"
        return f"concurrency {self.concurrency}" if self.concurrency else f"{plain(self.request_rate)} requests/s"

    @property
    def intensity(self) -> float:
        """Sort key among loads of the same kind."""
        return self.concurrency or self.request_rate or 1.0  # a trace's own times are the only load of their kind


def _listed(value: Any) -> Any:
    """Turns a single value into a tuple of one."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
Lengths = Annotated[tuple[Length, ...], BeforeValidator(_listed)]


class LoadSpec(Prompts):
    """The loads of a sweep, as given by flags or YAML."""

    concurrency: Annotated[
        tuple[Concurrency, ...],
        LoadField(help="Requests in flight, a cell per value.", metavar="1,8,64", ignored=("open loop", "schedule")),
    ] = (1, 8, 64)  # an axis; empty with request rates
    request_rate: Annotated[
        tuple[Rate, ...],
        LoadField(
            help="Requests per second, a cell per value, instead of --concurrency.",
            metavar="2,4.5",
            ignored=("schedule",),
        ),
    ] = ()
    arrival: Annotated[
        Arrival | None,
        LoadField(
            help="Spacing of the requests of a rate. Default: poisson.",
            metavar="poisson|constant",
            ignored=("closed loop",),
        ),
    ] = None
    fixed_schedule: Annotated[
        bool,
        LoadField(
            help="Send each request of a mooncake_trace at its own time, instead of a concurrency or a rate.",
            ignored=("public", "no file"),
            since=3,
            before=False,
        ),
    ] = False
    scenario: Annotated[
        Scenario | None,
        LoadField(
            help="Replay agent sessions of a weka_trace with aiperf's agentic replay: inferencex-agentx-mvp.",
            metavar="NAME",
            ignored=("public", "no file", "open loop", "schedule"),
            flag="--scenario",
            since=10,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        LoadField(
            help="Shape of the gamma distribution of a rate's arrivals: 1 is poisson, smaller values make bursts.",
            ignored=("closed loop",),
        ),
    ] = Field(default=None, ge=0.001, le=1000, allow_inf_nan=False)
    # Input tokens include chat template and shared prefix. With a dataset, both lists are empty by default, and an osl
    # applies to records that request no length themselves.
    isl: Annotated[
        Lengths,
        LoadField(
            help="Input tokens per request or session turn. Several values make cells, paired with --osl.",
            metavar="512,2048",
            ignored=("dataset",),
        ),
    ] = (512,)
    osl: Annotated[
        Lengths,
        LoadField(help="Output tokens per request, exactly.", metavar="128,256"),
    ] = (128,)
    isl_stddev: Annotated[
        float,
        LoadField(help="Standard deviation of input lengths.", ignored=("dataset",), flag="--isl-stddev"),
    ] = Field(default=0.0, ge=0, le=MAX_LENGTH, allow_inf_nan=False)
    osl_stddev: Annotated[
        float,
        LoadField(help="Standard deviation of output lengths.", ignored=("dataset",), flag="--osl-stddev"),
    ] = Field(default=0.0, ge=0, le=MAX_LENGTH, allow_inf_nan=False)
    request_count: Annotated[
        int | None,
        LoadField(
            help="Measured requests per cell. Default: 64 plus 3 times the concurrency, or 4 times it if more.",
            ignored=("schedule",),
        ),
    ] = Field(default=None, ge=1, le=MAX_REQUESTS)
    warmup_request_count: Annotated[
        int | None,
        LoadField(
            help="Unmeasured requests before. Default: enough to judge whether the warm-up was long enough.",
        ),
    ] = Field(default=None, ge=0, le=MAX_REQUESTS)
    trials: Annotated[int, LoadField(help="Trials of each cell, each with its own prompts.")] = Field(
        default=1, ge=1, le=MAX_TRIALS
    )
    seed: Annotated[int, LoadField(help="Seed of the prompts, the same for every topology.")] = Field(
        default=7, ge=0, le=MAX_SEED
    )
    streaming: Annotated[bool, LoadField()] = True
    # With a dataset the default is false, so the model may stop by itself.
    ignore_eos: Annotated[bool, LoadField()] = True
    request_timeout_s: Annotated[float, LoadField()] = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    # Additional fields of every request body, and additional aiperf arguments. Their options are declared in another
    # form (trtx/cli/request_options.py).
    extra_inputs: Annotated[dict[str, Any], LoadField()] = Field(default_factory=dict)
    aiperf_args: Annotated[tuple[str, ...], LoadField()] = ()

    @field_validator("concurrency", "request_rate")
    @classmethod
    def _distinct(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if len(set(value)) != len(value):
            text = ",".join(map(plain, value))
            raise ValueError(f"{info.field_name} {text} lists a value twice; list each once")
        return value

    @model_validator(mode="after")
    def _lengths(self) -> LoadSpec:
        if self.dataset is not None:
            for name in ("isl", "osl"):
                if name not in self.model_fields_set:
                    self.__dict__[name] = ()  # overrides the default
            if "ignore_eos" not in self.model_fields_set:
                self.__dict__["ignore_eos"] = False
            if self.isl:
                raise ValueError(f"isl has no effect with {self.dataset}, which has its own prompts; leave it out")
            return self
        for name, value in (("isl", self.isl), ("osl", self.osl)):
            if not value:
                raise ValueError(f"{name} is an empty list; expected at least one length, or a dataset")
        if self.shared_length >= min(self.isl):
            raise ValueError(
                f"{self.shared_length} tokens of every prompt are shared, but isl is only {min(self.isl)} in all; "
                "expected a longer isl"
            )
        return self

    @model_validator(mode="after")
    def _trace(self) -> LoadSpec:
        """Checks a trace. aiperf 0.13.0 always sends the whole trace and ignores ``--request-count``."""
        if not self.fixed_schedule:
            return self
        if self.input_file is None or self.custom_dataset_type not in (None, _TIMED):
            raise ValueError(
                "fixed_schedule sends requests at the times of a trace, but there is no trace; expected an input_file "
                f"with custom_dataset_type {_TIMED}"
            )
        self.__dict__["custom_dataset_type"] = _TIMED
        if "concurrency" not in self.model_fields_set:
            self.__dict__["concurrency"] = ()  # overrides the default
        for name in ("concurrency", "request_rate"):
            if getattr(self, name):
                raise ValueError(f"{name} and fixed_schedule both set when requests are sent; leave one of them out")
        found = self.trace_request_count
        if found == 0 or (self.input_file is not None and self.input_file.is_dir()):
            raise ValueError(
                f"{self.dataset} is not a trace with one request per line; expected a file with at least one request"
            )
        if found is not None and self.request_count not in (None, found):
            raise ValueError(
                f"request_count is {self.request_count}, but all {found} requests of {self.dataset} are sent; leave "
                "request_count out"
            )
        # 1: a later check reports that the file can't be read.
        self.__dict__["request_count"] = self.request_count or found or 1
        return self

    @model_validator(mode="after")
    def _replay(self) -> LoadSpec:
        """Checks a load that a scenario of aiperf decides: its trace, its times and its warm-up."""
        if self.scenario is None:
            return self
        if self.input_file is None or self.custom_dataset_type not in (None, AGENT_SESSIONS):
            raise ValueError(
                f"scenario {self.scenario} replays agent sessions, but there are none; expected an input_file with "
                f"custom_dataset_type {AGENT_SESSIONS}"
            )
        self.__dict__["custom_dataset_type"] = AGENT_SESSIONS
        if self.request_rate or self.fixed_schedule:
            raise ValueError(
                f"scenario {self.scenario} sends requests at the times of its trace; leave request_rate and "
                "fixed_schedule out"
            )
        if not self.streaming or (not self.ignore_eos and "ignore_eos" in self.model_fields_set):
            raise ValueError(f"scenario {self.scenario} sets streaming and ignore_eos to true; leave both out")
        self.__dict__["ignore_eos"] = True
        if self.warmup_request_count:
            raise ValueError(
                f"scenario {self.scenario} has its own warm-up, one request for each session in flight; leave "
                "warmup_request_count out"
            )
        return self

    @model_validator(mode="after")
    def _one_axis(self) -> LoadSpec:
        if self.request_rate and "concurrency" not in self.model_fields_set:
            self.__dict__["concurrency"] = ()  # overrides the default
        if not self.concurrency and not self.request_rate and not self.fixed_schedule:
            raise ValueError("concurrency is an empty list; expected at least one value, or a request_rate")
        if self.request_rate and self.concurrency:
            raise ValueError("concurrency and request_rate both set when requests are sent; leave one of them out")
        for name in ("arrival", "burstiness"):
            if getattr(self, name) is not None and not self.request_rate:
                raise ValueError(f"{name} has no effect without a request_rate; leave it out, or set a request_rate")
        if self.arrival is not None and self.burstiness is not None:
            raise ValueError("arrival and burstiness both set the spacing of requests; leave one of them out")
        if self.isl and len(self.isl) != len(self.osl) and 1 not in (len(self.isl), len(self.osl)):
            raise ValueError(
                f"isl has {len(self.isl)} lengths and osl {len(self.osl)}, but they are paired; expected equally "
                "many, or one length for either of them"
            )
        if len(set(self.pairs)) != len(self.pairs):
            raise ValueError("isl and osl list a pair of lengths twice; list each pair once")
        return self

    @field_validator("extra_inputs")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in OWNED_FIELDS:
                key = OWNED_FIELDS[name]
                do = f"set load.{key} instead" if key else "leave it out"
                raise ValueError(f"extra_inputs.{name} is set by trtx, because it would change what is measured; {do}")
            try:
                json.dumps(value[name], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"extra_inputs.{name} is not a JSON value ({error}); expected one") from error
        try:
            RequestedFormat.of(value)
        except WrongFormat as error:
            raise ValueError(f"extra_inputs.{error}") from error
        return value

    @property
    def description(self) -> str:
        """The prompts, and the scenario that replays them."""
        return ", ".join(filter(None, (super().description, self.scenario and f"agentic replay {self.scenario}")))

    @property
    def pairs(self) -> tuple[tuple[int | None, int | None], ...]:
        """Input and output length of each load. A single length of either kind is combined with every length of the
        other.
        """
        isl: tuple[int | None, ...] = self.isl or (None,)
        osl: tuple[int | None, ...] = self.osl or (None,)
        count = max(len(isl), len(osl))
        return tuple(zip(isl * count if len(isl) == 1 else isl, osl * count if len(osl) == 1 else osl, strict=False))

    @property
    def load_count(self) -> int:
        """The number of :attr:`loads`, without creating them."""
        return len(self.pairs) * len(self._intensities)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every pair of lengths at every concurrency or rate."""
        return tuple(
            self._load(isl, osl, concurrency, rate)
            for isl, osl in self.pairs
            for concurrency, rate in self._intensities
        )

    @property
    def _intensities(self) -> tuple[tuple[int | None, float | None], ...]:
        if self.fixed_schedule:
            return ((None, None),)
        if self.request_rate:
            return tuple((None, rate) for rate in self.request_rate)
        return tuple((value, None) for value in self.concurrency)

    def _load(self, isl: int | None, osl: int | None, concurrency: int | None, rate: float | None) -> Load:
        label = "trace" if self.fixed_schedule else f"c{concurrency}" if rate is None else f"r{plain(rate)}"
        # A warm-up would use the trace's own prompts, and later requests would find them in the prefix cache. A
        # scenario has a warm-up of its own.
        warm_up = 0 if self.fixed_schedule or self.scenario else _warmup_request_count(concurrency or 1)
        return Load(
            label=label if len(self.pairs) == 1 else f"{label}{_part('i', isl)}{_part('o', osl)}",
            concurrency=concurrency,
            request_rate=rate,
            isl=isl,
            osl=osl,
            request_count=self.request_count or _request_count(concurrency or 1),
            warmup_request_count=warm_up if self.warmup_request_count is None else self.warmup_request_count,
        )

    @property
    def outputs_are_exact(self) -> bool:
        """Whether every answer has exactly as many tokens as its request asked for."""
        return self.ignore_eos and not self.osl_stddev and self.dataset is None

    def held_concurrency(self, load: Load) -> int | None:
        """Number of requests constantly in flight; None if they arrive at a rate, or if sessions have pauses."""
        return None if self.has_pauses or self.scenario else load.concurrency

    def request_body(self, load: Load) -> dict[str, Any]:
        """Additional fields of every request, on top of those that aiperf writes.

        ``ignore_eos`` and ``min_tokens`` at the top level make the output length exact. Dynamo 1.6.1 accepts them there
        and answers HTTP 400 to the older ``nvext.ignore_eos``. If lengths are drawn, each request has its own
        ``max_tokens``, and ``ignore_eos`` alone makes the length exact.
        """
        exact: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        if self.outputs_are_exact:
            exact["min_tokens"] = load.osl
        return {**exact, **self.extra_inputs}


def _part(name: str, length: int | None) -> str:
    return "" if length is None else f"-{name}{length}"


def _request_count(concurrency: int) -> int:
    """The default number of measured requests.

    At least as many as p90 needs plus three rounds of the concurrency (filling up, draining the initial queue, running
    dry), and at least four rounds in all (aiperf's default is two).
    """
    return max(samples_needed(90) + 3 * concurrency, 4 * concurrency)


def _warmup_request_count(concurrency: int) -> int:
    """The default number of warm-up requests: the minimum with which the warm-up can be judged."""
    return warm_up_needed(concurrency)
