"""``trtx eval`` end to end: real frontend, workers and lm-eval, and another server of OpenAI's API."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from called import only
from openai_server import MODEL, OpenAIServer, openai_server
from processes import TRTX
from topology_clients import wait_until

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.held_out import held_out_texts
from trtx.cli.app import run
from trtx.evals import Score, ScoredTask, TopologyScores, eval_directory, marker, read_eval
from trtx.evals.forms import Sample, read_samples
from trtx.launch.processes import members

LIMIT = 8
CONTEXT = 512  # which makes four lengths of needle, at two depths: as many as LIMIT
GENERATION = ("trtx_arithmetic", "trtx_copying", "trtx_json", "trtx_look_up")
LOGLIKELIHOOD = ("trtx_arithmetic_choice", "trtx_text")
ASKED = ("needle", "perplexity")  # whose data is what is asked
TOKENIZER = ("--tokenizer", f"synthetic:{MODEL}")


def scored(modes: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run over all shipped tasks."""
    parent, text = tmp_path_factory.mktemp("scored"), tmp_path_factory.mktemp("text") / "own.txt"
    text.write_text("\n\n".join(held_out_texts(LIMIT)))
    tasks = ",".join((*GENERATION, *LOGLIKELIHOOD, *ASKED))
    argv = ["eval", "--tasks", tasks, "--limit", str(LIMIT), "--model", f"synthetic:{MODEL}", "--mode", modes]
    argv += ["--needle-depths", "0,100", "--set", f"max_seq_len={CONTEXT}", "--text", str(text)]
    argv += ["--set", "dtype=float32"]  # in which the hf model below computes, whatever the processor
    assert run([*argv, "--min-score", "trtx_copying:exact_match:0.5", "-o", str(parent)]) == 0
    return only(parent)


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scored("agg", tmp_path_factory)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scored("agg,disagg", tmp_path_factory)


