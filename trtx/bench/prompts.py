"""Where the prompts of a load come from: text of aiperf's own, a file of records, or a public dataset.

Fields have the names of aiperf 0.13.0's flags.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trtx.bench.datasets.reading import count_records
from trtx.bench.images import Images
from trtx.bench.load_field import LoadField, field_records
from trtx.config.wording import shown

Corpus = Literal["sonnet", "coding", "random"]

# aiperf makes all prompts before it sends the first, and keeps a record of each request.
MAX_REQUESTS = 1_000_000
MAX_LENGTH = 10_000_000  # tokens; no published model has a longer context
MAX_TURNS = 10_000  # of a session, every one of which is made before the first is sent
MAX_DELAY_MS = 86_400_000.0  # a day

_NAMED = Field(default=None, min_length=1)
# Of drawn turns, how many standard errors of their sum the number of conversations leaves room for.
_SPARE_ERRORS = 3


class Prompts(Images):
    """The prompts of every request of a sweep, as flags or YAML give them."""

    prompt_corpus: Annotated[
        Corpus | None,
        LoadField(
            help="Text that prompts are cut from: sonnet, coding or random. Default: sonnet.",
            panel="Prompts",
            metavar="NAME",
            ignored=("dataset",),
            flag="--prompt-corpus",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        LoadField(
            help="Records or a trace in place of such text, with lengths of their own.",
            panel="Prompts",
            metavar="FILE",
            flag="--input-file",
        ),
    ] = None
    custom_dataset_type: Annotated[
        str | None,
        LoadField(
            help="What it holds, such as single_turn, multi_turn, mooncake_trace or sharegpt. Default: trtx looks.",
            panel="Prompts",
            metavar="TYPE",
            ignored=("public", "no file"),
            flag="--custom-dataset-type",
        ),
    ] = _NAMED
    public_dataset: Annotated[
        str | None,
        LoadField(
            help="One that aiperf downloads, such as sharegpt or spec_bench.",
            panel="Prompts",
            metavar="NAME",
            ignored=("file",),
            flag="--public-dataset",
        ),
    ] = _NAMED
    session_turns_mean: Annotated[
        int,
        LoadField(
            help="Requests of a conversation, each with all before it.",
            panel="Prompts",
            ignored=("dataset",),
            flag="--session-turns-mean",
        ),
    ] = Field(default=1, ge=1, le=MAX_TURNS)
    session_turns_stddev: Annotated[
        int,
        LoadField(
            help="Draw their number with this standard deviation.",
            panel="Prompts",
            ignored=("dataset", "one turn"),
            flag="--session-turns-stddev",
        ),
    ] = Field(default=0, ge=0, le=MAX_TURNS)
    session_turn_delay_mean: Annotated[
        float,
        LoadField(
            help="ms from an answer to the next turn.",
            panel="Prompts",
            ignored=("dataset", "one turn"),
            flag="--session-turn-delay-mean",
        ),
    ] = Field(default=0.0, ge=0, le=MAX_DELAY_MS, allow_inf_nan=False)
    session_turn_delay_stddev: Annotated[
        float,
        LoadField(
            help="Draw it with this standard deviation, in ms.",
            panel="Prompts",
            ignored=("dataset", "one turn", "no delay"),
            flag="--session-turn-delay-stddev",
        ),
    ] = Field(default=0.0, ge=0, le=MAX_DELAY_MS, allow_inf_nan=False)
    prefix_prompt_length: Annotated[
        int,
        LoadField(
            help="Tokens of a beginning that prompts share, a part of --isl.",
            panel="Prompts",
            ignored=("dataset",),
            flag="--prefix-prompt-length",
        ),
    ] = Field(default=0, ge=0, le=MAX_LENGTH)
    num_prefix_prompts: Annotated[
        int,
        LoadField(
            help="How many such beginnings; each prompt, or session, has one of them.",
            panel="Prompts",
            ignored=("dataset", "no prefix"),
        ),
    ] = Field(default=1, ge=1, le=MAX_REQUESTS)
    shared_system_prompt_length: Annotated[
        int,
        LoadField(
            help="Tokens of a system message before every prompt, a part of --isl.",
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
            raise ValueError("input_file and public_dataset are two datasets; leave one of them out")
        if self.custom_dataset_type is not None and self.input_file is None:
            raise ValueError("custom_dataset_type says what an input_file holds, and there is none; add one")
        for name, record in field_records(type(self)).items() if self.dataset is not None else ():
            value = getattr(self, name)
            if "dataset" in record.ignored and value and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} shapes what is made, and {self.dataset} has its own; leave it out")
        return self

    @model_validator(mode="after")
    def _whole(self) -> Prompts:
        if self.num_prefix_prompts > 1 and not self.prefix_prompt_length:
            raise ValueError("num_prefix_prompts counts prefixes, and prefix_prompt_length is 0; give them a length")
        if self.prefix_prompt_length and self.shared_system_prompt_length:
            raise ValueError(
                "prefix_prompt_length and shared_system_prompt_length are two ways to share a beginning; leave one out"
            )
        if self.session_turns_stddev and self.session_turns_mean == 1:
            raise ValueError("session_turns_stddev spreads session_turns_mean, which is 1; give more turns")
        if self.session_turn_delay_mean and not self.has_sessions:
            raise ValueError(
                "session_turn_delay_mean comes between turns, and session_turns_mean is 1; give more turns"
            )
        if self.session_turn_delay_stddev and not self.session_turn_delay_mean:
            raise ValueError("session_turn_delay_stddev spreads session_turn_delay_mean, which is 0; give a delay")
        return self

    @property
    def dataset(self) -> str | None:
        """What prompts are read from, as a person says it; None where aiperf makes them."""
        name = self.public_dataset if self.input_file is None else self.input_file.name
        return None if name is None else shown(name)

    @property
    def dataset_sha256(self) -> str | None:
        """Of what an ``input_file`` holds, wherever it lies and whatever it is called; None without one.

        All of it is read. Raises OSError where it can't be.
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
        """Requests of an ``input_file``, one a record; None where it can't be read. All of it is."""
        return None if self.input_file is None or self.input_file.is_dir() else count_records(self.input_file)

    @property
    def has_sessions(self) -> bool:
        """Requests are turns of conversations."""
        return self.session_turns_mean > 1

    @property
    def shared_length(self) -> int:
        """Tokens at the beginning of a prompt that other prompts have too."""
        return self.prefix_prompt_length + self.shared_system_prompt_length

    @property
    def sharing(self) -> Literal["unique", "shared"] | None:
        """Whether the load repeats prompts or their beginnings; None: it is for a dataset to say."""
        if self.dataset is not None:
            return None
        # A chat template may put images before the text: then those that come again are a beginning that prompts share.
        return "shared" if self.has_sessions or self.shared_length or self.repeats_images else "unique"

    @property
    def said(self) -> str:
        """In a few words, for a report; empty where each prompt is text of its own."""
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
        if self.images_said:
            parts.append(self.images_said)
        return ", ".join(parts)

    def conversation_count(self, requests: int, open_at_once: int) -> int:
        """Conversations that ``requests`` turns take, so that none comes twice: those still open when a phase ends
        have begun as well, and drawn numbers of turns may be small ones."""
        if not self.has_sessions:
            return requests
        needed = math.ceil(requests / self.session_turns_mean)
        spread = _SPARE_ERRORS * self.session_turns_stddev * math.sqrt(needed) / self.session_turns_mean
        return min(requests, needed + 2 * open_at_once + math.ceil(spread))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
