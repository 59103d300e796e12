"""Tasks, requests and scores inside the session: what lm-eval asks, and every fault of a task as one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from loopback import Handler, serving
from tokenizers import Tokenizer

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.evals import TopologyScores, needle
from trtx.evals.forms import Sample, SampleRequest, ScoredTask, read_samples
from trtx.evals.messages import Endpoint, EvalJob, EvalProgress, NeedleAsked
from trtx.evals.session import scoring
from trtx.evals.session.asking import TopologyTasks
from trtx.evals.session.client import ServerGone, ServerRefusal, retry_after
from trtx.evals.session.loaded_tasks import OWN_TASKS, LoadedTasks, version_of
from trtx.evals.session.loading import ALIASES, load_tasks, task_manager
from trtx.evals.session.model import MOST_STOPS, Chat, ServedModel, TooLong
from trtx.evals.session.prompt_logprobs import EngineData

ROWS = [{"question": f"{number} + 12 =", "answer": str(number + 12)} for number in range(10, 22)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_checkpoint("synthetic:tiny-trained").path)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A task folder: ``sums`` with the rows given, and what else is said of it."""

    def make(rows: list[dict[str, Any]] = ROWS, more: str = "", **files: str) -> Path:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "sums.yaml").write_text(
            f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
            "output_type: generate_until\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
            f'generation_kwargs: {{until: ["\\n"]}}\n{more}'
        )
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return tmp_path

    return make


def job(*tasks: str, folder: Path | None = None, **more: Any) -> EvalJob:
    fields: dict[str, Any] = {"limit": 12, "num_fewshot": None, "endpoint_type": "completions", "concurrency": 1}
    task_dir = None if folder is None else str(folder)
    return EvalJob(tasks=tasks, task_dir=task_dir, tokenizer=None, **fields | more)


def load(asked: EvalJob, tokenizer: Any = None) -> LoadedTasks:
    return load_tasks(asked, ServedModel(tokenizer, endpoint_type=asked.endpoint_type))


def test_a_folder_of_tasks_is_read_and_its_samples_have_keys_of_what_they_ask(folder: Callable[..., Path]) -> None:
    loaded = load(job("sums", folder=folder()))
    (task,) = loaded.tasks
    assert [one.doc["answer"] for one in task.documents] == [row["answer"] for row in ROWS]
    assert len({one.key for one in task.documents}) == len(ROWS)
    again = load(job("sums", folder=folder(), num_fewshot=None))
    assert [one.key for one in again.tasks[0].documents] == [one.key for one in task.documents]
    shot = load(job("trtx_copying", num_fewshot=1)).tasks[0].documents[0]
    assert (
        shot.instances[0].args[0].count("\n") == 1 and shot.key != load(job("trtx_copying")).tasks[0].documents[0].key
    )


def test_a_task_that_is_named_twice_is_refused() -> None:
    twice = ["task trtx_copying would be scored twice: it is part of trtx, and named by itself; leave one of them out"]
    refused(job("trtx_copying", "trtx"), twice)
    refused(job("trtx", "trtx_copying"), twice)


def test_a_metric_is_known_as_a_share_unless_the_task_computes_it_itself(folder: Callable[..., Path]) -> None:
    assert load(job("trtx_copying", "trtx_json")).shares == {
        "trtx_copying": ("exact_match",),
        "trtx_json": ("schema_compliance", "json_validity", "exact_match"),
    }
    judge = "def judge(doc, results):\n    return {'acc': 80.0}\n"
    more = "process_results: !function judge.judge\nmetric_list: [{metric: acc, aggregation: mean}]\n"
    assert load(job("sums", folder=folder(more=more, judge_py=judge))).shares == {}


def test_a_task_without_a_version_has_none(folder: Callable[..., Path]) -> None:
    assert version_of(load(job("sums", folder=folder())).tasks[0].task) is None
    assert version_of(load(job("sums", folder=folder(more="metadata: {version: 0}\n"))).tasks[0].task) == "0"


def refused(asked: EvalJob, words: list[str]) -> str:
    with pytest.raises(UsageError) as error:
        load(asked)
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), said
    return said