@pytest.fixture(scope="module")
def of_hf() -> dict[str, Any]:
    """The same tasks by lm-eval's own hf model, on the same checkpoint."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from trtx.evals.session.loaded_tasks import OWN_TASKS

    model = HFLM(pretrained=str(resolve_checkpoint(f"synthetic:{MODEL}").path), device="cpu", dtype="float32")
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=[*GENERATION, *LOGLIKELIHOOD],
        limit=LIMIT,
        task_manager=TaskManager(include_path=str(OWN_TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    return found


def scores(run_dir: Path, topology: str) -> TopologyScores:
    found = read_eval(run_dir, topology)
    assert found is not None
    return found


def samples(run_dir: Path, topology: str, task: str) -> tuple[Sample, ...]:
    return read_samples(eval_directory(run_dir, topology) / task)


def by_metric(of: TopologyScores) -> dict[str, Score]:
    return {f"{task.task}:{score.metric}": score for task in of.tasks for score in task.scores}


@pytest.mark.proof  # three engines; test_worker_torch.py compares the answers of both topologies
def test_both_topologies_score_the_same(both: Path) -> None:
    agg, disagg = by_metric(scores(both, "agg")), by_metric(scores(both, "disagg"))
    assert agg.keys() == disagg.keys()
    for name, score in agg.items():
        assert score.value == pytest.approx(disagg[name].value, rel=1e-3), name


def test_every_task_is_scored_above_chance_by_more_than_the_interval(aggregated: Path) -> None:
    found = by_metric(scores(aggregated, "agg"))
    assert len(found) == len(GENERATION) + 2 + 3 + 1 + 4
    for name, score in found.items():
        if score.chance is not None:
            assert score.interval is not None and score.interval.low > score.chance, name


@pytest.mark.proof  # the server below is transformers too, and takes no further import
@pytest.mark.parametrize("topology", ["agg", "disagg"])
def test_every_sample_is_that_of_lm_evals_own_hf_model(both: Path, of_hf: dict[str, Any], topology: str) -> None:
    for task in GENERATION + LOGLIKELIHOOD:
        for own, other in zip(samples(both, topology, task), of_hf["samples"][task], strict=True):
            assert own.doc_id == other["doc_id"]
            for asked, (response,) in zip(own.requests, other["resps"], strict=True):
                if asked.request == "generate_until":
                    assert asked.text == response
                elif asked.request == "loglikelihood":
                    assert (asked.logprob, asked.is_greedy) == (pytest.approx(response[0], abs=1e-3), response[1])
                else:
                    assert asked.logprob == pytest.approx(response, rel=1e-4)
    for task in scores(both, topology).tasks:
        for score in task.scores if task.task not in ASKED else ():
            assert score.value == pytest.approx(of_hf["results"][task.task][f"{score.metric},none"], rel=1e-3)


@pytest.mark.proof  # as above
def test_a_needle_and_a_text_of_ones_own_get_what_lm_evals_own_hf_model_gives(both: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(resolve_checkpoint(f"synthetic:{MODEL}").path), device="cpu", dtype="float32")
    for task in ASKED:
        asked = [one.requests[0] for one in samples(both, "agg", task)]
        assert len(asked) == LIMIT
        if task == "perplexity":
            instances = [Instance("loglikelihood_rolling", {}, (one.prompt,), 0) for one in asked]
            assert [one.logprob for one in asked] == pytest.approx(model.loglikelihood_rolling(instances), rel=1e-4)
        else:
            known = asked[:4]  # of 64 and 128 tokens: in longer lists it guesses, and near ties are anybody's
            instances = [Instance("generate_until", {}, (one.prompt, dict(one.parameters)), 0) for one in known]
            assert [one.text for one in known] == model.generate_until(instances)


def test_a_needle_is_found_in_a_short_list_and_asked_for_in_one_that_fills_the_context(aggregated: Path) -> None:
    (found,) = (task for task in scores(aggregated, "agg").tasks if task.task == "needle")
    assert (found.samples, found.answered, found.unanswered) == (LIMIT, LIMIT, ())
    by_place = {(one.length, one.depth): one for one in found.retrievals}
    assert list(by_place) == [(length, depth) for length in (64, 128, 256, CONTEXT) for depth in (0, 100)]
    for (length, _), one in by_place.items():
        assert one.retrieved is not None and one.most_tokens is not None and one.answered == one.samples == 1
        assert length - 40 < one.most_tokens <= length - 32
    first = by_place[64, 0].retrieved
    assert first is not None and first.estimate == 1
    assert "Retrieval over length and depth: agg, needle" in (aggregated / "report.html").read_text()


GSM8K = """
include: {lm_eval}/tasks/gsm8k/gsm8k.yaml
task: own_gsm8k
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {folder}/gsm8k.jsonl, test: {folder}/gsm8k.jsonl}}}}
"""
MMLU = """
include: {lm_eval}/tasks/mmlu/default/mmlu_abstract_algebra.yaml
task: own_mmlu
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{dev: {folder}/mmlu.jsonl, test: {folder}/mmlu.jsonl}}}}
"""


@pytest.mark.proof  # a server of its own
def test_lm_evals_own_tasks_are_asked_of_local_files(tmp_path: Path) -> None:
    """As docs/eval.md says for a machine without a hub: the task is lm-eval's, but for its data."""
    import lm_eval

    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in (("gsm8k", GSM8K), ("mmlu", MMLU)):
        told = text.format(lm_eval=Path(lm_eval.__file__).parent, folder=folder)
        (folder / f"{name}.yaml").write_text(told)
    sums = [{"question": f"A has {n} and gets {n}. How many?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in range(8)]
    choices = [{"question": f"{n} + 1 =", "choices": ["0", str(n + 1), "-1", "x"], "answer": 1} for n in range(8)]
    for name, rows in (("gsm8k", sums), ("mmlu", choices)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["eval", "--tasks", "own_gsm8k,own_mmlu", "--task-dir", str(folder), "--model", f"synthetic:{MODEL}"]
    assert run([*argv, "--limit", "6", "-o", str(tmp_path / "runs")]) == 0
    of_sums, of_choices = scores(only(tmp_path / "runs"), "agg").tasks
    assert (of_sums.version, of_sums.num_fewshot, of_sums.answered, of_choices.answered) == ("3.0", 5, 6, 6)
    assert {score.name for score in of_sums.scores} == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert [(score.metric, score.chance) for score in of_choices.scores] == [("acc", 0.25)]
    (asked,) = samples(only(tmp_path / "runs"), "agg", "own_gsm8k")[0].requests
    assert asked.prompt.count("Question: ") == 6 and asked.prompt.endswith("How many?\nAnswer:")
    of_choice = samples(only(tmp_path / "runs"), "agg", "own_mmlu")[0].requests
    assert [one.continuation for one in of_choice] == [" A", " B", " C", " D"] and "A. 0\nB. 1" in of_choice[0].prompt


def test_every_prompt_answer_and_judgement_is_kept(aggregated: Path) -> None:
    found = samples(aggregated, "agg", "trtx_json")
    assert [sample.doc_id for sample in found] == list(range(LIMIT))
    for sample in found:
        (asked,), (judged,) = sample.requests, sample.judgements
        assert asked.prompt == sample.doc["prompt"] and asked.text
        assert json.loads(judged.filtered[0]) == json.loads(sample.doc["answer"])
        assert judged.metrics == {"json_validity": 1, "schema_compliance": 1, "exact_match": 1}
    assert "trtx_json" in (aggregated / "report.html").read_text()
    assert "lm-eval: 0.4.13" in (aggregated / "summary.md").read_text()


def attached(server: OpenAIServer, parent: Path, *more: str, tasks: str = "trtx_arithmetic") -> list[str]:
    return ["eval", "--tasks", tasks, "--limit", str(LIMIT), "--url", server.url, *more, "-o", str(parent)]


def test_another_server_scores_the_same_tasks(
    aggregated: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a key, which stands nowhere afterwards."""
    key = "sk-another-server"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    tasks = "trtx_arithmetic,trtx_json,trtx_arithmetic_choice"
    with openai_server(key=key) as server:
        assert run(attached(server, tmp_path, *TOKENIZER, "--baseline", str(aggregated), "--max-drop", "0.5", "--json",
                            tasks=tasks)) == 0  # fmt: skip
    told = json.loads(capfd.readouterr().out)
    assert told["verdict"]["verdict"] == "pass" and told["scores"][0]["prompt_logprobs"] == "echo"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    here, there = by_metric(scores(only(tmp_path), "attached")), by_metric(scores(aggregated, "agg"))
    assert len(here) == 5 and all(score.value == pytest.approx(there[name].value) for name, score in here.items())
    for task in tasks.split(","):
        for own, other in zip(samples(only(tmp_path), "attached", task), samples(aggregated, "agg", task), strict=True):
            assert own.key == other.key
            assert [one.metrics for one in own.judgements] == [one.metrics for one in other.judgements]
            for mine, theirs in zip(own.requests, other.requests, strict=True):
                assert (mine.text, mine.is_greedy) == (theirs.text, theirs.is_greedy)
                assert mine.logprob == (None if mine.text is not None else pytest.approx(theirs.logprob, abs=1e-3))


@pytest.mark.proof  # three servers
def test_a_run_that_is_killed_and_then_loses_its_server_asks_for_nothing_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two tasks, one needs what the server can't give: a sentence, and the other one is scored."""
    with openai_server(echoes=False, delay_s=0.1) as server:
        tasks = "trtx_arithmetic,trtx_arithmetic_choice"
        argv = attached(server, tmp_path, "--endpoint-type", "chat", "--concurrency", "1", tasks=tasks)
        command = [*TRTX, *argv]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: len(server.asked) >= 3, 60, "three answers")
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
        run_dir, port, delivered = only(tmp_path), server.port, len(server.asked)
        wait_until(lambda: not members(marker(run_dir / "eval" / "session.log"), ()), 10, "its session's end")
    kept = len(samples(run_dir, "attached", "trtx_arithmetic"))
    assert delivered - 1 <= kept <= delivered  # the last one may have been on its way
    with openai_server(port, echoes=False, lasts=2) as server:
        assert run(["eval", "--resume", str(run_dir)]) == 3
    told = capfd.readouterr().err
    assert f"{kept + 2} of {2 * LIMIT} samples answered" in told and "trtx eval --resume " in told
    with openai_server(port, echoes=False) as server:
        assert run(["eval", "--resume", str(run_dir)]) == 3
        assert len(server.asked) == LIMIT - kept - 2
    assert "the server gives no log-probabilities of prompts" in capfd.readouterr().err
    generated, chosen = scores(run_dir, "attached").tasks
    assert (generated.samples, generated.answered, generated.scores[0].value) == (LIMIT, LIMIT, 1.0)
    assert not chosen.scores and chosen.note is not None and "echo is not supported" in chosen.note


@pytest.mark.proof  # a server and two runs of its own
def test_relative_paths_of_a_run_begin_where_it_began_wherever_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere lie others of these names. The lock has them as they were typed: baselines are compared by them."""
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    for directory, text in ((begun, held_out_texts(3)), (elsewhere, ["another text altogether"])):
        directory.mkdir()
        (directory / "own.txt").write_text("\n\n".join(text))
    (begun / "tokenizer").symlink_to(resolve_checkpoint(f"synthetic:{MODEL}").path)
    monkeypatch.chdir(begun)
    with openai_server(lasts=2) as server:
        argv = ["eval", "--url", server.url, "--tasks", "trtx_arithmetic,perplexity", "--text", "own.txt"]
        argv += ["--tokenizer", "tokenizer", "--limit", "3", "--concurrency", "1"]
        assert run([*argv, "-o", "runs"]) == 3
        port = server.port
    run_dir = only(begun / "runs")
    lock = (run_dir / "run.lock.yaml").read_bytes()
    assert b"text: own.txt" in lock
    monkeypatch.chdir(elsewhere)
    kept = run_dir / "eval" / "attached" / "trtx_arithmetic" / "samples.jsonl"
    answers = kept.read_bytes()
    kept.write_bytes(answers[:-1] + b" \n")
    assert run(["eval", "--resume", str(run_dir)]) == 2, "an answer that nobody gave would be kept"
    kept.write_bytes(answers)
    with openai_server(port):
        assert run(["eval", "--resume", f"../begun/runs/{run_dir.name}"]) == 0
    assert (run_dir / "run.lock.yaml").read_bytes() == lock and Path.cwd() == elsewhere
    assert len(samples(run_dir, "attached", "perplexity")) == 3
    assert "another text" not in (run_dir / "eval" / "attached" / "perplexity" / "samples.jsonl").read_text()
    begun.rename(tmp_path / "moved")
    assert run(["eval", "--resume", f"../moved/runs/{run_dir.name}"]) == 2


@pytest.mark.proof
def test_a_server_that_generates_nothing_is_not_scored_as_one_that_answers_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with openai_server(says="") as server:
        assert run(attached(server, tmp_path, *TOKENIZER, tasks="trtx_arithmetic")) == 3
    assert f"all {LIMIT} answers are empty" in capfd.readouterr().err
    (task,) = scores(only(tmp_path), "attached").tasks
    assert task.answered == LIMIT and not task.scores
    with openai_server(says="none of it") as server:
        assert run(attached(server, tmp_path / "wrong", *TOKENIZER, tasks="trtx_arithmetic")) == 0
    (task,) = scores(only(tmp_path / "wrong"), "attached").tasks
    assert task.scores[0].value == 0


@pytest.mark.proof
def test_scores_of_answers_that_name_another_model_are_told_with_it_and_of_several_models_there_are_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def task_of(parent: Path, names: tuple[str, ...], code: int) -> ScoredTask:
        with openai_server(says="none of it", names=names) as server:
            bound = ("--min-score", "trtx_arithmetic:exact_match:0")
            assert run(attached(server, parent, *TOKENIZER, *bound, "--concurrency", "1")) == code
        (task,) = scores(only(parent), "attached").tasks
        assert task.answered == LIMIT
        return task

    assert task_of(tmp_path / "asked", (MODEL,), 0).doubts == ()
    assert "SUSPECT" not in "".join(capfd.readouterr())

    told = f"answers name model 'tiny-2', but '{MODEL}' was requested"
    task = task_of(tmp_path / "other", ("tiny-2",), 0)
    assert task.scores and task.doubts == (told,)
    run_dir = only(tmp_path / "other")
    assert f"SUSPECT: {told}" in " ".join(capfd.readouterr().out.split())
    for form in ("summary.md", "junit.xml", "summary.json"):
        assert told in (run_dir / form).read_text(), form
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert [one["doubts"] for one in verdict["judgements"]] == [[told]] * 2, "of the answers, and of the least score"

    task = task_of(tmp_path / "several", (MODEL, "tiny-2"), 3)
    assert not task.scores and task.note is not None and "several models" in task.note
    assert f"'tiny-2' (4), '{MODEL}' (4)" in capfd.readouterr().err
