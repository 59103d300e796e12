"""Loads of agents: recorded conversations with tools, and sessions for aiperf's agentic replay."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from short_corpus import short_corpus

from trtx.bench import LoadSpec, Target, dataset_of
from trtx.bench.aiperf.command import command
from trtx.bench.aiperf.flags import check_load
from trtx.bench.sent_dataset import asks_formats, check_guidance, prepare_dataset
from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / "sweeps" / "agents"
SCENARIO = {"scenario": "inferencex-agentx-mvp", "input_file": str(AGENTS / "sessions")}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = [{"role": "user", "content": "a"}]
RESULT = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "b"}]
FORMAT = {"response_format": {"type": "json_object"}}
TARGET = Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg")


def written(directory: Path, *records: Any) -> Path:
    path = directory / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversation(*turns: dict[str, Any], **said: Any) -> dict[str, Any]:
    return {"turns": [*turns], **said}


TURNS = (
    {"messages": ASKED, "tool_choice": "required", "max_tokens": 5},
    {"messages": RESULT, "tools": None, "delay": 70, **FORMAT},
)


def bodies(spec: LoadSpec, directory: Path) -> list[list[dict[str, Any]]]:
    """The bodies that aiperf 0.13.0 sends, conversation by conversation, with the delays before them."""
    from aiperf.common.enums import CreditPhase
    from aiperf.common.models import RequestInfo
    from aiperf.common.models.model_endpoint_info import ModelEndpointInfo
    from aiperf.common.tokenizer import Tokenizer
    from aiperf.config import BenchmarkRun
    from aiperf.config.flags.resolver import resolve_config
    from aiperf.config.loader import build_benchmark_plan
    from aiperf.dataset.composer.custom import CustomDatasetComposer
    from aiperf.plugin import plugins

    from trtx.bench.aiperf.flags import _parsed

    tokenizer = resolve_checkpoint("synthetic:tiny-trained").path
    target = Target("http://127.0.0.1:9", "tiny", tokenizer, "agg")
    load = prepare_dataset(spec, directory / "run", target)
    argv = command(target, load, load.loads[0], 1, directory / "trial")
    (config, *_) = build_benchmark_plan(resolve_config(_parsed(argv[2:]))).configs
    run = BenchmarkRun(benchmark_id="test", cfg=config, artifact_dir=directory / "artifacts")
    described = ModelEndpointInfo.from_run(run)
    endpoint = plugins.get_class("endpoint", "trtx_chat")(model_endpoint=described)
    with short_corpus(directory):
        composer = CustomDatasetComposer(run=run, tokenizer=Tokenizer.from_pretrained(str(tokenizer)))
        found = composer.create_dataset()

    def body(turn: Any) -> dict[str, Any]:
        info = RequestInfo(
            model_endpoint=described, turns=[turn], turn_index=0, credit_num=0, credit_phase=CreditPhase.PROFILING,
            x_request_id="", x_correlation_id="", conversation_id="",
        )  # fmt: skip
        return {**endpoint.format_payload(info), "delay": turn.delay}

    assert all(one.context_mode == "message_array_with_responses" for one in found), "each turn has its whole context"
    return [[body(turn) for turn in one.turns] for one in found]


@pytest.mark.slow
def test_each_turn_is_sent_with_the_recorded_messages_before_it_and_its_own_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path, conversation(*TURNS, tools=[TOOL], temperature=0.5), conversation({"messages": ASKED}, session_id="s")
    )
    (first, second), (alone,) = bodies(LoadSpec(input_file=path), tmp_path)
    own = {"model", "stream", "stream_options"}
    assert {name: first[name] for name in first.keys() - own} == {
        "messages": ASKED, "tools": [TOOL], "tool_choice": "required", "max_completion_tokens": 5, "temperature": 0.5,
        "delay": None,
    }  # fmt: skip
    assert {name: second[name] for name in second.keys() - own} == {
        "messages": [*ASKED, *RESULT], **FORMAT, "temperature": 0.5, "delay": 70,
    }  # fmt: skip
    assert alone["messages"] == ASKED and "tools" not in alone


@pytest.mark.slow
def test_chat_requests_of_one_session_are_turns_and_keep_their_schemas(tmp_path: Path) -> None:
    asks = {"messages": ASKED, "guided_choice": ["x"], "session_id": "s"}
    path = written(tmp_path, asks, {**asks, "delay": 30}, {"messages": ASKED, "max_tokens": 3})
    found = bodies(LoadSpec(input_file=path), tmp_path)
    assert [[one.get("guided_choice") for one in session] for session in found] == [[["x"], ["x"]], [None]]
    assert found[0][1]["delay"] == 30


def test_a_dry_run_says_how_many_requests_ask_for_a_format_and_have_tools(tmp_path: Path) -> None:
    dataset = dataset_of(LoadSpec(input_file=written(tmp_path, conversation(*TURNS, tools=[TOOL]))))
    assert dataset is not None and dataset.description.startswith(
        "openai_turns, sent as mooncake_trace: 1 record, 2 requests"
    )
    assert "with a format of the answer: 1 request; with tools: 1 request" in dataset.description


REFUSED = {
    "no turn": (conversation(), "turns is not a list of requests"),
    "a turn without messages": (conversation(TURNS[0], {"max_tokens": 3}), "turns[1].messages is not a list"),
    "no recorded answer": (
        conversation(TURNS[0], {"messages": ASKED}), "turns[1].messages[0] has the role 'user'; expected the",
    ),
    "an answer at the end": (
        conversation({"messages": [*ASKED, {"role": "assistant", "content": "b"}]}), "ends with an answer of the",
    ),
    "messages twice": (conversation(TURNS[0], messages=ASKED), "messages belongs to a turn"),
    "a result of no call": (
        conversation({"messages": ASKED}, {"messages": [{"role": "assistant", "content": "b"}, RESULT[1]]}),
        "turns[1].messages[1].tool_call_id is '1'; expected the id of a call",
    ),
    "a call without an id": (
        conversation({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, *ASKED]}),
        "turns[0].messages[0].tool_calls[0] is",
    ),
    "arguments that are no text": (
        {"messages": [{**RESULT[0], "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}, *ASKED]},
        "messages[0].tool_calls[0].function.arguments is not text",
    ),
    "a delay before all": (conversation({**TURNS[0], "delay": 5}, tools=[TOOL]), "turns[0].delay is 5, but no answer"),
    "an unknown field of a turn": (conversation({**TURNS[0], "respons_format": {}}), "'turns[0].respons_format'"),
    "a forced call without tools": (conversation(TURNS[0]), "turns[0].tool_choice is required, but the request has no"),
    "no schema": (
        {"messages": ASKED, "guided_json": {"type": "strin"}}, "guided_json.type is not a JSON schema: 'strin'",
    ),
    "no schema in extra": ({"text": "a", "extra": {"guided_choice": []}}, "guided_choice is []; expected a list"),
    "two formats": ({"messages": ASKED, **FORMAT, "guided_regex": "a"}, "guided_regex and response_format both set"),
    "a delay of no session": ({"messages": ASKED, "delay": 3, "max_tokens": 3}, "delay has no effect without a"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sent_is_refused_with_its_line_and_field(tmp_path: Path, name: str) -> None:
    record, said = REFUSED[name]
    before = {"text": "a"} if "text" in record else {"messages": ASKED, "max_tokens": 3}
    path = written(tmp_path, conversation({"messages": ASKED}) if "turns" in record else before, record)
    with pytest.raises(UsageError) as refused:
        check_load(LoadSpec(input_file=path))
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 900
    assert "line 2: " in str(refused.value)


def test_two_records_of_one_session_are_refused(tmp_path: Path) -> None:
    one = conversation({"messages": ASKED}, session_id="s")
    with pytest.raises(UsageError, match="line 2: session_id is 's', which line 1 has too"):
        check_load(LoadSpec(input_file=written(tmp_path, one, one)))


def test_a_topology_without_guided_decoding_is_refused_for_the_first_record_that_needs_it(tmp_path: Path) -> None:
    offers = {"messages": ASKED, "tools": [TOOL]}
    free = LoadSpec(input_file=written(tmp_path, offers))
    check_guidance(free, "it has none")
    (tmp_path / "b").mkdir()
    bound = LoadSpec(input_file=written(tmp_path / "b", offers, {**offers, "tool_choice": "required"}))
    with pytest.raises(UsageError, match="line 2: it asks for structured output, but it has none"):
        check_guidance(bound, "it has none")
    with pytest.raises(UsageError, match="extra_inputs asks for structured output, but it has none"):
        check_guidance(LoadSpec.model_validate({"extra_inputs": {"guided_regex": "a"}}), "it has none")


def test_bodies_are_kept_only_of_loads_that_may_ask_for_a_format(tmp_path: Path) -> None:
    assert not asks_formats(LoadSpec()) and not asks_formats(LoadSpec.model_validate(SCENARIO))
    assert asks_formats(LoadSpec.model_validate({"extra_inputs": {"guided_regex": "a"}}))
    path = written(tmp_path, {"messages": ASKED, "max_tokens": 3})
    assert not asks_formats(LoadSpec(input_file=path))
    path.write_text(json.dumps({"messages": ASKED, "tools": [TOOL]}) + "\n")
    assert asks_formats(LoadSpec(input_file=path))


def test_pauses_of_a_file_leave_no_concurrency_to_be_held(tmp_path: Path) -> None:
    paused = LoadSpec(input_file=written(tmp_path, conversation(*TURNS, tools=[TOOL])))
    assert paused.held_concurrency(paused.loads[0]) is None
    plain = LoadSpec(input_file=written(tmp_path, conversation(TURNS[0], tools=[TOOL])))
    assert plain.held_concurrency(plain.loads[0]) == 1


def test_the_files_of_the_sweeps_are_those_that_their_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "agent_load.py"), str(tmp_path)], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {path.relative_to(AGENTS): path.read_bytes() for path in AGENTS.rglob("*") if path.is_file()}


def test_a_scenario_replays_all_sessions_until_its_request_count() -> None:
    spec = LoadSpec.model_validate({**SCENARIO, "concurrency": [2], "request_count": 5})
    check_load(spec)
    words = command(TARGET, spec, spec.loads[0], 1, Path("trial"))
    asked = dict(pairwise(words))
    assert (asked["--scenario"], asked["--custom-dataset-type"]) == (SCENARIO["scenario"], "weka_trace")
    assert (asked["--request-count"], asked["--num-dataset-entries"]) == ("5", "1000000")
    assert "--unsafe-override" in words and not {"--request-rate", "--warmup-request-count"} & asked.keys()
    assert spec.held_concurrency(spec.loads[0]) is None and "agentic replay" in spec.description
    dataset = dataset_of(spec)
    assert dataset is not None and dataset.description == "weka_trace: 8 records, 48 requests; output lengths: 8 to 24"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"input_file": None}, "replays agent sessions, but there are none"),
        ({"custom_dataset_type": "single_turn"}, "expected an input_file with custom_dataset_type weka_trace"),
        ({"request_rate": [1]}, "leave request_rate and fixed_schedule out"),
        ({"streaming": False}, "sets streaming and ignore_eos to true; leave both out"),
        ({"ignore_eos": False}, "sets streaming and ignore_eos to true; leave both out"),
        ({"warmup_request_count": 3}, "has its own warm-up"),
        ({"scenario": "other"}, "inferencex-agentx-mvp"),
    ],
)
def test_what_a_scenario_decides_itself_is_refused(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LoadSpec.model_validate(SCENARIO | said)


def test_a_scenario_is_not_set_past_the_load() -> None:
    for words in (("--scenario", "inferencex-agentx-mvp"), ("--unsafe-override",)):
        with pytest.raises(UsageError, match=r"use --scenario, or load\.scenario of a sweep file"):
            check_load(LoadSpec(aiperf_args=words))


SESSION = json.loads((AGENTS / "sessions" / "session-01.json").read_text())


@pytest.mark.parametrize(
    ("name", "session", "problem"),
    [
        ("b.json", {**SESSION, "id": "a", "hash_id_scope": "global"}, "hash_id_scope: Input should be 'local'"),
        ("b.json", {**SESSION, "id": "a", "requests": []}, "it has no request"),
        ("b.json", {**SESSION, "id": "a", "temperature": 1}, "temperature: Extra inputs are not permitted"),
        ("b.json", SESSION, "which is the id of a.json too"),
        ("b.json", 3, "expected a session of aiperf's weka_trace"),
    ],
)
def test_a_session_that_aiperf_cannot_replay_is_refused_with_its_file(
    tmp_path: Path, name: str, session: Any, problem: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SESSION))
    (tmp_path / name).write_text(json.dumps(session))
    with pytest.raises(UsageError) as refused:
        check_load(LoadSpec.model_validate({**SCENARIO, "input_file": str(tmp_path)}))
    assert problem in str(refused.value) and name in str(refused.value) and "\n" not in str(refused.value)