def test_a_row_that_lacks_a_field_is_named_with_it(folder: Callable[..., Path]) -> None:
    rows = [*ROWS[:3], {"question": "1 + 1 ="}, *ROWS[3:]]
    refused(job("sums", folder=folder(rows)), ["task sums: row 3", "has no value for 'answer'"])
    refused(job("sums", folder=folder([{"question": "1", "answer": None}])), ["has no value for 'answer'"])
    refused(job("sums", folder=folder([{"q": "1"}])), ["task sums: row 0", "'question' is undefined"])


@pytest.mark.proof
def test_a_dataset_that_is_not_there_says_how_to_bring_it(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As HF_HUB_OFFLINE=1 does where it is set before the import: else the hub is asked for half a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    at = folder()
    (at / "rows.jsonl").unlink()
    refused(job("sums", folder=at), [f"task sums: its data file {at / 'rows.jsonl'} is not there"])
    hub = at / "hub.yaml"
    hub.write_text((at / "sums.yaml").read_text().replace("task: sums", "task: hub").replace("json\n", "nobody/none\n"))
    refused(job("hub", folder=at), ["task hub needs the dataset nobody/none", "bring the cache here"])


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_data_file_without_rows_is_named(folder: Callable[..., Path], text: str) -> None:
    at = folder()
    (at / "rows.jsonl").write_text(text)
    refused(job("sums", folder=at), [f"task sums: {at / 'rows.jsonl'} has no rows"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "1 + 1 =", "answer": "2", "answer": "3"}', "'answer' occurs twice in one object; keep one"),
        ('{"question": "1 + 1 =", "answer": "2"', "can't be read (Expecting ',' delimiter"),
        ('["1 + 1 =", "2"]', "holds a list"),
        ('{"question": "1 + 1 =", "answer": "2", "weight": NaN}', "NaN is not a JSON number"),
    ],
)
def test_a_line_of_a_data_file_that_is_no_row_is_named(folder: Callable[..., Path], line: str, words: str) -> None:
    at = folder()
    rows = (at / "rows.jsonl").read_text().splitlines(keepends=True)
    (at / "rows.jsonl").write_text("".join([*rows[:3], line + "\n", *rows[3:]]))
    refused(job("sums", folder=at), [f"task sums: {at / 'rows.jsonl'}, line 4 ", words])


def test_a_data_file_that_is_one_document_of_several_lines_is_read(folder: Callable[..., Path]) -> None:
    at = folder()
    (at / "rows.jsonl").write_text(json.dumps(ROWS, indent=1))
    assert len(load(job("sums", folder=at)).tasks[0].documents) == len(ROWS)
    (at / "rows.jsonl").write_text(json.dumps(ROWS, indent=1).replace('"answer"', '"question"', 1))
    refused(job("sums", folder=at), ["rows.jsonl can't be read ('question' occurs twice in one object; keep one)"])


def test_a_folder_or_a_file_in_it_that_can_not_be_read(folder: Callable[..., Path], tmp_path: Path) -> None:
    refused(job("sums", folder=tmp_path / "none"), ["--task-dir", "is not a directory"])
    refused(job("odd", folder=folder(odd_yaml="task: odd\noutput_type: sing\n")), ["task odd can't be loaded", "sing"])


def test_a_key_that_stands_twice_in_a_tasks_file_is_named_with_its_line(folder: Callable[..., Path]) -> None:
    at = folder(more="test_split: other\n")
    refused(job("sums", folder=at), [f"task sums: {at / 'sums.yaml'}, line 9: 'test_split' occurs twice; keep one"])


@pytest.mark.proof  # it reads lm-eval's 14,000 task files
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("task: mine\n  bad: [\n", "mine.yaml, line 2: this is not YAML"),
        ("- 1\n", "mine.yaml holds no keys; expected those of a task"),
        ("", "mine.yaml holds no keys"),
        ("task: other\noutput_type: generate_until\n", "has other, sums; expected one of its names"),
    ],
)
def test_a_file_that_holds_no_such_task_is_named(folder: Callable[..., Path], text: str, words: str) -> None:
    refused(job("zzz_mine", folder=folder(mine_yaml=text)), ["no task is called 'zzz_mine'", words])


