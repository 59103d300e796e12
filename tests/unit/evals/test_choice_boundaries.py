"""Where a choice begins among the tokens of its prompt: what lm-eval's hf model hands to its scoring is the oracle."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.evals.messages import EvalJob
from trtx.evals.session.client import ServerRefusal
from trtx.evals.session.loading import load_tasks
from trtx.evals.session.model import ServedModel
from trtx.evals.session.prompt_logprobs import EngineData

pytestmark = pytest.mark.slow
WORDS = ("the river", " golden", "a", "nd", " ", "\n", "ver", "s", ".", " of the", "é", "12", "")


class Splits(HFLM):  # type: ignore[misc]
    """Gives the pairs in place of their scores; an assertion of its scoring is said of each as it stands there."""

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        return [(before, after) for _, before, after in requests]


@pytest.fixture(scope="module")
def models() -> tuple[Splits, ServedModel]:
    path = str(resolve_checkpoint("synthetic:tiny-trained").path)
    theirs = Splits(pretrained=path, device="cpu", dtype="float32", batch_size=1)
    return theirs, ServedModel(theirs.tokenizer, route=EngineData())


def asked(context: str, choice: str) -> Instance:
    return Instance("loglikelihood", {}, (context, choice), 0)


def test_a_choice_has_the_tokens_that_lm_evals_hf_model_scores(models: tuple[Splits, ServedModel]) -> None:
    theirs, ours = models
    drawn = random.Random(26)
    scored = refused = 0
    for _ in range(300):
        context, choice = ("".join(drawn.choices(WORDS, k=drawn.randint(0, 4))) for _ in range(2))
        if not context and not choice:
            continue  # lm-eval ends over it
        instance = asked(context, choice)
        ((before, after),) = theirs.loglikelihood([instance], disable_tqdm=True)
        if before and after:
            (question,) = ours.questions(instance)
            assert question.body["prompt"] == [*before, *after]
            assert ours._scored(instance) == [([*before, *after], len(after))]
            assert ours.problem_of(instance) is None
            scored += 1
        else:  # its own scoring asserts that there is something to score
            found: Any = asyncio.run(ours.answer(None, instance))  # type: ignore[arg-type]
            assert isinstance(found, ServerRefusal), "nothing was asked"
            assert ours.problem_of(instance) == found.reason
            refused += 1
    assert scored > 100 and refused > 5


@pytest.mark.parametrize(("context", "choice"), [("the ri", "ver"), ("golde", "n"), ("the river", ""), ("", "")])
def test_a_choice_without_a_token_of_its_own_is_named(
    models: tuple[Splits, ServedModel], context: str, choice: str
) -> None:
    found: Any = asyncio.run(models[1].answer(None, asked(context, choice)))  # type: ignore[arg-type]
    assert isinstance(found, ServerRefusal)
    assert f"the choice {choice!r} has no token of its own" in found.reason and "target_delimiter" in found.reason


def test_a_task_with_such_a_choice_is_refused_when_it_is_read(
    models: tuple[Splits, ServedModel], tmp_path: Path
) -> None:
    rows = [{"q": "What is", "c": [" a", " b"]}, {"q": "the ri", "c": ["ver", "nd"]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    task = {
        "task": "join", "dataset_path": "json", "dataset_kwargs": files,
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": 1,
        "doc_to_choice": "{{c}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "join.yaml").write_text(json.dumps(task), encoding="utf-8")
    job = EvalJob(("join",), str(tmp_path), None, None, "completions", 1, None)
    with pytest.raises(UsageError, match="task join: row 1 of its dataset can't be scored: the choice 'ver' has no"):
        load_tasks(job, models[1])
