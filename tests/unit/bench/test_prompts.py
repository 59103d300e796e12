"""Prompts as users have them: what aiperf is asked for, what is known of their lengths, what is refused."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trtx.bench import LoadSpec, Target
from trtx.bench.aiperf.command import command
from trtx.bench.aiperf.flags import check_load, owned
from trtx.bench.load_field import load_flags
from trtx.errors import UsageError

pytestmark = pytest.mark.slow

TARGET = Target("http://127.0.0.1:8000", "tiny", Path("/models/tiny"), "agg")


def asked(**fields: Any) -> dict[str, str]:
    """aiperf's flags of the first load, each with its value."""
    spec = LoadSpec.model_validate({"concurrency": [2], "request_count": 12, "warmup_request_count": 4, **fields})
    argv = command(TARGET, spec, spec.loads[0], 1, Path("/trial"))
    return dict(pairwise(argv))


def test_what_prompts_share_is_a_part_of_the_input_length() -> None:
    """aiperf puts it before --isl tokens of its own."""
    assert asked(isl=100, prefix_prompt_length=60)["--isl"] == "40"
    assert asked(isl=100, shared_system_prompt_length=30)["--isl"] == "70"
    assert LoadSpec(isl=(100,), prefix_prompt_length=60).loads[0].isl == 100
    with pytest.raises(ValidationError, match="64 tokens of every prompt are shared, but isl is only 64"):
        LoadSpec(isl=(64, 128), prefix_prompt_length=64)


def test_a_prefix_is_one_unless_more_are_asked() -> None:
    assert asked(prefix_prompt_length=60)["--num-prefix-prompts"] == "1"
    assert asked(prefix_prompt_length=60, num_prefix_prompts=5)["--num-prefix-prompts"] == "5"
    assert "--num-prefix-prompts" not in asked()


def test_a_dataset_has_lengths_and_ends_of_its_own(tmp_path: Path) -> None:
    flags = asked(input_file=tmp_path)
    assert not {"--isl", "--osl"} & flags.keys()
    load = LoadSpec(input_file=tmp_path).loads[0]
    assert (load.label, load.isl, load.osl) == ("c1", None, None)
    spec = LoadSpec(public_dataset="sharegpt", osl=(32,))
    assert not spec.ignore_eos and spec.request_body(spec.loads[0]) == {}
    assert spec.loads[0].osl == 32, "for records that ask for no length"
    asked_to_go_on = LoadSpec(public_dataset="sharegpt", osl=(32,), ignore_eos=True)
    assert asked_to_go_on.request_body(asked_to_go_on.loads[0]) == {"ignore_eos": True}, "a record may ask for less"


def test_a_trace_is_sent_as_the_load_says_not_by_its_own_times(tmp_path: Path) -> None:
    assert "--no-fixed-schedule" in asked(input_file=tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"public_dataset": "sharegpt", "isl": 64}, "isl has no effect with sharegpt, which has its own"),
        ({"public_dataset": "sharegpt", "isl_stddev": 4}, "isl_stddev has no effect with"),
        ({"public_dataset": "sharegpt", "session_turns_mean": 2}, "session_turns_mean has no effect with"),
        ({"public_dataset": "sharegpt", "osl_stddev": 4}, "osl_stddev has no effect with"),
        ({"public_dataset": "sharegpt", "input_file": "a"}, "each name a dataset"),
        ({"custom_dataset_type": "single_turn"}, "custom_dataset_type is the format of an input_file"),
        ({"session_turns_stddev": 1}, "session_turns_stddev has no effect while session_turns_mean is 1"),
        ({"session_turn_delay_mean": 1}, "session_turn_delay_mean has no effect while"),
        ({"session_turns_mean": 2, "session_turn_delay_stddev": 1}, "has no effect while session_turn_delay_mean is 0"),
        ({"num_prefix_prompts": 2}, "num_prefix_prompts has no effect while prefix_prompt_length is 0"),
        ({"prefix_prompt_length": 2, "shared_system_prompt_length": 2}, "both make prompts share a prefix"),
        ({"isl": []}, "isl is an empty list"),
        ({"extra_inputs": {"temperature": float("nan")}}, "extra_inputs.temperature is not a JSON value"),
    ],
)
def test_what_would_mean_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LoadSpec.model_validate(fields)