def test_more_examples_than_there_are_is_refused() -> None:
    refused(job("trtx_copying", num_fewshot=500), ["trtx_copying has fewer examples than the 500", "--num-fewshot"])


def test_log_likelihood_without_a_tokenizer_is_refused() -> None:
    refused(job("trtx_arithmetic_choice"), ["trtx_arithmetic_choice scores log-probabilities", "--tokenizer"])


def test_a_chat_with_a_model_without_template_is_refused(tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(UsageError, match="has no chat template, which --endpoint-type chat needs"):
        load(job("trtx_copying", endpoint_type="chat"), bare)


def test_a_generation_is_sent_with_the_stops_that_servers_take(tokenizer: Any) -> None:
    stops = [f"stop {number}" for number in range(6)]
    asked = Instance("generate_until", {}, ("a b", {"until": stops, "max_gen_toks": 9, "do_sample": False}), 0)
    (question,) = ServedModel(tokenizer).questions(asked)
    assert question.path == "completions"
    assert question.body == {
        "prompt": tokenizer("a b")["input_ids"], "max_tokens": 9, "temperature": 0.0, "seed": 1234,
        "stop": stops[:MOST_STOPS],
    }  # fmt: skip
    (repeated,) = ServedModel(tokenizer).questions(asked, repeat=1)
    assert repeated.body["seed"] == 1235
    found = ServedModel(tokenizer).asked(asked, [{"choices": [{"text": "so stop 5 no", "finish_reason": "stop"}]}])
    assert isinstance(found, SampleRequest) and found.text == "so "  # the last two are cut here


def test_a_chat_is_sent_as_messages_and_one_to_go_on_with_as_tokens(tokenizer: Any) -> None:
    model = ServedModel(tokenizer, endpoint_type="chat")
    messages = [{"role": "user", "content": "hello"}]
    prompt = model.messages(messages)
    assert isinstance(prompt, Chat)
    (question,) = model.questions(Instance("generate_until", {}, (prompt, {}), 0))
    assert question.path == "chat/completions" and question.body["messages"] == messages
    begun = model.messages([*messages, {"role": "assistant", "content": "It is"}], add_generation_prompt=False)
    (question,) = model.questions(Instance("generate_until", {}, (begun, {}), 0))
    assert question.path == "completions" and tokenizer.decode(question.body["prompt"]).endswith("It is")


def test_a_prompt_that_does_not_fit_is_told_with_its_length(tokenizer: Any) -> None:
    model = ServedModel(tokenizer, context_length=20, route=EngineData())
    with pytest.raises(TooLong, match="asks for 16 more, and the engine's context holds 20"):
        model.questions(Instance("generate_until", {}, ("one two three four five six", {"max_gen_toks": 16}), 0))
    with pytest.raises(TooLong, match="context holds 20"):
        model.questions(Instance("loglikelihood", {}, ("one " * 30, "two"), 0))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (None, "has no choices"),
        ([], "has no choices"),
        ([3], "the answer's choice is a whole number; expected an object"),
        ([{"text": "a"}, {"text": "b"}], "has 2 choices; expected one"),
        ([{}], "has no text"),
        ([{"text": 5}], "text is a whole number"),
        ([{"message": None}], "has no content"),
    ],
)
def test_an_answer_without_a_text_is_refused(choices: Any, reason: str) -> None:
    ended = [one | {"finish_reason": "stop"} if isinstance(one, dict) else one for one in choices or []]
    assert reason in refusal(choices and ended)


def refusal(choices: Any) -> str:
    found = ServedModel().asked(Instance("generate_until", {}, ("a", {}), 0), [{"choices": choices}])
    assert isinstance(found, ServerRefusal), found
    return found.reason


@pytest.mark.parametrize("reason", ["error", "cancelled", "abort", "content_filter", 7])
def test_an_answer_that_ended_early_is_refused_with_its_finish_reason(reason: object) -> None:
    assert refusal([{"text": "12", "finish_reason": reason}]) == f"ended early with finish_reason {reason!r}"


def test_an_answer_without_a_finish_reason_is_refused() -> None:
    assert refusal([{"text": "12"}]) == refusal([{"text": "12", "finish_reason": None}]) == "cut off: no finish_reason"


