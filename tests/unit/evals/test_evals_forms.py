"""Samples and scores on disk: what is written is read, what was cut short is left out, what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.errors import UsageError
from trtx.evals import EVAL, Score, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.forms import SAMPLES, Judged, Sample, SampleRequest, SampleWriter, Unanswered, read_samples
from trtx.stats.intervals import Interval

TEXT = st.text(max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def sample(number: int = 0, doc: dict[str, Any] | None = None, value: Any = 1) -> Sample:
    asked = SampleRequest("generate_until", "7 + 5 =", None, {"until": ["\n"]}, " 12", None, None, "stop")
    return Sample(
        "sums", number, f"key-{number}", doc or {}, "12", (asked,), (Judged("none", ("12",), {"acc": value}),)
    )


@given(st.dictionaries(TEXT, PLAIN, max_size=3), PLAIN)
def test_a_sample_comes_back_as_it_was_written(doc: dict[str, Any], value: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        written = sample(3, doc, value)
        SampleWriter(Path(directory)).add(written)
        assert read_samples(Path(directory)) == (written,)


def test_a_line_that_was_cut_short_is_left_out_and_the_next_begins_its_own(tmp_path: Path) -> None:
    SampleWriter(tmp_path).add(sample(1))
    path = tmp_path / SAMPLES.file
    path.write_bytes(path.read_bytes() + path.read_bytes()[:40])
    assert [one.doc_id for one in read_samples(tmp_path)] == [1]
    SampleWriter(tmp_path).add(sample(2))
    assert [one.doc_id for one in read_samples(tmp_path)] == [1, 2]


def test_samples_are_replaced_at_once_in_the_order_given(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    for number in (2, 1):
        writer.add(sample(number))
    writer.replace([sample(1), sample(2)])
    assert [one.doc_id for one in read_samples(tmp_path)] == [1, 2]


def test_a_task_without_a_file_has_no_sample(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.pop("key"), ["line 1", "key is missing"]),
        (lambda fields: fields.update(doc_id="3"), ["line 1", 'doc_id is "3"']),
        (lambda fields: fields.update(schema_version=9), ["line 1", "schema_version 9"]),
    ],
)
def test_a_line_that_can_not_be_read_is_named_with_its_field(tmp_path: Path, change: Any, words: list[str]) -> None:
    SampleWriter(tmp_path).add(sample())
    path = tmp_path / SAMPLES.file
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields) + "\n")
    with pytest.raises(UsageError) as refused:
        read_samples(tmp_path)
    assert all(word in str(refused.value) for word in words)


def test_scores_come_back_as_they_were_written(tmp_path: Path) -> None:
    score = Score("acc", "none", Interval(0.5, 0.2, 0.8, 0.95), 0.5, "binomial", True, 0.25)
    task = ScoredTask("sums", "multiple_choice", "1", 0, 4, 2, (score,), (Unanswered("HTTP 500: no", 2, 1),))
    found = TopologyScores("agg", "0.4.13", "completions", "echo", 4, (task,))
    assert read_eval(tmp_path, "agg") is None
    EVAL.write(eval_directory(tmp_path, "agg"), found)
    assert read_eval(tmp_path, "agg") == found
    assert score.name == "acc" and str(task.unanswered[0]) == "sample 1: HTTP 500: no, and 1 more like it"
