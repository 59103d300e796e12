"""The source of a load's prompts: text that aiperf generates, a file of records, or a public dataset.

Fields are named after aiperf 0.13.0's flags.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trtx.bench.datasets.reading import count_records, names_delays
from trtx.bench.images import Images
from trtx.bench.load_field import LoadField
from trtx.config.option_field import field_records
from trtx.config.wording import shown

Corpus = Literal["sonnet", "coding", "random"]

# aiperf creates all prompts before it sends the first one, and keeps a record of each request.
MAX_REQUESTS = 1_000_000
MAX_LENGTH = 10_000_000  # tokens; no published model has a longer context
MAX_TURNS = 10_000  # per session; all turns are created before the first request is sent
MAX_DELAY_MS = 86_400_000.0  # one day

_NAMED = Field(default=None, min_length=1)
# Margin for the drawn number of turns: standard errors of their sum that the number of conversations allows for.
_SPARE_ERRORS = 3


class Prompts(Images):
    """The prompts of a sweep's requests, as given by flags or YAML."""

    prompt_corpus: Annotated[
        Corpus | None,
        LoadField(
            help="Text from which prompts are made: sonnet, coding or random. Default: sonnet.",
            panel="Prompts",
            metavar="NAME",
            ignored=("dataset",),
            flag="--prompt-corpus",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        LoadField(
            help="Dataset or trace with its own prompts and lengths.",
            panel="Prompts",
            metavar="FILE",
            flag="--input-file",
        ),
    ] = None
    custom_dataset_type: Annotated[
        str | None,
        LoadField(
            help="Format of the input file, such as single_turn, mooncake_trace or sharegpt. Default: detected.",
            panel="Prompts",
            metavar="TYPE",
            ignored=("public", "no file"),
            flag="--custom-dataset-type",
        ),
    ] = _NAMED
    public_dataset: Annotated[
        str | None,
        LoadField(
            help="Dataset that aiperf downloads, such as sharegpt or spec_bench.",
            panel="Prompts",
            metavar="NAME",
            ignored=("file",),
            flag="--public-dataset",
        ),
    ] = _NAMED
    session_turns_mean: Annotated[
        int,
        LoadField(
            help="Turns per session; each request repeats the earlier turns.",
            panel="Prompts",
            ignored=("dataset",),
            flag="--session-turns-mean",
        ),
    ] = Field(default=1, ge=1, le=MAX_TURNS)
    session_turns_stddev: Annotated[
        int,
        LoadField(
            help="Standard deviation of the number of turns.",
            panel="Prompts",
            ignored=("dataset", "one turn"),
            flag="--session-turns-stddev",
        ),
    ] = Field(default=0, ge=0, le=MAX_TURNS)
    session_turn_delay_mean: Annotated[
        float,
        LoadField(
            help="Time between an answer and the next turn, in ms.",
            panel="Prompts",
            ignored=("dataset", "one turn"),
            flag="--session-turn-delay-mean",
        ),
    ] = Field(default=0.0, ge=0, le=MAX_DELAY_MS, allow_inf_nan=False)
    session_turn_delay_stddev: Annotated[
        float,
        LoadField(
            help="Standard deviation of that time, in ms.",
            panel="Prompts",
            ignored=("dataset", "one turn", "no delay"),
            flag="--session-turn-delay-stddev",
        ),
    ] = Field(default=0.0, ge=0, le=MAX_DELAY_MS, allow_inf_nan=False)
    prefix_prompt_length: Annotated[
        int,
        LoadField(
            help="Tokens of a prefix that prompts share, included in --isl.",
            panel="Prompts",
            ignored=("dataset",),
            flag="--prefix-prompt-length",
        ),
    ] = Field(default=0, ge=0, le=MAX_LENGTH)
    num_prefix_prompts: Annotated[
        int,
        LoadField(
            help="Number of shared prefixes; each prompt or session has one.",
            panel="Prompts",
            ignored=("dataset", "no prefix"),
        ),
    ] = Field(default=1, ge=1, le=MAX_REQUESTS)
    shared_system_prompt_length: Annotated[
        int,
        LoadField(
            help="Tokens of a system message that all prompts share, included in --isl.",
            panel="Prompts",
            ignored=("dataset", "prefix"),
            flag="--shared-system-prompt-length",
        ),
    ] = Field(default=0, ge=0, le=MAX_LENGTH)

    @field_validator("input_file")
    @classmethod
    def _found_from_anywhere(cls, value: Path | None) -> Path | None:
        return None if value is None else value.absolute()  # a run may be resumed from another directory

    @model_validator(mode="after")
    def _one_source(self) -> Prompts:
        if self.input_file is not None and self.public_dataset is not None:
            raise ValueError("input_file and public_dataset each name a dataset; leave one of them out")
        if self.custom_dataset_type is not None and self.input_file is None:
            raise ValueError("custom_dataset_type is the format of an input_file, but there is no input_file; add one")
        for name, record in field_records(type(self)).items() if self.dataset is not None else ():
            value = getattr(self, name)
            if "dataset" in record.ignored and value and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with {self.dataset}, which has its own prompts; leave it out")
        return self

    @model_validator(mode="after")
    def _whole(self) -> Prompts:
        if self.num_prefix_prompts > 1 and not self.prefix_prompt_length:
            raise ValueError("num_prefix_prompts has no effect while prefix_prompt_length is 0; set a length")
        if self.prefix_prompt_length and self.shared_system_prompt_length:
            raise ValueError(
                "prefix_prompt_length and shared_system_prompt_length both make prompts share a prefix; leave one out"
            )
        if self.session_turns_stddev and self.session_turns_mean == 1:
            raise ValueError("session_turns_stddev has no effect while session_turns_mean is 1; set more turns")
        if self.session_turn_delay_mean and not self.has_sessions:
            raise ValueError("session_turn_delay_mean has no effect while session_turns_mean is 1; set more turns")
        if self.session_turn_delay_stddev and not self.session_turn_delay_mean:
            raise ValueError("session_turn_delay_stddev has no effect while session_turn_delay_mean is 0; set a delay")
        return self

    @property
    def dataset(self) -> str | None:
        """Name of the source of prompts, for users; None if aiperf generates them."""
        name = self.public_dataset if self.input_file is None else self.input_file.name
        return None if name is None else shown(name)

    @property
    def dataset_sha256(self) -> str | None:
        """SHA-256 of the ``input_file``'s content, independent of its location and name; None without one.

        Reads the whole file or directory. Raises OSError if that fails.
        """
        if self.input_file is None:
            return None
        if not self.input_file.is_dir():
            return _sha256(self.input_file)
        files = sorted(path for path in self.input_file.rglob("*") if path.is_file())
        each = (f"{path.relative_to(self.input_file)} {_sha256(path)}\n" for path in files)
        return hashlib.sha256("".join(each).encode(errors="surrogateescape")).hexdigest()

    @property
    def trace_request_count(self) -> int | None:
        """Number of requests in an ``input_file``, one per record; None if it can't be read. Reads the whole file."""
        return None if self.input_file is None or self.input_file.is_dir() else count_records(self.input_file)

    @property
    def has_sessions(self) -> bool:
        """Whether requests are turns of conversations."""
        return self.session_turns_mean > 1

    @property
    def has_pauses(self) -> bool:
        """Whether time may pass between an answer and the next turn of its conversation. Reads the ``input_file``."""
        in_file = self.input_file is not None and not self.input_file.is_dir() and names_delays(self.input_file)
        return bool(self.session_turn_delay_mean) or in_file

    @property
    def shared_length(self) -> int:
        """Number of tokens of the prefix that a prompt shares with others."""
        return self.prefix_prompt_length + self.shared_system_prompt_length

    @property
    def sharing(self) -> Literal["unique", "shared"] | None:
        """Whether prompts or their prefixes repeat; None: depends on the dataset."""
        if self.dataset is not None:
            return None
        # A chat template may place images before the text, so repeated images are a shared prefix.
        return "shared" if self.has_sessions or self.shared_length or self.repeats_images else "unique"

    @property
    def description(self) -> str:
        """A short description for reports; empty if every prompt is unique text."""
        parts = [f"of {self.dataset}"] if self.dataset else []
        if self.prompt_corpus:
            parts.append(f"{self.prompt_corpus} text")
        if self.has_sessions:
            spread = f" ± {self.session_turns_stddev}" if self.session_turns_stddev else ""
            parts.append(f"{self.session_turns_mean}{spread} turns a session")
        if self.session_turn_delay_mean:
            parts.append(f"{self.session_turn_delay_mean:g} ms between turns")
        if self.prefix_prompt_length:
            parts.append(f"{self.num_prefix_prompts} prefixes of {self.prefix_prompt_length} tokens")
        if self.shared_system_prompt_length:
            parts.append(f"a system prompt of {self.shared_system_prompt_length} tokens")
        if self.images_description:
            parts.append(self.images_description)
        return ", ".join(parts)

    def conversation_count(self, requests: int, open_at_once: int) -> int:
        """Number of conversations required for ``requests`` turns without a repetition.

        It allows for conversations that are still open when a phase ends, and for drawn numbers of turns that are
        small.
        """
        if not self.has_sessions:
            return requests
        needed = math.ceil(requests / self.session_turns_mean)
        spread = _SPARE_ERRORS * self.session_turns_stddev * math.sqrt(needed) / self.session_turns_mean
        return min(requests, needed + 2 * open_at_once + math.ceil(spread))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