def test_what_is_unique_and_what_is_shared() -> None:
    assert LoadSpec().sharing == "unique" == LoadSpec(prompt_corpus="random").sharing
    for fields in ({"session_turns_mean": 2}, {"prefix_prompt_length": 9}, {"shared_system_prompt_length": 9}):
        assert LoadSpec.model_validate(fields).sharing == "shared"
    assert LoadSpec(public_dataset="sharegpt").sharing is None, "nobody looked"


def test_pauses_leave_a_slot_of_a_closed_loop_empty() -> None:
    spec = LoadSpec(concurrency=(4,), session_turns_mean=3)
    assert spec.held_concurrency(spec.loads[0]) == 4
    spec = LoadSpec(concurrency=(4,), session_turns_mean=3, session_turn_delay_mean=5)
    assert spec.held_concurrency(spec.loads[0]) is None


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 12), st.integers(1, 64))
def test_no_conversation_comes_twice(warm_up: int, measured: int, turns: int, open_at_once: int) -> None:
    """At worst, each phase ends with as many conversations open as there are slots, of one turn each."""
    begun = 0
    for phase in (warm_up, measured):
        open_ones = min(open_at_once, phase)
        begun += open_ones + (phase - open_ones) // turns
    count = LoadSpec(session_turns_mean=turns).conversation_count(warm_up + measured, open_at_once)
    assert begun <= count <= warm_up + measured


def test_drawn_turns_have_spare_conversations_as_some_are_short() -> None:
    exact, drawn = (LoadSpec(session_turns_mean=4, session_turns_stddev=spread) for spread in (0, 3))
    assert drawn.conversation_count(400, 1) >= exact.conversation_count(400, 1) + 3 * 3 / 4 * 10


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"input_file": "/no/such.jsonl"},
            "input_file '/no/such.jsonl' can't be read; expected a file of records",
        ),
        ({"public_dataset": "nope"}, "dataset nope: aiperf refuses it"),
        (
            {"input_file": __file__, "custom_dataset_type": "nope"},
            "custom_dataset_type 'nope' is not a dataset format; expected one of single_turn",
        ),
        ({"aiperf_args": ["--bogus"]}, "--aiperf-args --bogus: aiperf refuses it (Unknown option: --bogus"),
        ({"aiperf_args": ["--slice-duration", "x"]}, "valid number"),
        ({"aiperf_args": ["--slice-duration"]}, "requires an argument"),
        ({"aiperf_args": ["stray"]}, "stray"),
        ({"aiperf_args": ["-m", "x"]}, "sets model_names"),
        ({"aiperf_args": ["--num-requests", "4"]}, "use --request-count, or load.request_count of a sweep"),
        ({"aiperf_args": ["--streaming"]}, "use load.streaming of a sweep file"),
        ({"aiperf_args": ["--url"]}, "sets urls, which trtx"),
        ({"aiperf_args": ["--slice-duration", "2", "-u", "http://127.0.0.1:9"]}, "use --url"),
        ({"aiperf_args": ["--model"]}, "use --model"),
        ({"aiperf_args": ["--artifact-dir=elsewhere"]}, "use -o"),
        ({"aiperf_args": ["--endpoint", "/v1/completions"]}, "sets custom_endpoint"),
        ({"aiperf_args": ["--api-key", "hidden"]}, "sets api_key"),
        ({"aiperf_args": ["--header", "authorization:Bearer hidden"]}, "OPENAI_API_KEY"),
        ({"aiperf_args": ["--config", "x.yaml"]}, "sets config_file"),
    ],
)
def test_what_aiperf_would_end_over_is_told_before_anything_starts(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_load(LoadSpec.model_validate(fields))
    said = str(refused.value)
    assert words in said and "\n" not in said and len(said) < 900 and "hidden" not in said


def test_a_pipe_is_no_dataset(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="can't be read"):
        check_load(LoadSpec(input_file=tmp_path / "pipe"))


def test_what_aiperf_takes_passes_and_reaches_it(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"text": f"question {i}"}) + "\n" for i in range(3)))
    for fields in (
        {"input_file": records},
        {"input_file": records, "custom_dataset_type": "single_turn", "osl": 8, "request_rate": [2.0]},
        {"public_dataset": "sharegpt"},
        {"aiperf_args": ["--slice-duration", "2"], "prefix_prompt_length": 16, "num_prefix_prompts": 2},
    ):
        check_load(LoadSpec.model_validate(fields))
    assert asked(aiperf_args=["--slice-duration", "2"])["--slice-duration"] == "2"


