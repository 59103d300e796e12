"""Where the prompts of a load come from: text of aiperf's own, a file of records, or a public dataset.

Fields have the names of aiperf 0.13.0's flags.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trtx.config.wording import shown

Corpus = Literal["sonnet", "coding", "random"]

_NAMED = Field(default=None, min_length=1)
# Of drawn turns, how many standard errors of their sum the number of conversations leaves room for.
_SPARE_ERRORS = 3


class Prompts(BaseModel):
    """The prompts of every request of a sweep, as flags or YAML give them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_corpus: Corpus | None = None  # text that prompts are cut from; None: aiperf's default, sonnet
    input_file: Path | None = None  # records, or a directory of them, in place of such text
    custom_dataset_type: str | None = _NAMED  # aiperf's name of their form; None: aiperf looks at them
    public_dataset: str | None = _NAMED  # aiperf's name of one that it downloads
    session_turns_mean: int = Field(default=1, ge=1)  # requests of a conversation, each with all before it
    session_turns_stddev: int = Field(default=0, ge=0)
    session_turn_delay_mean: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # ms from an answer to the next turn
    session_turn_delay_stddev: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # ms
    prefix_prompt_length: int = Field(default=0, ge=0)  # tokens of a shared beginning; a part of isl
    num_prefix_prompts: int = Field(default=1, ge=1)  # such beginnings; each prompt, or session, has one of them
    shared_system_prompt_length: int = Field(default=0, ge=0)  # tokens of one system message; a part of isl

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
        synthetic = (
            "prompt_corpus", "session_turns_mean", "session_turns_stddev", "session_turn_delay_mean",
            "session_turn_delay_stddev", "num_prefix_prompts", "prefix_prompt_length", "shared_system_prompt_length",
        )  # fmt: skip
        for name in synthetic if self.dataset is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
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
        """Requests of an ``input_file`` that has one a line; None where it can't be read. All of it is."""
        try:
            with (self.input_file or Path()).open("rb") as file:
                return sum(not line.isspace() for line in file)
        except OSError:
            return None

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
        return "shared" if self.has_sessions or self.shared_length else "unique"

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
        return ", ".join(parts)

    def conversation_count(self, requests: int, open_at_once: int) -> int:
        """Conversations that ``requests`` turns take, so that none comes twice: those still open when a phase ends
        have begun as well, and drawn numbers of turns may be small ones."""
        if not self.has_sessions:
            return requests
        needed = math.ceil(requests / self.session_turns_mean)
        spread = _SPARE_ERRORS * self.session_turns_stddev * math.sqrt(needed) / self.session_turns_mean
        return min(requests, needed + 2 * open_at_once + math.ceil(spread))

    def prompt_flags(self) -> tuple[str, ...]:
        """What aiperf is told of the prompts beside their lengths and how many there are."""
        flags: list[str] = []
        if self.input_file is not None:
            flags += ["--input-file", str(self.input_file)]
        if self.prefix_prompt_length:  # aiperf has no prefix without their number
            flags += ["--num-prefix-prompts", str(self.num_prefix_prompts)]
        for name in sorted(Prompts.model_fields.keys() - {"input_file", "num_prefix_prompts"}):
            value = getattr(self, name)
            if value != Prompts.model_fields[name].default:
                flags += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
        return tuple(flags)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