def test_a_text_that_is_null_is_no_answer_and_says_what_stands_beside_it() -> None:
    assert refusal([{"text": None, "finish_reason": "stop"}]) == "the answer's text is null; expected text"
    for beside in ("reasoning_content", "tool_calls"):
        message = {"content": None, "reasoning_content": "", beside: ["so"]}
        found = refusal([{"message": message, "finish_reason": "stop"}])
        assert found == f"the answer's content is null, beside {beside}; expected text"


@pytest.mark.parametrize("tokens", [0, 1])  # of a stop string, and of an end token, as Dynamo 1.4.2 counts them
def test_an_answer_that_stopped_at_once_is_an_empty_one(tokens: int) -> None:
    choice = {"message": {"content": None, "reasoning_content": None}, "finish_reason": "stop"}
    asked = Instance("generate_until", {}, ("a", {}), 0)
    found = ServedModel().asked(asked, [{"choices": [choice], "usage": {"completion_tokens": tokens}}])
    assert isinstance(found, SampleRequest) and (found.text, found.finish_reason) == ("", "stop")
    for other, usage in (
        (choice, {"completion_tokens": 2}),  # of which none was shown
        (choice, {"completion_tokens": None}),
        (choice, None),
        (choice | {"finish_reason": "length"}, {"completion_tokens": tokens}),
        (choice | {"message": {"content": None, "reasoning_content": "so"}}, {"completion_tokens": tokens}),
    ):
        assert isinstance(ServedModel().asked(asked, [{"choices": [other], "usage": usage}]), ServerRefusal)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "function_call"])
def test_an_answer_that_came_to_its_end_is_one(reason: str) -> None:
    asked = Instance("generate_until", {}, ("a", {}), 0)
    found = ServedModel().asked(asked, [{"choices": [{"message": {"content": "12"}, "finish_reason": reason}]}])
    assert isinstance(found, SampleRequest) and (found.text, found.finish_reason) == ("12", reason)


def answered(task: Any, texts: list[str]) -> list[Sample]:
    documents = task.documents[: len(texts)]
    asked = [[SampleRequest("generate_until", "", None, {}, text, None, None, "stop")] for text in texts]
    judged = scoring.judge(task.task, documents, asked)
    return [
        Sample(task.name, one.doc_id, one.key, {}, None, tuple(answers), of)
        for one, answers, of in zip(documents, asked, judged, strict=True)
    ]


def test_a_score_is_that_of_lm_evals_metric_over_the_filtered_answers() -> None:
    (task,) = load(job("trtx_copying")).tasks
    right = [f" {one.doc['answer']} " for one in task.documents[:6]]
    (score,) = scoring.scores(task.task, answered(task, [*right[:5], "no"]))
    assert (score.metric, score.kind) == ("exact_match", "binomial") and score.value == pytest.approx(5 / 6)


def test_what_answers_are_graded_by_is_noted_and_no_request_says_it(folder: Callable[..., Path]) -> None:
    def noted(rows: list[dict[str, Any]] = ROWS, more: str = "", **files: str) -> tuple[str | None, list[str]]:
        (task,) = load(job("sums", folder=folder(rows, more, **files))).tasks
        return scoring.grading(task.task, task.documents), [one.key for one in task.documents]

    judge = "def judge(doc, results):\n    return {'acc': float(results[0] == doc['answer'])}\n"
    own = "process_results: !function judge.judge\nmetric_list: [{metric: acc, aggregation: mean}]\n"
    found = [
        noted(),
        noted([{**ROWS[0], "answer": "none"}, *ROWS[1:]]),
        noted(more="metric_list: [{metric: exact_match, aggregation: mean, ignore_case: true}]\n"),
        noted(more="filter_list: [{name: first, filter: [{function: take_first}]}]\n"),
        noted(more=own, judge_py=judge),
        noted(more=own, judge_py=judge.replace("==", "in")),
    ]
    assert len({grading for grading, _ in found} - {None}) == len(found)
    assert all(keys == found[0][1] for _, keys in found)
    assert noted() == found[0] and noted(more=own, judge_py=judge) == found[-2]


