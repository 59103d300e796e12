"""Checks the records of an ``input_file`` with aiperf 0.13.0's models, and writes the copy that aiperf reads.

aiperf's models validate the values. They accept unknown fields, which aiperf's loaders then drop, so
``field_names.py`` checks the names.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.bench.datasets.agent_sessions import AGENT_SESSIONS, read_sessions
from trtx.bench.datasets.aiperf_loaders import loader_of, recognised
from trtx.bench.datasets.contents import Dataset, RecordTally
from trtx.bench.datasets.field_names import check_names, sentence_of
from trtx.bench.datasets.forms import (
    FOREIGN,
    MULTI_TURN,
    OPENAI_TURNS,
    RANDOM_POOL,
    SINGLE_TURN,
    TRACE,
    Converted,
    ForeignForm,
    foreign_form,
)
from trtx.bench.datasets.reading import Record, RecordFile, open_records
from trtx.bench.datasets.values import BLOCK_TOKENS, check_values, refuse_booleans
from trtx.bench.datasets.wrong_record import WrongRecord
from trtx.config.wording import quoted
from trtx.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

# Forms whose records are complete request bodies. aiperf sends them unchanged, without the load's settings.
_VERBATIM = ("raw_payload", "inputs_json")


def read_dataset(
    path: Path, form: str | None, *, is_scheduled: bool, block_tokens: int | None = BLOCK_TOKENS
) -> Dataset:
    """Reads and checks every record. Raises UsageError, which names file, line and field.

    ``form``: the value of ``custom_dataset_type``. ``is_scheduled``: every record must have a timestamp.
    ``block_tokens``: the number of tokens per entry of a trace's ``hash_ids``; None: set in aiperf's arguments, so not
    checked. Imports aiperf.
    """
    from aiperf.plugin.enums import CustomDatasetType

    if form in _VERBATIM:
        raise UsageError(
            f"custom_dataset_type {form} sends each record as a complete request body, without the load's settings; "
            "leave it out: trtx reads records with messages, max_tokens and other fields of a chat request"
        )
    known = (*_models(), *FOREIGN, *map(str, CustomDatasetType))
    if form is not None and form not in known:
        near = difflib.get_close_matches(form, known, n=1)
        hint = f"did you mean {near[0]}" if near else f"expected one of {', '.join((*_models(), *FOREIGN))}"
        raise UsageError(
            f"custom_dataset_type {quoted(form)} is not a dataset format; {hint}, use another one that aiperf profile "
            "--help lists, or leave it out"
        )
    if form == AGENT_SESSIONS:
        return _agent_sessions(path)
    if path.is_dir():
        return _directory(path, form)
    native = form is None or form in _models() or form in FOREIGN
    if not native:
        assert form is not None
        return Dataset(path, form, loader_of(path, CustomDatasetType(form)))
    try:
        source = open_records(path)
        next(iter(source))
    except UsageError:  # for example a table, which one of aiperf's loaders recognises by its file name
        if form is None and (found := recognised(path, None, without=_known_here())) is not None:
            return _of_aiperf(path, found)
        raise
    checked = _Checked(source, form, is_scheduled=is_scheduled, block_tokens=block_tokens)
    if checked.aiperfs is not None:
        return _of_aiperf(path, checked.aiperfs)
    tally = RecordTally()
    for _ in checked.walk(tally):
        pass
    return checked.found(tally)


def write_records(dataset: Dataset, copy: Path, tokenizer_path: Path) -> None:
    """Writes the copy that aiperf reads instead: one record per line, in aiperf's form. Raises UsageError."""
    from trtx.text import load_tokenizer

    tokenizer = None
    copy.parent.mkdir(parents=True, exist_ok=True)
    checked = _Checked(open_records(dataset.path), dataset.form, is_scheduled=False)
    with copy.open("w", encoding="utf-8") as file:
        for converted in checked.walk(RecordTally()):
            for value in converted.values:
                if converted.answers:
                    tokenizer = tokenizer or load_tokenizer(tokenizer_path)
                    lengths = iter([max(1, len(tokenizer.encode(text).ids)) for text in converted.answers])
                    turns = [
                        turn if turn.get("role") == "system" else {**turn, "output_length": next(lengths)}
                        for turn in value["turns"]
                    ]
                    value = {**value, "turns": turns}
                file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _models() -> Mapping[str, type[BaseModel]]:
    from aiperf.dataset.loader.models import MooncakeTrace, MultiTurn, RandomPool, SingleTurn

    return {SINGLE_TURN: SingleTurn, MULTI_TURN: MultiTurn, RANDOM_POOL: RandomPool, TRACE: MooncakeTrace}


