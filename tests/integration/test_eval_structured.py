"""``trtx eval`` of tasks with JSON schemas, free and constrained: a served topology, and another server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from called import only
from openai_server import MODEL, openai_server

from trtx.cli.app import run
from trtx.errors import UsageError
from trtx.evals import Endpoint, EvalJob, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.forms import Sample, read_samples
from trtx.evals.session.arms import of_arm
from trtx.evals.session.asking import TopologyTasks
from trtx.evals.session.client import ServerGone, ServerRefusal
from trtx.evals.session.loading import load_tasks
from trtx.evals.session.model import ServedModel

LIMIT = 4
SUITE = """
include: {lm_eval}/tasks/jsonschema_bench/jsonschema_bench_easy.yaml
task: own_bench
dataset_path: json
dataset_name: null
training_split: null
validation_split: null
num_fewshot: 0
dataset_kwargs: {{data_files: {{test: {folder}/bench.jsonl}}}}
generation_kwargs: {{max_gen_toks: 96}}
"""


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


TEXT, WHOLE = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 99}
NAMED = an_object(name=TEXT, count=WHOLE)
ROWS = [
    {"prompt": "Write JSON with name lion, count 3.", "schema": NAMED, "answer": {"name": "lion", "count": 3}},
    {
        "messages": [{"role": "user", "content": "Write JSON with name tree, count 9."}],
        "schema": NAMED, "answer": {"name": "tree", "count": 9}, "max_tokens": 4,
    },
    {"prompt": "Write JSON with name lion, count 3.", "schema": {"if": {"minimum": 3}, "then": {}}, "answer": {}},
]  # fmt: skip


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run over trtx's tasks, a file of the user's own, and lm-eval's jsonschema_bench with local rows."""
    folder, parent = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("runs")
    (folder / "own_bench.yaml").write_text(SUITE.format(lm_eval=Path(lm_eval.__file__).parent, folder=folder))
    schemas = [an_object(color={"enum": ["red", "blue"]}), an_object(size=WHOLE)]
    written(folder / "bench.jsonl", *({"json_schema": json.dumps(schema)} for schema in schemas))
    own = written(folder / "own.jsonl", *ROWS)
    argv = ["eval", "--tasks", "trtx_json,trtx_schemas,schemas,own_bench", "--task-dir", str(folder)]
    argv += ["--schemas", str(own), "--structured-output", "both", "--endpoint-type", "chat", "--limit", str(LIMIT)]
    argv += ["--model", f"synthetic:{MODEL}", "--min-score", "trtx_json-constrained:schema_compliance:0.5"]
    assert run([*argv, "-o", str(parent)]) == 0
    return only(parent)


def tasks(run_dir: Path, topology: str = "agg") -> dict[str, ScoredTask]:
    found = read_eval(run_dir, topology)
    assert isinstance(found, TopologyScores)
    return {task.task: task for task in found.tasks}


def shares(task: ScoredTask) -> dict[str, float]:
    return {score.metric: score.value for score in task.scores}


def samples(run_dir: Path, task: str, topology: str = "agg") -> tuple[Sample, ...]:
    return read_samples(eval_directory(run_dir, topology) / task)


def test_both_arms_ask_the_same_prompts_and_only_one_sends_the_schema(both: Path) -> None:
    for task in ("trtx_json", "trtx_schemas", "schemas", "own_bench"):
        for free, constrained in zip(samples(both, task), samples(both, f"{task}-constrained"), strict=True):
            (one,), (other,) = free.requests, constrained.requests
            assert one.prompt == other.prompt and free.key != constrained.key
            sent = other.parameters["response_format"]["json_schema"]["schema"]
            assert sent == json.loads(free.doc["json_schema" if task == "own_bench" else "schema"])
            assert "response_format" not in one.parameters and other.parameters["until"] == []
            kept = {name: value for name, value in one.parameters.items() if name != "until"}
            assert kept.items() <= other.parameters.items()


def test_no_constrained_answer_breaks_its_schema_where_free_answers_do(both: Path) -> None:
    found = tasks(both)
    for task in ("trtx_schemas", "own_bench"):
        assert shares(found[task])["schema_compliance"] == 0
        constrained = shares(found[f"{task}-constrained"])
        assert constrained["schema_broken"] == constrained["schema_refused"] == 0
        assert constrained["schema_compliance"] + constrained["answer_cut"] == 1
    assert shares(found["trtx_json"])["exact_match"] == shares(found["trtx_json-constrained"])["exact_match"] == 1


def test_a_cut_answer_and_a_refused_schema_are_apart_from_an_invalid_one(both: Path) -> None:
    outcomes = ("schema_compliance", "schema_broken", "answer_cut", "schema_refused")
    free, constrained = tasks(both)["schemas"], tasks(both)["schemas-constrained"]
    assert [shares(free)[name] for name in outcomes[:3]] == pytest.approx([2 / 3, 0, 1 / 3])
    assert "schema_refused" not in shares(free), "a free request has no schema"
    assert [shares(constrained)[name] for name in outcomes] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert constrained.answered == constrained.samples == 3
    (refused,) = constrained.refused
    assert (refused.count, refused.first) == (1, 2) and "HTTP 400" in refused.reason and '"if"' in refused.reason
    assert refused.reason in (both / "summary.md").read_text()