def test_a_metric_that_is_no_number_names_the_sample(folder: Callable[..., Path]) -> None:
    judge = "def judge(doc, results):\n    return {'odd': float('nan') if results[0] == 'x' else 1.0}\n"
    more = "process_results: !function judge.judge\nmetric_list: [{metric: odd, aggregation: mean}]\n"
    (task,) = load(job("sums", folder=folder(more=more, judge_py=judge))).tasks
    with pytest.raises(scoring.NoNumber, match="metric odd of sample 2 is 'nan', expected a number"):
        scoring.scores(task.task, answered(task, ["a", "b", "x"]))


def test_a_group_is_weighted_as_lm_eval_weights_it(folder: Callable[..., Path]) -> None:
    group = (
        "group: all\ntask: [sums, trtx_copying]\naggregate_metric_list: "
        "[{metric: exact_match, aggregation: mean, weight_by_size: true}]\n"
    )
    more = "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    loaded = load(job("all", folder=folder(more=more, all_yaml=group)))
    samples = {"sums": answered(loaded.tasks[0], ["22", "no", "no"]), "trtx_copying": answered(loaded.tasks[1], ["no"])}
    scored = {
        one.name: ScoredTask(one.name, "generate_until", "1", 0, 3, len(samples[one.name]),
                             scoring.scores(one.task, samples[one.name]), ())
        for one in loaded.tasks
    }  # fmt: skip
    found = scoring.group_scores(loaded.groups[0], scored, samples)
    assert found is not None and found.subtasks == ("sums", "trtx_copying")
    (score,) = found.scores
    assert score.value == pytest.approx(1 / 4) and score.interval is not None and score.interval.estimate == 1 / 4


@pytest.mark.parametrize("endpoint_type", ["completions", "chat"])
def test_a_needles_length_is_in_the_tokens_that_are_sent(tokenizer: Any, endpoint_type: str) -> None:
    """Of ``synthetic:tiny-trained``: its list of names, up to the whole context."""
    asked = NeedleAsked((64, 300), (0, 100), 1)
    found = load(job("needle", needle=asked, context_length=300, endpoint_type=endpoint_type), tokenizer)
    (task,) = found.tasks
    assert [(one.doc["length"], one.doc["depth"]) for one in task.documents] == [
        (64, 0),
        (64, 100),
        (300, 0),
        (300, 100),
    ]
    model = ServedModel(tokenizer, endpoint_type=endpoint_type, context_length=300)  # type: ignore[arg-type]
    for one in task.documents:
        (question,) = model.questions(one.instances[0])
        room = one.doc["length"] - question.body["max_tokens"] - one.doc["prompt_tokens"]
        assert question.body["max_tokens"] == needle.ANSWER_TOKENS and 0 <= room < 8 and "stop" not in question.body
        sent = question.body.get("prompt")
        if sent is None:
            ids = tokenizer.apply_chat_template(question.body["messages"], add_generation_prompt=True)["input_ids"]
        else:
            ids = sent  # as token ids, as log-probabilities are asked
        assert len(ids) == one.doc["prompt_tokens"]
        assert one.doc["haystack"] == "look-up"
    assert found.metrics == {"needle": ("acc",)}


def test_prose_hides_the_needle_from_any_other_model(tokenizer: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer)
    other.name_or_path = str(tmp_path)
    (task,) = load(job("needle", needle=NeedleAsked((600,), (50,), 2), context_length=600), other).tasks
    assert {one.doc["haystack"] for one in task.documents} == {"prose"}
    assert "special number" in task.documents[0].instances[0].args[0]
    refused(
        job("needle", needle=NeedleAsked((601,)), context_length=600),
        ["no tokenizer is on this machine", "--tokenizer"],
    )
    with pytest.raises(UsageError, match="--needle-lengths 601 exceeds the context length of 600 tokens"):
        load(job("needle", needle=NeedleAsked((601,)), context_length=600), other)