def _known_here() -> tuple[str, ...]:
    """The aiperf forms that trtx checks itself or refuses."""
    return (*_models(), *_VERBATIM)


def _of_aiperf(path: Path, form: str) -> Dataset:
    """A dataset in a form that aiperf's loader has recognised."""
    return _agent_sessions(path) if form == AGENT_SESSIONS else Dataset(path, form, form)


def _agent_sessions(path: Path) -> Dataset:
    found = read_sessions(path)
    return Dataset(
        path, AGENT_SESSIONS, AGENT_SESSIONS, False, found.sessions, found.requests, found.lengths,
        has_all_lengths=True, most=found.most, asks_formats=False,
    )  # fmt: skip


def _directory(path: Path, form: str | None) -> Dataset:
    """Checks a directory: one pool per file, or a form whose aiperf loader reads the whole directory."""
    if form is not None and form != RANDOM_POOL:
        if form in _models() or form in FOREIGN:
            raise UsageError(f"input_file {quoted(str(path))} is a directory; expected one file for {form}")
        from aiperf.plugin.enums import CustomDatasetType

        return Dataset(path, form, loader_of(path, CustomDatasetType(form)))
    files = sorted(file for file in path.iterdir() if file.is_file())
    if form is None and (found := recognised(path, None, without=_known_here())) is not None:
        return _of_aiperf(path, found)
    if not files:
        raise UsageError(f"input_file {quoted(str(path))} is an empty directory; expected files with records")
    tally = RecordTally()
    for file in files:
        checked = _Checked(open_records(file), RANDOM_POOL, is_scheduled=False)
        if not checked.source.is_lines or file.suffix == ".gz":
            checked.source.refuse(
                "", "expected one JSON object per line, uncompressed, in each file of a directory; convert it"
            )
        for _ in checked.walk(tally):
            pass
    return Dataset(path, RANDOM_POOL, RANDOM_POOL, False, tally.records, tally.records, "–")


