"""``trtx eval``: serves each mode, or attaches to a server, and scores its answers with lm-eval."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, given_options
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


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@app.command(
    name="eval",
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 every judgement passed; 1 samples without an answer, a score missed or worse than the "
    "baseline; 2 usage, task or dataset; 3 no verdict, or the server is gone; 4 launch failed; 129, 130 and 143 "
    "interrupted.",
)
@options.spread(port=0)
def evaluate(
    context: typer.Context,
    *,
    tasks: Annotated[
        str | None,
        _option(_TASKS, "--tasks", "Names of lm-eval's tasks or groups, of trtx's, or of --task-dir.", metavar="A,B"),
    ] = None,
    limit: Annotated[int | None, _option(_TASKS, "--limit", "The first N samples of each task. Default: all.")] = None,
    num_fewshot: Annotated[
        int | None, _option(_TASKS, "--num-fewshot", "Examples before each question. Default: as the task says.")
    ] = None,
    task_dir: Annotated[
        str | None, _option(_TASKS, "--task-dir", "A folder of lm-eval's task files (YAML).", metavar="DIR")
    ] = None,
    endpoint_type: Annotated[
        Literal["completions", "chat"] | None,
        _option(
            _TASKS,
            "--endpoint-type",
            "completions: prompts as they are; chat: as messages, in the model's template. Default: completions.",
        ),
    ] = None,
    concurrency: Annotated[int | None, _option(_TASKS, "--concurrency", "Requests in flight. Default: 8.")] = None,
    request_timeout: Annotated[
        float | None,
        _option(_TASKS, "--request-timeout", "Seconds to wait for an answer, in each of three attempts. Default: 600."),
    ] = None,
    needle_lengths: Annotated[
        str | None,
        _option(
            _TASKS,
            "--needle-lengths",
            "With --tasks needle: tokens of prompt and answer. Default: powers of two up to the context.",
            metavar="N,N",
        ),
    ] = None,
    needle_depths: Annotated[
        str | None,
        _option(
            _TASKS,
            "--needle-depths",
            "With --tasks needle: per cent of the haystack before it. Default: 0,25,50,75,100.",
            metavar="P,P",
        ),
    ] = None,
    needle_samples: Annotated[
        int | None, _option(_TASKS, "--needle-samples", "Of each length and depth. Default: 10.")
    ] = None,
    text: Annotated[
        str | None,
        _option(
            _TASKS,
            "--text",
            "With --tasks perplexity: the text to score, paragraph by paragraph, or .jsonl with text in each line.",
            metavar="FILE",
        ),
    ] = None,
    min_score: Annotated[
        list[str] | None,
        _option(
            _VERDICT,
            "--min-score",
            "A score that the interval has to keep, such as gsm8k:exact_match:0.8. Repeatable.",
            metavar="TASK:METRIC:VALUE",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        _option(_VERDICT, "--baseline", "A run of trtx eval to compare with, sample by sample.", metavar="RUN"),
    ] = None,
    max_drop: Annotated[
        float | None,
        _option(_VERDICT, "--max-drop", "How much worse than the baseline a score may be. Default: 0.02."),
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

    Serves each mode in turn and asks it by the same route as a load. Every prompt,
    answer and judgement is kept; a run that ended early goes on with --resume.

    \b
    Examples:
      trtx eval --tasks trtx --model synthetic:tiny-trained --mode agg,disagg
      trtx eval --tasks gsm8k,mmlu --model Qwen/Qwen3-0.6B --limit 200
      trtx eval --tasks trtx_json --min-score trtx_json:schema_compliance:0.9
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
    uses += [f"no {task}" for task in ("needle", "perplexity") if task not in _listed(tasks)]
    refuse_ignored(context, uses)
    from trtx.experiment import evaluate as score

    spec = _spec(given_options(context))
    refuse_unused(context, model, modes=spec.modes, attach=spec.attach, encode=spec.topology.encoders)
    show_run("trtx eval", partial(score, spec, parent=run.output), _result, as_json=run.as_json)


def _result(run_dir: Path) -> tuple[RenderableType, dict[str, Any]]:
    from trtx.report.evaluation import evaluation_fields, evaluation_table, read_evaluation_view

    view = read_evaluation_view(run_dir)
    return evaluation_table(view), evaluation_fields(view)


_OWN = (
    *("limit", "num_fewshot", "task_dir", "endpoint_type", "concurrency", "min_score", "baseline", "max_drop"),
    *("request_timeout", "needle_samples", "text"),
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
            f"--{name.replace('_', '-')} {quoted(text)}: expected whole numbers with commas between, as 0,50,100"
        ) from error