def test_perplexity_scores_each_text_as_it_stands_and_counts_its_tokens(tokenizer: Any, tmp_path: Path) -> None:
    """What lm-eval would read as a list, or a template fill in, is text like any other."""
    texts = ["[1, 2]", "{{line}} man", *(f"The king number {number} saw the sea." for number in range(10))]
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(texts))
    (task,) = load(job("perplexity", text=str(path)), tokenizer).tasks
    assert [one.instances[0].args for one in task.documents] == [(text,) for text in texts]
    logprobs = [-2.5 * (number + 3) for number in range(12)]
    asked = [[SampleRequest("loglikelihood_rolling", "", None, {}, None, one, None, None)] for one in logprobs]
    judged = scoring.judge(task.task, task.documents, asked)
    found = scoring.scores(task.task, [
        Sample("perplexity", one.doc_id, one.key, {}, None, (), of)
        for one, of in zip(task.documents, judged, strict=True)
    ])  # fmt: skip
    sizes = {
        "token_perplexity": sum(len(tokenizer.encode(text)) for text in texts),
        "word_perplexity": sum(len(text.split()) for text in texts),
        "byte_perplexity": sum(len(text.encode()) for text in texts),
    }
    of_metric = {score.metric: score for score in found}
    for metric, size in sizes.items():
        assert of_metric[metric].value == pytest.approx(math.exp(-sum(logprobs) / size))
    assert of_metric["bits_per_byte"].value == pytest.approx(math.log2(of_metric["byte_perplexity"].value))
    assert list(of_metric) == [*sizes, "bits_per_byte"]
    assert all(score.interval is not None and not score.higher_is_better for score in found)
    assert {score.aggregation for score in found} == {"weighted_perplexity", "bits_per_byte"}


def test_a_text_longer_than_the_context_is_scored_window_by_window_each_token_once(tokenizer: Any) -> None:
    model = ServedModel(tokenizer, context_length=40, route=EngineData())
    text = "The man saw the king by the river. " * 20
    questions = model.questions(Instance("loglikelihood_rolling", {}, (text,), 0))
    ids = tokenizer.encode(text)
    assert len(questions) > 2 and all(len(one.body["prompt"]) + 1 <= 40 for one in questions)
    scored = [token for before, after in model._scored(Instance("loglikelihood_rolling", {}, (text,), 0)) for token in
              before[-after:]]  # fmt: skip
    assert scored == ids


@pytest.mark.proof  # it reads lm-eval's 14,000 task files
def test_the_tasks_that_tensorrt_llm_names_are_known_and_the_nearest_of_all_are_told() -> None:
    refused(job("gsm9k"), ["no task is called 'gsm9k'", "did you mean gsm8k"])
    known = task_manager((str(OWN_TASKS),), (), include_defaults=True).all_tasks
    for name in NAMED_BY_TENSORRT_LLM:
        assert ALIASES.get(name, name) in known, name


NAMED_BY_TENSORRT_LLM = (
    "mmlu", "gsm8k", "gpqa_diamond", "gpqa_main", "gpqa_extended", "cnn_dailymail", "longbench", "longbench_v2",
    "json_mode_eval",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(("package", "extra"), [("fuzzywuzzy", "longbench"), ("jieba", "longbench")])
def test_a_package_that_a_task_imports_and_that_is_not_here_is_named(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's own ImportError names no package."""
    monkeypatch.setitem(sys.modules, package, None)
    refused(job("longbench_lcc"), [f"needs the package {package}, which is not installed", f"trtx[{extra}]"])


@pytest.mark.proof  # as above
@pytest.mark.parametrize("name", NAMED_BY_TENSORRT_LLM)
def test_without_a_hub_each_of_them_says_how_to_bring_its_data(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    refused(job(name), [f"task {ALIASES.get(name, name)} needs the dataset ", "hf download --repo-type dataset ",
                        "or name a local file"])  # fmt: skip


ERROR_IN_ANSWER = 1  # in place of a status: 200, and the error in the body
BREAKS = 0  # in place of a status: the connection is closed without an answer


TINY = Tokenizer.from_file(str(resolve_checkpoint("synthetic:tiny-trained").path / "tokenizer.json"))


@contextlib.contextmanager
def echoing(fails: Callable[[str], int] = lambda prompt: 200) -> Iterator[str]:
    """A server whose answer is its prompt, or a failure with the status that ``fails`` says."""

    class Echo(Handler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "echo", "context_window": 40}]})

        def do_POST(self) -> None:
            prompt = self.asked()["prompt"]
            if not isinstance(prompt, str):
                prompt = TINY.decode(prompt, skip_special_tokens=False)
            status = fails(prompt)
            if status == BREAKS:
                self.close_connection = True
                return
            whole = {"choices": [{"text": prompt, "finish_reason": "stop"}]}
            answer = whole if status == 200 else {"error": {"message": f"no {prompt}"}}
            self.answer(200 if status == ERROR_IN_ANSWER else status, answer, {"Retry-After": "0"})

    with serving(Echo) as url:
        yield url