class _Checked:
    """Checks the records of one file. All of them must have the form of the first record."""

    def __init__(
        self, source: RecordFile, form: str | None, *, is_scheduled: bool, block_tokens: int | None = None
    ) -> None:
        self.source, self.is_scheduled, self.block_tokens = source, is_scheduled, block_tokens
        self.models = _models()
        self.aiperfs: str | None = None
        first = next(iter(source))
        self.foreign: ForeignForm | None = FOREIGN.get(form or "")
        self.is_guessed = form is None
        if source.is_text and form in (None, "plain_text"):
            form, self.foreign = "plain_text", FOREIGN["plain_text"]
        elif source.is_text:
            source.refuse(
                first.where,
                f"it is plain text; expected one JSON object per line for {form}, or no custom_dataset_type",
            )
        elif form == "plain_text":
            source.refuse(
                first.where, "it is JSON; expected plain text with one prompt per line, or no custom_dataset_type"
            )
        elif form is None:
            form = self._guess(first)
        if self.aiperfs is None and self.is_scheduled and form != TRACE:
            source.refuse(
                first.where, f"its format is {form}, but fixed_schedule needs {TRACE}; leave fixed_schedule out"
            )
        self.form = form

    def _guess(self, first: Record) -> str:
        record = first.value
        kind = record.get("type")
        if isinstance(kind, str) and kind in self.models:
            return kind
        trace = frozenset(self.models[TRACE].model_fields)
        self.foreign = foreign_form(record, trace)
        if self.foreign is not None:
            return self.foreign.name
        if "turns" in record:
            return MULTI_TURN
        own = {name for name, model in self.models.items() if self._is_one(record, model)}
        if TRACE in own and SINGLE_TURN not in own:
            self.aiperfs = (
                None if self._fits(record, TRACE) else recognised(self.source.path, record, without=_known_here())
            )
            return self.aiperfs or TRACE
        if SINGLE_TURN in own:
            return SINGLE_TURN
        self.aiperfs = recognised(self.source.path, record, without=_known_here())
        if self.aiperfs is not None:
            return self.aiperfs
        if record.keys() & {"input_length", "text_input", "messages", "payload", "hash_ids"}:
            return TRACE
        return SINGLE_TURN

    def _form_of(self, record: Record) -> str | None:
        """Guesses a record's form from its field names; None if they don't determine it."""
        if not self.is_guessed or self.source.is_text:
            return None
        foreign = foreign_form(record.value, frozenset(self.models[TRACE].model_fields))
        if foreign is not None:
            return foreign.name
        if "turns" in record.value:
            return MULTI_TURN
        return next((name for name in (SINGLE_TURN, TRACE) if self._is_one(record.value, self.models[name])), None)

    def _is_one(self, record: Any, model: type[BaseModel]) -> bool:
        from pydantic import ValidationError

        try:
            model.model_validate(record)
        except ValidationError:
            return False
        return True

    def _fits(self, record: Mapping[str, Any], form: str) -> bool:
        """Whether every field of a record belongs to the form."""
        return not record.keys() - set(self.models[form].model_fields)

    @property
    def sent_as(self) -> str:
        return self.foreign.sent_as if self.foreign is not None else str(self.form)

    def _converted(self, record: Record, sessions: dict[str, str]) -> Converted:
        """A record in aiperf's form. ``sessions``: the record of each session so far, as only one may have its id."""
        converted = self.foreign.convert(record.value) if self.foreign else Converted((record.value,))
        if self.form != OPENAI_TURNS:
            return converted
        name = converted.values[0]["session_id"]
        if name is None:
            name = f"{self.source.path.name} {record.where}"
        if (other := sessions.setdefault(name, record.where)) != record.where:
            raise WrongRecord(f"session_id is {quoted(name)}, which {other} has too; give each record its own")
        return replace(converted, values=tuple({**value, "session_id": name} for value in converted.values))

    def walk(self, tally: RecordTally) -> Iterator[Converted]:
        """Checks each record and yields it in aiperf's form, except those that contain no request."""
        sessions: dict[str, str] = {}
        for record in self.source:
            try:
                converted = self._converted(record, sessions)
                tally.unsent.update(dict.fromkeys(converted.unsent))
                if not converted.values:
                    tally.skipped += 1
                    continue
                tally.add(record.where, self._turns(converted.values), len(converted.answers))
            except WrongRecord as error:
                other = self._form_of(record) if error.field is not None else None
                if other not in (None, self.form):
                    self.source.refuse(
                        record.where,
                        f"its format is {other}, but earlier records are {self.form}; write all records in one format",
                    )
                self.source.refuse(record.where, sentence_of(error, self.form))
            yield converted
        if not tally.records:
            self.source.refuse(
                "", f"none of its records contains a request in the format {self.form}; expected at least one"
            )

    def found(self, tally: RecordTally) -> Dataset:
        is_copied = self.foreign is not None or not self.source.is_lines
        return Dataset(
            self.source.path, str(self.form), self.sent_as, is_copied, tally.records, tally.requests,
            self._lengths(tally), tuple(tally.notes()),
            self.form == "sharegpt" or 0 < tally.known == tally.requests, tally.most,
            tuple((where, name, value) for name, ends in tally.numbers.items() for where, value in ends),
            tally.guided, bool(tally.with_format or tally.with_tools),
        )  # fmt: skip

    def _lengths(self, tally: RecordTally) -> str:
        if self.form == "sharegpt":
            return "the lengths of the answers in the file, in the model's tokens"
        return tally.lengths()

    def _turns(self, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The turns of a record that become requests, parsed by aiperf's model. Raises WrongRecord."""
        if self.form != OPENAI_TURNS:
            return [turn for value in values for turn in self._turns_of(value)]
        return [turn for number, value in enumerate(values) for turn in self._turns_of(value, f"turns[{number}].")]

    def _turns_of(self, value: Mapping[str, Any], prefix: str = "") -> list[Any]:
        from pydantic import ValidationError

        model = self.models[self.sent_as]
        check_names(value, model)
        refuse_booleans(value, prefix)
        try:
            parsed: Any = model.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            if message.startswith("At least one modality"):  # every field of the turn is empty
                raise WrongRecord(f"{where.lstrip('.') or 'it'} has no content; expected text") from error
            raise WrongRecord(f"{prefix}{where.lstrip('.')}: {message}" if where else message) from error
        turns = list(parsed.turns) if self.sent_as == MULTI_TURN else [parsed]
        for number, turn in enumerate(turns):
            of = f"turns[{number}]." if self.sent_as == MULTI_TURN else prefix
            check_values(turn, of, is_scheduled=self.is_scheduled, block_tokens=self.block_tokens)
        asked = [turn for turn in turns if getattr(turn, "role", None) != "system" or len(turns) == 1]
        return [_NoLength() for _ in asked] if self.sent_as == RANDOM_POOL else asked


@dataclass(frozen=True, slots=True)
class _NoLength:
    output_length: None = None
