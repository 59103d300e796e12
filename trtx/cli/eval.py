"""``trtx eval``: serves each mode, or attaches to a server, and scores its answers with lm-eval."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, given_options, optional
from trtx.cli.placement import refuse_ignored
from trtx.cli.run_options import (
    ModeOption,
    RunOptions,
    TokenizerOption,
    UrlOption,
    refuse_unused,
    show_run,
    topology_and_attach,
)
from trtx.config.wording import quoted
from trtx.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtx.experiment import EvaluationSpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TASKS, _VERDICT = "Tasks", "Verdict"


@app.command(
    name="eval",
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 every judgement passed; 1 a sample has no answer, or a score is too low or worse than the "
    "baseline; 2 usage, task or dataset; 3 no verdict, or the server is gone; 4 launch failed; 129, 130 and 143 "
    "interrupted.",
)
@options.spread(port=0)
def evaluate(
    context: typer.Context,
    *,
    tasks: Annotated[
        str | None,
        optional(_TASKS, "--tasks", "Tasks or groups of lm-eval, of trtx or in --task-dir.", metavar="A,B"),
    ] = None,
    limit: Annotated[
        int | None, optional(_TASKS, "--limit", "Ask only the first N samples of each task. Default: all.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        optional(_TASKS, "--num-fewshot", "Solved examples before each question. Default: the task's own number."),
    ] = None,
    task_dir: Annotated[
        str | None, optional(_TASKS, "--task-dir", "Folder with task files (YAML) in lm-eval's format.", metavar="DIR")
    ] = None,
    endpoint_type: Annotated[
        Literal["completions", "chat"] | None,
        optional(
            _TASKS,
            "--endpoint-type",
            "completions sends the prompts unchanged, chat as messages for the chat template. Default: completions.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, optional(_TASKS, "--concurrency", "Number of concurrent requests. Default: 8.")
    ] = None,
    request_timeout: Annotated[
        float | None,
        optional(
            _TASKS, "--request-timeout", "Seconds to wait for an answer; a request is tried three times. Default: 600."
        ),
    ] = None,
    needle_lengths: Annotated[
        str | None,
        optional(
            _TASKS,
            "--needle-lengths",
            "With --tasks needle: prompt and answer lengths in tokens. Default: powers of two up to the context.",
            metavar="N,N",
        ),
    ] = None,
    needle_depths: Annotated[
        str | None,
        optional(
            _TASKS,
            "--needle-depths",
            "With --tasks needle: positions of the needle in the text, in percent. Default: 0,25,50,75,100.",
            metavar="P,P",
        ),
    ] = None,
    needle_samples: Annotated[
        int | None,
        optional(_TASKS, "--needle-samples", "With --tasks needle: samples for each length and depth. Default: 10."),
    ] = None,
    text: Annotated[
        str | None,
        optional(
            _TASKS,
            "--text",
            "With --tasks perplexity: a text file, scored by paragraph, or a .jsonl file with a text in each line.",
            metavar="FILE",
        ),
    ] = None,
    structured_output: Annotated[
        Literal["free", "constrained", "both"] | None,
        optional(
            _TASKS,
            "--structured-output",
            "How to ask tasks with JSON schemas: constrained sends each sample's schema, both compares the two. "
            "Default: both for schemas and trtx_schemas, free for the others.",
        ),
    ] = None,
    schemas: Annotated[
        str | None,
        optional(
            _TASKS,
            "--schemas",
            'With --tasks schemas: a .jsonl file with a "prompt" or "messages", and a "schema", in each line.',
            metavar="FILE",
        ),
    ] = None,
    min_score: Annotated[
        list[str] | None,
        optional(
            _VERDICT,
            "--min-score",
            "Lowest score; the whole interval must reach it, as in gsm8k:exact_match:0.8. Repeatable.",
            metavar="TASK:METRIC:VALUE",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        optional(
            _VERDICT, "--baseline", "Earlier run of trtx eval, with which each sample is compared.", metavar="RUN"
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        optional(_VERDICT, "--max-drop", "Largest allowed drop of a score below the baseline. Default: 0.02."),
    ] = None,
    url: UrlOption = None,
    tokenizer: TokenizerOption = None,
    model: options.ModelOptions,
    mode: ModeOption = None,
    topology: options.TopologyOptions,
    media: options.MediaOptions,
    run: RunOptions,
) -> None:
    """Score the answers of a served topology with lm-eval, with an interval on every score.

    Serves each mode in turn and sends the samples over HTTP, as any client does.
    Every prompt, answer and judgement is stored. A run that ended early can be
    resumed with --resume.

    \b
    Examples:
      trtx eval --tasks trtx --model synthetic:tiny-trained --mode agg,disagg
      trtx eval --tasks gsm8k,mmlu --model Qwen/Qwen3-0.6B --limit 200
      trtx eval --tasks trtx_json --min-score trtx_json:schema_compliance:0.9
      trtx eval --tasks trtx_json --structured-output both --min-score trtx_json-constrained:schema_compliance:0.95
      trtx eval --tasks needle --needle-lengths 4096,32768 --needle-depths 0,50,100
      trtx eval --tasks perplexity --text manual.txt --baseline runs/20261121T050132Z-eval-9a1c6852
      trtx eval --tasks gsm8k --url http://127.0.0.1:8000 --baseline runs/20261121T050132Z-eval-9a1c6852
    """
    if run.resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment import resume_evaluation

        show_run("trtx eval", partial(resume_evaluation, run.resume), _result, as_json=run.as_json)
        return
    if tasks is None:
        raise UsageError(
            "--tasks is missing; name the tasks, such as gsm8k,mmlu, or trtx for all tasks that trtx ships"
        )
    uses = [*options.engine_uses(model.engine), "serve" if url is None else "attach"]
    uses += [] if baseline else ["no baseline"]
    uses += [f"no {task}" for task in ("needle", "perplexity", "schemas") if task not in _listed(tasks)]
    refuse_ignored(context, uses)
    from trtx.experiment import evaluate as score

    spec = _spec(given_options(context))
    refuse_unused(context, model, modes=spec.modes, attach=spec.attach, encode=spec.topology.encoders)
    show_run("trtx eval", partial(score, spec, parent=run.output), _result, as_json=run.as_json)


def _result(run_dir: Path) -> tuple[RenderableType, dict[str, Any]]:
    from trtx.report.evaluation import read_evaluation_view

    view = read_evaluation_view(run_dir)
    return view.on_terminal, view.summary


_OWN = (
    *("limit", "num_fewshot", "task_dir", "endpoint_type", "concurrency", "min_score", "baseline", "max_drop"),
    *("request_timeout", "needle_samples", "text", "schemas", "structured_output"),
)


def _spec(given: dict[str, Any]) -> EvaluationSpec:
    """Builds the evaluation spec from the options that were given."""
    from trtx.experiment import evaluation_of

    fields: dict[str, Any] = {name: given[name] for name in _OWN if name in given}
    fields["tasks"] = _listed(given["tasks"])
    fields |= {name: _numbers(name, given[name]) for name in ("needle_lengths", "needle_depths") if name in given}
    return evaluation_of(fields | topology_and_attach(given))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError as error:
        raise UsageError(
            f"--{name.replace('_', '-')} {quoted(text)}: expected whole numbers separated by commas, such as 0,50,100"
        ) from error