def ask(asked: EvalJob, url: str, directory: Path, tokenizer: Any = None) -> tuple[TopologyScores, list[EvalProgress]]:
    told: list[EvalProgress] = []
    endpoint = Endpoint("here", url, "echo", str(directory), patience_s=1)
    model = ServedModel(tokenizer, endpoint_type=asked.endpoint_type)
    return asyncio.run(TopologyTasks(asked, load(asked, tokenizer), model, endpoint, told.append).run()), told


ODD = """
def breaks(doc, results):
    if doc["answer"] == "25":
        raise KeyError("no_such")
    return {"odd": 1}
"""


def test_a_metric_that_breaks_loses_no_answer(folder: Callable[..., Path], tmp_path: Path) -> None:
    more = "process_results: !function odd.breaks\nmetric_list: [{metric: odd, aggregation: mean}]\n"
    with echoing() as url:
        found, told = ask(job("sums", folder=folder(more=more, odd_py=ODD)), url, tmp_path / "here")
    (task,) = found.tasks
    assert task.note == "sample 3 can't be judged (KeyError: 'no_such'); see samples.jsonl"
    assert not task.scores and task.answered == task.samples == len(ROWS)
    kept = read_samples(tmp_path / "here" / "sums")
    assert [one.doc_id for one in kept if not one.judgements] == [3]
    assert [one.requests[0].text for one in kept] == [row["question"] for row in ROWS]
    assert [one.done for one in told] == list(range(len(ROWS) + 1))


def test_what_is_refused_fails_or_does_not_fit_is_counted_by_its_reason_and_asked_again(
    folder: Callable[..., Path], tokenizer: Any, tmp_path: Path
) -> None:
    rows = [*ROWS[:4], {"question": "word " * 60, "answer": "x"}]
    more = "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    at = folder(rows, more=more)
    (at / "sums.yaml").write_text((at / "sums.yaml").read_text().replace("{until: [", "{max_gen_toks: 8, until: ["))
    asked = job("sums", folder=at, concurrency=3)
    with echoing(lambda prompt: {"1": 400, "2": 503}.get(prompt[1], 200)) as url:
        found, told = ask(asked, url, tmp_path / "here", tokenizer)
    (task,) = found.tasks
    assert (task.samples, task.answered) == (5, 2) and (told[-1].done, told[-1].answered) == (5, 2)
    reasons = {one.first: one.reason for one in task.unanswered}
    assert reasons[1] == "HTTP 400: no 11 + 12 =" and reasons[2] == "HTTP 503: no 12 + 12 ="
    assert "asks for 8 more, and the engine's context holds 40" in reasons[4]
    with echoing() as url:
        found, told = ask(asked, url, tmp_path / "here", tokenizer)
    assert (found.tasks[0].answered, told[0].kept) == (4, 2)


def test_a_server_that_lists_its_model_no_more_is_given_up(folder: Callable[..., Path], tmp_path: Path) -> None:
    with echoing() as url:
        pass
    with pytest.raises(ServerGone, match="does not answer any more .*; 0 of 12 samples answered"):
        ask(job("sums", folder=folder()), url, tmp_path / "here")