def test_what_is_refused_says_a_field_that_there_is() -> None:
    from aiperf.config.flags import CLIConfig

    assert not owned().keys() - CLIConfig.model_fields.keys()
    assert not {field for field in owned().values() if field} - LoadSpec.model_fields.keys()


def test_a_flag_that_a_field_has_is_refused_under_each_of_its_names() -> None:
    flags = {flag: name for name, flag in load_flags(LoadSpec).items()}
    assert set(flags.values()) <= set(owned().values()), "aiperf has no such flag"
    with pytest.raises(UsageError, match="sets prompt_input_tokens_stddev, which trtx.*load.isl_stddev"):
        check_load(LoadSpec(aiperf_args=("--synthetic-input-tokens-stddev", "3")))


def _trace(tmp_path: Path, requests: int = 3) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": {n}, "input_length": 9, "output_length": 2}}\n\n' for n in range(requests))
    )
    return path


def test_a_trace_is_sent_by_its_own_times_in_one_cell_of_all_its_requests(tmp_path: Path) -> None:
    spec = LoadSpec.model_validate({"input_file": str(_trace(tmp_path)), "fixed_schedule": True})
    (load,) = spec.loads
    assert (load.label, load.concurrency, load.request_rate, load.asked) == ("trace", None, None, "its own times")
    assert (load.request_count, load.warmup_request_count) == (3, 0)
    argv = command(TARGET, spec, load, 1, tmp_path / "trial")
    assert "--fixed-schedule" in argv and "mooncake_trace" in argv
    assert not {"--no-fixed-schedule", "--concurrency", "--request-rate", "--arrival-pattern"} & {*argv}
    assert spec.held_concurrency(load) is None
    assert LoadSpec.model_validate_json(spec.model_dump_json()) == spec  # as a lock keeps it


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": [4]}, "concurrency and fixed_schedule both set when requests are sent"),
        ({"request_rate": [4]}, "request_rate and fixed_schedule both set when"),
        ({"arrival": "poisson"}, "arrival has no effect without a request_rate"),
        ({"request_count": 2}, "request_count is 2, but all 3 requests of trace.jsonl are sent"),
        ({"custom_dataset_type": "single_turn"}, "expected an input_file with custom_dataset_type mooncake_trace"),
        ({"input_file": None}, "the times of a trace, but there is no trace; expected an input_file"),
        ({"input_file": "."}, "is not a trace with one request per line; expected a file with at least one request"),
        ({"input_file": "/dev/null"}, "null is not a trace with one request per line"),
    ],
)
def test_what_says_otherwise_when_a_trace_is_sent_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    said = {"input_file": str(_trace(tmp_path)), "fixed_schedule": True, **changes}
    with pytest.raises(ValueError, match=words):
        LoadSpec.model_validate(said)


def test_a_trace_that_is_not_there_is_told_as_any_dataset_is(tmp_path: Path) -> None:
    spec = LoadSpec.model_validate({"input_file": str(tmp_path / "no.jsonl"), "fixed_schedule": True})
    with pytest.raises(UsageError, match="can't be read"):
        check_load(spec)
