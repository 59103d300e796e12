"""Records as users and other tools have them: read, or refused with file, line and field, before anything starts.

What is sent is asked of aiperf's own loaders.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from short_corpus import short_corpus

from trtx.bench import LoadSpec, Target, dataset_of
from trtx.bench.aiperf.command import command
from trtx.bench.aiperf.flags import check_load
from trtx.bench.datasets.values import BLOCK_TOKENS
from trtx.bench.owned_fields import OWNED_FIELDS
from trtx.bench.sent_dataset import prepare_dataset
from trtx.checkpoint import resolve_checkpoint
from trtx.cli.app import run
from trtx.errors import UsageError

pytestmark = pytest.mark.slow

CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "one two three"}]},
    {"id": "b", "conversations": [
        {"from": "system", "value": "be short"},
        {"from": "human", "value": "q1"}, {"from": "gpt", "value": "four"},
        {"from": "human", "value": "q2"}, {"from": "gpt", "value": "five six"},
    ]},
    {"id": "c", "conversations": [{"from": "human", "value": "not answered"}]},
]  # fmt: skip
BATCH = {
    "custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "gpt-4o", "messages": CHAT, "max_tokens": 5, "temperature": 0.25},
}  # fmt: skip


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@dataclass(frozen=True)
class Sent:
    """A turn as aiperf has it."""

    text: Any  # or messages
    max_tokens: int | None = None
    extra: dict[str, Any] | None = None


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def sent(spec: LoadSpec, tmp_path: Path) -> list[list[Sent]]:
    """What aiperf 0.13.0 makes of the file that it is given, conversation by conversation: its parser, its loaders."""
    from aiperf.common.tokenizer import Tokenizer
    from aiperf.config import BenchmarkRun
    from aiperf.config.flags.resolver import resolve_config
    from aiperf.config.loader import build_benchmark_plan
    from aiperf.dataset.composer.custom import CustomDatasetComposer

    from trtx.bench.aiperf.flags import _parsed

    tokenizer_path = resolve_checkpoint("synthetic:tiny-trained").path
    target = Target("http://127.0.0.1:9", "tiny", tokenizer_path, "agg")
    load = prepare_dataset(spec, tmp_path / "run", target)
    argv = command(target, load, load.loads[0], 1, tmp_path / "trial")
    if load.custom_dataset_type != "mooncake_trace":  # which wants text, though it is not sent
        argv = (*argv, "--prompt-corpus", "random")
    (config, *_) = build_benchmark_plan(resolve_config(_parsed(argv[2:]))).configs
    run = BenchmarkRun(benchmark_id="test", cfg=config, artifact_dir=tmp_path / "artifacts")
    with short_corpus(tmp_path):
        composer = CustomDatasetComposer(run=run, tokenizer=Tokenizer.from_pretrained(str(tokenizer_path)))
        conversations = composer.create_dataset()
    return [
        [
            Sent(turn.raw_messages or next(one for text in turn.texts for one in text.contents), turn.max_tokens,
                 turn.extra_body)
            for turn in conversation.turns
        ]
        for conversation in conversations
    ]  # fmt: skip


READ: dict[str, tuple[str, str | bytes, str, list[list[Sent]]]] = {
    "plain records": ("a.jsonl", lines({"text": "hi"}, {"text": "ho"}), "single_turn", [[Sent("hi")], [Sent("ho")]]),
    "lengths and extra": (
        "a.jsonl", lines({"text": "hi", "output_length": 3, "extra": {"temperature": 0.5}}), "single_turn",
        [[Sent("hi", 3, {"temperature": 0.5})]],
    ),
    "a mark and CRLF": ("a.jsonl", b"\xef\xbb\xbf" + b'{"text":"hi"}\r\n\r\n', "single_turn", [[Sent("hi")]]),
    "gzip": ("a.jsonl.gz", gzip.compress(b'{"text":"hi"}\n'), "single_turn", [[Sent("hi")]]),
    "gzip under another name": ("a.jsonl", gzip.compress(b'{"text":"hi"}\n'), "single_turn", [[Sent("hi")]]),
    "an array": ("a.json", json.dumps([{"text": "hi"}, {"text": "ho"}], indent=1), "single_turn",
                 [[Sent("hi")], [Sent("ho")]]),
    "lines of text": ("a.txt", "hi there\n\nho\n", "plain_text", [[Sent("hi there")], [Sent("ho")]]),
    "prompts": ("a.jsonl", lines({"prompt": "hi"}), "prompt", [[Sent("hi")]]),
    "vLLM's custom dataset": ("a.jsonl", lines({"prompt": "hi", "output_tokens": 4}), "prompt", [[Sent("hi", 4)]]),
    "a completion request": (
        "a.jsonl", lines({"prompt": "hi", "max_tokens": 4, "temperature": 0, "model": "x", "stream": True}), "prompt",
        [[Sent("hi", 4, {"temperature": 0})]],
    ),
    "a chat request": (
        "a.jsonl", lines({"messages": CHAT, "max_completion_tokens": 7, "top_p": 0.5, "model": "x"}), "openai_chat",
        [[Sent(CHAT, 7, {"top_p": 0.5})]],
    ),
    "chat requests of which the first has no limit": (
        "a.jsonl", lines({"messages": CHAT}, {"messages": CHAT, "max_tokens": 3}), "openai_chat",
        [[Sent(CHAT)], [Sent(CHAT, 3)]],
    ),
    "a batch file": ("a.jsonl", lines(BATCH), "openai_batch", [[Sent(CHAT, 5, {"temperature": 0.25})]]),
    "messages": ("a.jsonl", lines({"messages": CHAT, "output_length": 2}), "mooncake_trace", [[Sent(CHAT, 2)]]),
    "sessions": (
        "a.jsonl", lines({"session_id": "s", "turns": [{"text": "hi", "output_length": 3}, {"text": "ho"}]}),
        "multi_turn", [[Sent("hi", 3), Sent("ho")]],
    ),
}  # fmt: skip


# One of each form. aiperf takes a second to read a command line; make proof asks it about all of them.
FIRST_OF_A_FORM = {form: name for name, (_, _, form, _) in reversed(READ.items())}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_recognised_and_counted(tmp_path: Path, name: str) -> None:
    file, content, form, expected = READ[name]
    found = dataset_of(LoadSpec(input_file=written(tmp_path, file, content), concurrency=(1,), request_count=2))
    assert found is not None and found.form == form
    assert (found.records, found.requests) == (len(expected), sum(map(len, expected)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in FIRST_OF_A_FORM.values() else pytest.mark.proof) for one in READ],
)
def test_what_is_read_is_what_aiperf_sends(tmp_path: Path, name: str) -> None:
    file, content, _, expected = READ[name]
    spec = LoadSpec(input_file=written(tmp_path, file, content), concurrency=(1,), request_count=2)
    check_load(spec)
    assert sent(spec, tmp_path) == expected


@pytest.mark.slow
def test_a_conversation_of_sharegpt_asks_what_aiperfs_own_loader_of_it_asks(tmp_path: Path) -> None:
    from aiperf.dataset.loader.sharegpt import ShareGPTLoader
    from tokenizers import Tokenizer

    spec = LoadSpec(input_file=written(tmp_path, "a.json", json.dumps(SHAREGPT)), concurrency=(1,), request_count=3)
    check_load(spec)
    found = dataset_of(spec)
    assert found is not None and (found.form, found.records, found.requests) == ("sharegpt", 2, 3)
    assert "left out because they contain no answered question: 1 record" in found.description
    tokenizer = Tokenizer.from_file(str(resolve_checkpoint("synthetic:tiny-trained").path / "tokenizer.json"))
    expected = [
        [
            Sent(asked, len(tokenizer.encode(answer).ids))
            for asked, answer in ShareGPTLoader._sharegpt_prompt_completion_pairs(entry["conversations"])
        ]
        for entry in SHAREGPT[:2]
    ]
    assert sent(spec, tmp_path) == expected


def test_a_form_may_be_named_too(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", json.dumps(SHAREGPT))
    check_load(LoadSpec(input_file=path, custom_dataset_type="sharegpt"))
    with pytest.raises(UsageError, match="'sharegtp' is not a dataset format; did you mean sharegpt"):
        check_load(LoadSpec(input_file=path, custom_dataset_type="sharegtp"))
    with pytest.raises(
        UsageError, match="raw_payload sends each record as a complete request body.*messages, max_tokens"
    ):
        check_load(LoadSpec(input_file=path, custom_dataset_type="raw_payload"))


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "it has no record"),
    "blank lines": ("\n \n", "it has no record"),
    "an empty array": ("[]", "its array is empty"),
    "no objects": ("[1, 2]", "record 1: it is not an object"),
    "no object": (lines({"text": "a"}) + "3\n", "line 2: it is not an object"),
    "plain text": ("hello\n", r"line 1: it is not JSON.*a file name that ends in \.txt"),
    "a cut line": (lines({"text": "a"}) + '\n{"text": "b"\n', r"line 3: it is not JSON \(.*column"),
    "one object over "
    "lines": (json.dumps({"text": "a"}, indent=1), "line 1: it is not JSON.*one complete object per line"),
    "another encoding": ('{"text": "é"}'.encode("latin-1"), "line 1: it is not UTF-8"),
    "UTF-16": ('{"text": "é"}'.encode("utf-16"), "it is UTF-16"),
    "half of a character": ('{"text": "\\ud800"}', "line 1: it has half a Unicode character"),
    "a field twice": ('{"text": "a", "text": "b"}', "line 1: .*'text' occurs twice"),
    "NaN": ('{"text": "a", "timestamp": NaN}', "line 1: .*NaN is not a JSON value"),
    "a cut archive": (gzip.compress(b'{"text": "a"}' * 99)[:30], "can't be decompressed"),
    "a zip": (b"PK\x03\x04", "it is a zip archive"),
    "Parquet": (b"PAR1", "it is a Parquet file"),
    "a temperature": (lines({"text": "a"}, {"text": "a", "temperature": 1}), 'line 2: .*extra: {"temperature": …}'),
    "a limit": (lines({"text": "a", "max_tokens": 1}), "'max_tokens' of single_turn; did you mean output_length"),
    "a misspelt name": (lines({"text": "a", "outptu_length": 1}), "did you mean output_length"),
    "a misspelt field of a body": (lines({"text": "a", "temprature": 1}), 'did you mean extra: {"temperature": …}'),
    "an unknown field of a turn": (lines({"turns": [{"text": "a", "think": 2}]}), r"unknown field 'turns\[0\]\.think'"),
    "an unknown field of a text": (
        lines({"texts": [{"name": "n", "contents": ["a"], "lang": "de"}]}), r"unknown field 'texts\[0\]\.lang'",
    ),
    "Alpaca": (lines({"instruction": "a", "input": "", "output": "b"}), "'instruction' of .*; did you mean text"),
    "another form below": (lines({"text": "a"}, {"prompt": "b"}), "line 2: its format is prompt, but earlier"),
    "a session "
    "below": (lines({"prompt": "a"}, {"turns": [{"text": "b"}]}), "line 2: its format is multi_turn, but earlier"),
    "a name of another case": (lines({"Text": "a"}), "unknown field 'Text' of single_turn; did you mean text"),
    "true for a length": (lines({"text": "a", "output_length": True}), "line 1: output_length is true"),
    "true for a length of a turn": (
        lines({"turns": [{"text": "a", "output_length": True}]}), r"line 1: turns\[0\]\.output_length is true",
    ),
    "more blocks than tokens": (
        lines({"input_length": 5, "output_length": 1, "hash_ids": [1, 2]}), "hash_ids has 2 blocks of 512 ",
    ),
    "no role of the API": (
        lines({"messages": [{"role": "robot", "content": "a"}]}), r"messages\[0\]\.role is 'robot'; expected one of",
    ),
    "no content": (lines({"messages": [{"role": "user"}]}), r"line 1: messages\[0\]\.content is missing"),
    "a number for content": (
        lines({**BATCH, "body": {"messages": [{"role": "user", "content": 5}]}}), r"messages\[0\]\.content is 5",
    ),
    "a word for a number": (lines({"messages": CHAT, "temperature": "hot"}), "line 1: temperature is 'hot'; expected"),
    "what is measured, in nvext": (
        lines({"text": "a", "extra": {"nvext": {"ignore_eos": True}}}), r"extra\.nvext\.ignore_eos is set by trtx",
    ),
    "another method": (lines({**BATCH, "method": "GET"}), "method is 'GET'; expected POST"),
    "no output tokens": (lines({"prompt": "a", "output_tokens": 0}), "line 1: output_tokens is 0"),
    "a misspelt field of messages alone": (lines({"messages": CHAT, "max_tokns": 1}), "did you mean max_tokens"),
    "no length at all": (lines({"text": "a", "output_length": 0}), "line 1: output_length: .*greater than 0"),
    "a negative length": (lines({"input_length": 4, "output_length": -1}), "line 1: output_length is -1"),
    "half a token": (lines({"text": "a", "output_length": 1.5}), "line 1: output_length: .*integer"),
    "no turns": (lines({"turns": []}), "line 1: At least one turn"),
    "null for text": (lines({"text": None}), "line 1: it has no content; expected text"),
    "a limit in "
    "extra": (lines({"text": "a", "extra": {"max_tokens": 1}}), r"extra\.max_tokens .*set output_length instead"),
    "a whole body": (lines({"payload": {"messages": CHAT}}), "line 1: payload is a complete request body"),
    "no picture": (lines({"text": "a", "image": "nope.png"}), "line 1: image is 'nope.png', and there is no such file"),
    "several choices": (lines({"messages": CHAT, "n": 2, "max_tokens": 1}), "line 1: n is 2"),
    "a misspelt field of a request": (lines({"messages": CHAT, "max_tokens": 1, "temprature": 1}), "mean temperature"),
    "embeddings": (lines({**BATCH, "url": "/v1/embeddings"}), "url is '/v1/embeddings'"),
    "two lengths": (lines({"prompt": "a", "output_tokens": 1, "max_tokens": 2}), "both set the output length"),
    "a role of a tool": (
        json.dumps([{"conversations": [{"from": "tool", "value": "x"}]}]), r"record 1: conversations\[0\]\.from is",
    ),
    "nothing that is "
    "answered": (json.dumps([SHAREGPT[2]]), "none of its records contains a request in the format sharegpt"),
    "a temperature of a conversation": (json.dumps([{**SHAREGPT[0], "temperature": 1}]), "'temperature' of sharegpt"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_file_line_and_field(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    path = written(tmp_path, "records.jsonl", content)
    with pytest.raises(UsageError, match=said) as refused:
        check_load(LoadSpec(input_file=path))
    assert str(refused.value).startswith("input_file ") and "records.jsonl'" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 900


def test_every_field_that_aiperf_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    """The rule: of each form, and each name one letter away from one of its own."""
    from trtx.bench.datasets.checking import _models

    least = {
        "single_turn": {"text": "a"}, "random_pool": {"text": "a"}, "mooncake_trace": {"text_input": "a"},
        "multi_turn": {"turns": [{"text": "a"}]},
    }  # fmt: skip
    for form, model in _models().items():
        for name in model.model_fields:
            wrong = f"{name}x"
            path = written(tmp_path, f"{form}-{wrong}.jsonl", lines(least[form], {**least[form], wrong: 1}))
            with pytest.raises(UsageError, match=f"line 2: unknown field '{wrong}' of {form}"):
                check_load(LoadSpec(input_file=path, custom_dataset_type=form))


@pytest.mark.parametrize("name", list(OWNED_FIELDS))
def test_no_record_changes_what_is_measured(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, "a.jsonl", lines({"text": "a", "extra": {name: 1}}))
    with pytest.raises(UsageError, match=rf"extra\.{name} is set by trtx, because it would change what is measured"):
        check_load(LoadSpec(input_file=path))


@pytest.mark.parametrize("form", [None, "mooncake_trace"])
def test_a_trace_needs_a_time_in_each_record_and_may_name_its_form(tmp_path: Path, form: str | None) -> None:
    timed = {"timestamp": 0, "input_length": 9, "output_length": 2}
    path = written(tmp_path, "trace.jsonl", lines(timed))
    check_load(LoadSpec(input_file=path, custom_dataset_type=form, fixed_schedule=True))
    path = written(tmp_path, "lacks.jsonl", lines(timed, {"input_length": 9}))
    with pytest.raises(UsageError, match="line 2: timestamp is missing"):
        check_load(LoadSpec(input_file=path, custom_dataset_type=form, fixed_schedule=True))


def test_pools_of_a_directory_are_checked_each(tmp_path: Path) -> None:
    pools = tmp_path / "pools"
    pools.mkdir()
    with pytest.raises(UsageError, match="an empty directory"):
        check_load(LoadSpec(input_file=pools))
    written(pools, "a.jsonl", lines({"text": "a"}))
    check_load(LoadSpec(input_file=pools))
    written(pools, "b.jsonl", lines({"text": "a", "output_length": 3}))
    with pytest.raises(UsageError, match=r"b\.jsonl', line 1: unknown field 'output_length' of random_pool"):
        check_load(LoadSpec(input_file=pools))


@pytest.mark.parametrize(
    ("record", "words", "said"),
    [
        ({"text": "a"}, [], "single_turn: 1 record, 1 request; output lengths: –"),
        ({"text": "a"}, ["--custom-dataset-type", "random_pool"], "random_pool: 1 record, 1 request"),
        (
            {"timestamp": 0, "input_length": 9, "output_length": 2},
            ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule"],
            "mooncake_trace: 1 record, 1 request; output lengths: 2",
        ),
    ],
)
def test_a_dry_run_says_what_was_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], words: list[str], said: str
) -> None:
    path = written(tmp_path, "records.jsonl", lines(record))
    served = ["--model", "synthetic:tiny", "--engine", "paced"]
    assert run(["bench", *served, "--input-file", str(path), *words, "--dry-run", "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"records: {said}" in out and f"--custom-dataset-type {said.partition(':')[0]}" in out


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": CHAT, "temperature": 5, "max_tokens": 4}, "line 1: temperature is 5, but Dynamo's frontend"),
        ({"text": "a", "extra": {"top_k": -3}}, "line 1: top_k is -3, but Dynamo's frontend"),
        ({"input_length": 9000, "output_length": 9}, "line 1: its prompt and answer have 9,009 tokens"),
        ({"text": "a", "output_length": 100_000}, "line 1: its prompt and answer have 100,000 tokens"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, "records.jsonl", lines(record))
    served = ["--model", "synthetic:tiny", "--engine", "paced"]
    assert run(["bench", *served, "--input-file", str(path), "--dry-run", "-o", str(tmp_path)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("record", [{"text": "a", "output_length": 3}, SHAREGPT[0]])
def test_an_osl_beside_lengths_of_all_records_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    path = written(tmp_path, "records.jsonl", lines(record))
    with pytest.raises(UsageError, match="osl has no effect with input_file"):
        check_load(LoadSpec(input_file=path, osl=(8,)))
    short = written(tmp_path, "short.jsonl", lines({"text": "a", "output_length": 3}, {"text": "b"}))
    check_load(LoadSpec(input_file=short, osl=(8,)))


def test_aiperf_says_nothing_of_a_file_that_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "records.jsonl", '{"text": "a", "output_length": NaN}')
    with pytest.raises(UsageError, match="NaN is not a JSON value"):
        check_load(LoadSpec(input_file=path))
    assert not caplog.records


def test_the_size_of_a_block_is_aiperfs_own() -> None:
    from aiperf.plugin import plugins
    from aiperf.plugin.enums import PluginType

    entry = plugins.get_entry(PluginType.CUSTOM_DATASET_LOADER, "mooncake_trace")
    assert entry.metadata["default_block_size"] == BLOCK_TOKENS