def test_a_prompt_that_breaks_its_connection_is_refused_and_the_run_goes_on(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    with echoing(lambda prompt: BREAKS if prompt.startswith("11") else 200) as url:
        found, _ = ask(job("sums", folder=folder(), concurrency=3), url, tmp_path / "here")
    (task,) = found.tasks
    assert (task.answered, task.samples) == (11, 12)
    assert [(one.first, one.reason) for one in task.unanswered] == [
        (1, "Server disconnected without sending a response.")
    ]


def test_an_error_in_an_answer_of_status_200_is_told_in_the_servers_words(
    folder: Callable[..., Path], tokenizer: Any, tmp_path: Path
) -> None:
    with echoing(lambda prompt: ERROR_IN_ANSWER if prompt[0] == "1" else 200) as url:
        found, _ = ask(job("sums", folder=folder(ROWS[8:]), concurrency=4), url, tmp_path / "here")
    assert {one.reason for one in found.tasks[0].unanswered} == {
        "error in the answer: no 18 + 12 =", "error in the answer: no 19 + 12 =",
    }  # fmt: skip
    with echoing() as url:  # which shows no log-probabilities
        found, _ = ask(job("trtx_arithmetic_choice", limit=1), url, tmp_path / "bare", tokenizer)
    note = found.tasks[0].note
    assert note is not None and "Error" not in note and "has no nvext.engine_data.prompt_logprobs" in note


def test_a_server_that_hangs_is_given_the_time_that_was_asked(folder: Callable[..., Path], tmp_path: Path) -> None:
    let_go = Event()

    def hangs(prompt: str) -> int:
        if prompt == ROWS[1]["question"]:
            let_go.wait(60)
        return 200

    with echoing(hangs) as url:
        found, _ = ask(job("sums", folder=folder(ROWS[:2]), request_timeout_s=1.0), url, tmp_path / "here")
        let_go.set()
    (task,) = found.tasks
    assert (1, "no answer within 1 s") in [(one.first, one.reason) for one in task.unanswered]


def test_a_server_that_takes_no_connection_in_time_is_told_so(folder: Callable[..., Path], tmp_path: Path) -> None:
    """A full backlog: the kernel answers no SYN, as of a machine that is not there."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        taken = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(full.getsockname())
            taken.append(one)
        at = Endpoint("attached", f"http://127.0.0.1:{full.getsockname()[1]}", "served", str(tmp_path / "out"), 0.0)
        asked = job("sums", folder=folder(), request_timeout_s=0.05)
        with pytest.raises(ServerGone, match=r"no connection within 0\.05 s, which the request timeout allows"):
            asyncio.run(TopologyTasks(asked, load(asked), ServedModel(None), at, lambda progress: None).run())
        for one in taken:
            one.close()


def test_a_server_that_limits_its_rate_is_asked_again_and_given_up_in_the_end(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    seen: Counter[str] = Counter()

    def limits(prompt: str) -> int:
        seen[prompt] += 1
        return 429 if prompt == ROWS[1]["question"] or seen[prompt] < 8 else 200

    with echoing(limits) as url:
        found, _ = ask(job("sums", folder=folder(ROWS[:3])), url, tmp_path / "here")
    (task,) = found.tasks
    assert [(one.first, one.reason) for one in task.unanswered] == [(1, "HTTP 429: no 11 + 12 =")]
    assert list(seen.values()) == [8, 10, 8]


@pytest.mark.parametrize(
    ("said", "least", "most"),
    [
        ("7", 7, 7), ("0", 0, 0), ("900", 60, 60), ("soon", 0.5, 0.5), (None, 0.5, 0.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("Wed, 21 Oct 2065 07:28:00 GMT", 60, 60),
    ],
)  # fmt: skip
def test_what_a_server_asks_to_wait_is_bounded(said: str | None, least: float, most: float) -> None:
    answer = httpx.Response(429, headers={} if said is None else {"Retry-After": said})
    assert least <= retry_after(answer) <= most


def test_lm_eval_finds_the_model_by_its_name_and_asks_it_itself(tmp_path: Path) -> None:
    """The entrance for `lm_eval.simple_evaluate`, beside that of ``trtx eval``."""
    assert get_model("trtx") is ServedModel
    asked = [Instance("generate_until", {}, (f"{number} ", {"until": [" "]}), 0) for number in range(5)]
    with echoing() as url:
        model = ServedModel(endpoint=Endpoint("here", url, "echo", str(tmp_path), patience_s=1))
        assert model.generate_until(asked) == [str(number) for number in range(5)]
    with echoing(lambda prompt: 400) as url:
        model = ServedModel(endpoint=Endpoint("here", url, "echo", str(tmp_path), patience_s=1))
        with pytest.raises(RuntimeError, match="HTTP 400: no 0"):
            model.generate_until(asked[:1])