def test_the_difference_of_both_arms_is_of_pairs(both: Path) -> None:
    scores = read_eval(both, "agg")
    assert scores is not None
    by_name = {(one.task, one.metric): one for one in scores.arm_differences}
    found = by_name["trtx_schemas", "schema_compliance"]
    assert found.pairs == LIMIT and found.difference is not None
    gained = shares(tasks(both)["trtx_schemas-constrained"])["schema_compliance"]
    assert found.difference.estimate == gained > 0
    assert ("own_bench", "json_validity") in by_name and ("own_bench", "exact_match") not in by_name
    assert "## Structured output: agg, own_bench" in (both / "summary.md").read_text()


@pytest.mark.proof  # a second server
def test_a_server_that_ignores_the_schema_misses_the_gate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", "--tasks", "trtx_json", "--tokenizer", f"synthetic:{MODEL}", "--endpoint-type", "chat"]
    argv += ["--limit", str(LIMIT), "--structured-output", "constrained", "-o", str(tmp_path)]
    with openai_server(says='```json\n{"name": 1}\n```') as server:
        bound = "trtx_json-constrained:schema_compliance:0.5"
        assert run([*argv, "--url", server.url, "--min-score", bound]) == 1
        assert {one["response_format"]["type"] for one in server.asked} == {"json_schema"}
    assert "expected at least 0.5" in " ".join(capfd.readouterr().err.split())
    (task,) = tasks(only(tmp_path), "attached").values()
    assert shares(task)["schema_broken"] == 1 and task.answered == LIMIT


def ask(url: str, directory: Path, task: str = "trtx_json", **more: Any) -> TopologyScores:
    """Asks in this process, as the session of a run does."""
    job = EvalJob((task,), None, LIMIT, None, "chat", 1, None, **{"structured_output": "both", **more})
    model, at = ServedModel(None, endpoint_type="chat"), Endpoint("attached", url, MODEL, str(directory), 0.0)
    return asyncio.run(TopologyTasks(job, load_tasks(job, model), model, at, lambda progress: None).run())


def test_an_interrupted_run_asks_each_arm_for_what_is_missing(tmp_path: Path) -> None:
    with openai_server(says="{}", lasts=LIMIT + 1) as server, pytest.raises(ServerGone):
        ask(server.url, tmp_path)
    names = ("trtx_json", "trtx_json-constrained")
    assert [len(read_samples(tmp_path / name)) for name in names] == [LIMIT, 1]
    with openai_server(says="{}") as server:
        found = ask(server.url, tmp_path)
        assert ["response_format" in one for one in server.asked] == [True] * (LIMIT - 1)
    assert [(task.task, task.answered) for task in found.tasks] == [(name, LIMIT) for name in names]


def test_a_server_that_refuses_every_schema_has_no_score_and_is_not_asked_again(tmp_path: Path) -> None:
    with openai_server(says="{}", refuses=("response_format",)) as server:
        for _ in range(2):
            free, constrained = ask(server.url, tmp_path, "trtx_schemas", structured_output=None).tasks
            assert free.scores and not constrained.scores and constrained.note is not None
            assert constrained.note.startswith(f"the server refused the schema of each of {LIMIT} samples, first: HTTP")
            assert [one.count for one in constrained.refused] == [LIMIT] and constrained.unanswered == ()
        assert len(server.asked) == LIMIT, "the free ones, once"


def test_over_completions_a_schema_is_sent_as_guided_json_and_a_500_may_hide_its_refusal(tmp_path: Path) -> None:
    job = EvalJob(("trtx_json",), None, 1, None, "completions", 1, None, structured_output="constrained")
    model = ServedModel(None)
    (task,) = load_tasks(job, model).tasks
    (question,) = model.questions(task.documents[0].instances[0])
    assert question.body["guided_json"] == json.loads(task.documents[0].doc["schema"]) and "stop" not in question.body
    hidden = ServerRefusal("HTTP 500: no")
    found = of_arm(task, task.documents[0].instances[0], hidden)
    assert isinstance(found, ServerRefusal) and found.reason.endswith("--endpoint-type chat shows the reason")


@pytest.mark.parametrize(
    ("task", "more", "words"),
    [
        ("trtx_copying", {}, "--structured-output both has no effect, because no task has JSON schemas (trtx_copying)"),
        ("schemas", {"schemas": "none.jsonl"}, "--schemas none.jsonl"),
    ],
)
def test_what_can_not_be_asked_is_refused_before_anything_is_served(
    task: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        ask("http://127.0.0.1:9", tmp_path, task, **more)
    assert words in str(refused.value)
