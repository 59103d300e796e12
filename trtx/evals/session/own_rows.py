"""Makes the rows of trtx's own tasks: ``needle`` of given lengths, ``perplexity`` and ``schemas`` of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.synthetic import TRAINED_DIRECTORY
from trtx.errors import UsageError
from trtx.evals import needle, schemas, texts
from trtx.evals.messages import EvalJob
from trtx.evals.session.model import ServedModel

OWN = (needle.TASK, texts.TASK, schemas.TASK)
_COUNTED = (needle.TASK, texts.TASK)  # whose rows depend on numbers of tokens


@dataclass(frozen=True, eq=False, slots=True)
class OwnRows:
    """Rows by task; empty for a task that isn't requested."""

    needle: list[dict[str, Any]]
    perplexity: list[dict[str, Any]]
    schemas: list[dict[str, Any]]


def own_rows(job: EvalJob, model: ServedModel) -> OwnRows:
    """Generates the rows. Raises UsageError for an invalid tokenizer, length or text."""
    asked = [task for task in OWN if task in job.tasks]
    counted = [task for task in _COUNTED if task in asked]
    if counted and model.tokenizer is None:
        raise UsageError(
            f"task {counted[0]} needs a tokenizer to count tokens, and no tokenizer is on this machine; give its "
            "directory with --tokenizer"
        )
    return OwnRows(
        _needle(job, model) if needle.TASK in asked else [],
        _perplexity(job, model) if texts.TASK in asked else [],
        _schemas(job) if schemas.TASK in asked else [],
    )


def _needle(job: EvalJob, model: ServedModel) -> list[dict[str, Any]]:
    haystack: needle.Haystack = "look-up" if _knows_lists_alone(model) else "prose"

    def tokens_of(prompt: str) -> int:
        if job.endpoint_type == "chat":
            rendered = model.apply_chat_template([{"role": "user", "content": prompt}])
            return len(model.tok_encode(rendered, add_special_tokens=False))
        return len(model.tok_encode(prompt))

    return needle.rows(job.needle, haystack, tokens_of, job.context_length)


def _perplexity(job: EvalJob, model: ServedModel) -> list[dict[str, Any]]:
    if job.text is None:
        raise UsageError("task perplexity needs a text to score; give its file with --text")
    found = texts.read_texts(Path(job.text))
    return [{**row, "tokens": len(model.tok_encode(row["text"]))} for row in found]


def _schemas(job: EvalJob) -> list[dict[str, Any]]:
    if job.schemas is None:
        raise UsageError("task schemas needs prompts with their JSON schemas; give their file with --schemas")
    return schemas.read_schemas(Path(job.schemas), over_chat=job.endpoint_type == "chat")


def _knows_lists_alone(model: ServedModel) -> bool:
    """Whether the model is ``synthetic:tiny-trained`` or a build of it, recognised by its tokenizer.

    That model can't read prose.
    """
    path = Path(model.tokenizer_name) / "tokenizer.json"
    return path.is_file() and path.read_bytes() == (TRAINED_DIRECTORY / "tokenizer.json").read_bytes()
