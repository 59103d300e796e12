"""Documents of trtx's own tasks, and the judgement of JSON. ``synthetic:tiny-trained`` learned the tasks on other
samples.

lm-eval imports this file by path, through ``!function`` in the YAML files of this directory.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trtx.checkpoint.held_out import held_out_samples, held_out_texts
from trtx.checkpoint.tasks import TrainingSample, samples
from trtx.evals.generated_schemas import generated_rows
from trtx.evals.needle import METRIC, is_retrieved, prompt
from trtx.evals.schemas import judge_answer

if TYPE_CHECKING:
    from datasets import Dataset

    from trtx.evals.session.own_rows import OwnRows

SAMPLES = 200  # of the held-out split
SHOTS = 32  # of the training split, for --num-fewshot
_TYPES = {"name": "string", "count": "integer", "color": "string"}


def arithmetic(**_: Any) -> dict[str, Dataset]:
    return _splits(("addition-1", "addition-2", "subtraction"), _plain)


def arithmetic_choice(**_: Any) -> dict[str, Dataset]:
    return _splits(("addition-2", "subtraction"), _with_choices)


def copying(**_: Any) -> dict[str, Dataset]:
    return _splits(("copying",), _plain)


def look_up(**_: Any) -> dict[str, Dataset]:
    return _splits(("look-up",), _plain)


def json_objects(**_: Any) -> dict[str, Dataset]:
    return _splits(("json",), _with_schema)


def texts(**_: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"held_out": Dataset.from_list([{"text": text} for text in held_out_texts(SAMPLES)])}


def needle(rows: OwnRows, **_: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"asked": Dataset.from_list(rows.needle)}


def needle_prompt(doc: dict[str, Any]) -> str:
    return prompt(doc)


def judge_needle(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    return {METRIC: int(is_retrieved(doc, results[0]))}


def schemas(rows: OwnRows, **_: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"asked": Dataset.from_list(rows.schemas)}


def generated_schemas(**_: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"held_out": Dataset.from_list(generated_rows(SAMPLES))}


def perplexity(rows: OwnRows, **_: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"asked": Dataset.from_list(rows.perplexity)}


def judge_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """Words and bytes as lm-eval counts them; tokens as the model's tokenizer counts them."""
    from lm_eval.api.task import ConfigurableTask

    (logprob,) = results
    words, size = ConfigurableTask.count_words(doc["text"]), ConfigurableTask.count_bytes(doc["text"])
    return {
        "token_perplexity": (logprob, doc["tokens"]),
        "word_perplexity": (logprob, words),
        "byte_perplexity": (logprob, size),
        "bits_per_byte": (logprob, size),
    }


def judge_json(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    return judge_answer(doc, results[0])


def _splits(tasks: tuple[str, ...], make: Any) -> dict[str, Dataset]:
    from datasets import Dataset

    held_out = _distinct(*(held_out_samples(task, 4 * SAMPLES) for task in tasks))
    train = _distinct(*(itertools.islice(samples(task, "train", 0), 4 * SHOTS) for task in tasks))
    return {
        "held_out": Dataset.from_list([make(sample) for sample in itertools.islice(held_out, SAMPLES)]),
        "train": Dataset.from_list([make(sample) for sample in itertools.islice(train, SHOTS)]),
    }


def _distinct(*drawn: Any) -> Iterator[TrainingSample]:
    """Samples from each source in turn, without repeated prompts; exhausted sources are skipped."""
    seen: set[str] = set()
    for sample in (one for row in itertools.zip_longest(*drawn) for one in row if one is not None):
        if sample.prompt not in seen:
            seen.add(sample.prompt)
            yield sample


def _plain(sample: TrainingSample) -> dict[str, Any]:
    return {"prompt": sample.prompt, "answer": sample.answer}


def _with_schema(sample: TrainingSample) -> dict[str, Any]:
    keys = list(json.loads(sample.answer))
    schema = {
        "type": "object",
        "properties": {key: {"type": _TYPES[key]} for key in keys},
        "required": keys,
        "additionalProperties": False,
    }
    return {**_plain(sample), "schema": json.dumps(schema)}


def _with_choices(sample: TrainingSample) -> dict[str, Any]:
    """Four choices with one right answer. Wrong ones are 1, 2, 10 or 11 away from it."""
    right = int(sample.answer)
    draw = random.Random(sample.prompt)
    wrong = draw.sample([right + step for step in (-11, -10, -2, -1, 1, 2, 10, 11)], 3)
    choices = draw.sample([right, *wrong], 4)
    return {**_plain(sample), "choices": [str(choice) for choice in choices], "right": choices.index(right)}
