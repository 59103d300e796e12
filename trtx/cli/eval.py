"""``trtx eval``: serves each mode, or attaches to a server, and scores its answers with lm-eval."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, typed
from trtx.cli.placement import refuse_ignored
from trtx.cli.sentences import tell
from trtx.config.wording import quoted
from trtx.errors import TrtxError, UsageError

if TYPE_CHECKING:
    from trtx.experiment import EvaluationSpec, FinishedEvaluation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TASKS, _VERDICT, _OUTPUT, _ATTACH = "Tasks", "Verdict", "Output", "Attach"


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
    url: Annotated[
        str | None,
        _option(
            _ATTACH,
            "--url",
            "Score what already answers there; serve nothing. Where it asks for an API key: OPENAI_API_KEY.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(
            _ATTACH,
            "--tokenizer",
            "With --url: directory or name of the served model's tokenizer, which log-likelihood tasks need.",
        ),
    ] = None,
    model: options.ModelOptions,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="agg,disagg",
            help="Modes to serve and score, one after the other. Default: agg.",
            rich_help_panel="Topology",
        ),
    ] = None,
    topology: options.TopologyOptions,
    media: options.MediaOptions,
    output: options.OutputOption = Path("runs"),
    resume: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "--resume",
            "Go on with a run that ended early: ask only for the samples that have no answer.",
            metavar="RUN_DIR",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End with the summary as one line of JSON on stdout.", rich_help_panel=_OUTPUT),
    ] = False,
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
    from trtx.cli.bench import own_command_line

    if resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment import resume_evaluation

        _run_and_show(partial(resume_evaluation, resume, argv=own_command_line()), as_json)
        return
    if tasks is None:
        raise UsageError("--tasks is needed: names of tasks, such as trtx for all that trtx ships, or gsm8k,mmlu")
    uses = [*options.engine_uses(model.engine), "serve" if url is None else "attach"]
    uses += [] if baseline else ["no baseline"]
    uses += [f"no {task}" for task in ("needle", "perplexity") if task not in _listed(tasks)]
    refuse_ignored(context, uses)
    from trtx.experiment import evaluate as score

    spec = _spec({str(one.name): context.params[str(one.name)] for one in typed(context)})
    if spec.attach is None:
        refuse_ignored(context, [*spec.modes] if len(spec.modes) == 1 else [])
        options.check_roles(spec.modes, model.config, model.overrides, model.recipe, encode=spec.topology.encoders)
    _run_and_show(partial(score, spec, parent=output, argv=own_command_line()), as_json)


_OWN = (
    *("limit", "num_fewshot", "task_dir", "endpoint_type", "concurrency", "min_score", "baseline", "max_drop"),
    *("request_timeout", "needle_samples", "text"),
)


def _spec(given: dict[str, Any]) -> EvaluationSpec:
    """Builds the evaluation spec from the options that were given."""
    from trtx.experiment import Attach, evaluation_of

    fields: dict[str, Any] = {name: given[name] for name in _OWN if name in given}
    fields["tasks"] = _listed(given["tasks"])
    fields |= {name: _numbers(name, given[name]) for name in ("needle_lengths", "needle_depths") if name in given}
    if "mode" in given:
        fields["modes"] = options.parse_modes(given["mode"])
    if "url" in given:
        fields["attach"] = {name: given[name] for name in Attach.model_fields if name in given}
    elif topology := options.topology_fields(given, fields.get("modes", [])):
        fields["topology"] = {"port": 0, **topology}
    return evaluation_of(fields)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError as error:
        raise UsageError(
            f"--{name.replace('_', '-')} {quoted(text)}: expected whole numbers with commas between, as 0,50,100"
        ) from error


def _run_and_show(start: Callable[..., FinishedEvaluation], as_json: bool) -> None:
    """Performs a run: shows its progress, then its score table and the path of its report."""
    from trtx.cli.eval_view import EvalView
    from trtx.cli.step_summary import add_step_summary
    from trtx.report.evaluation import evaluation_fields, evaluation_table, read_evaluation_view
    from trtx.runs.forms import LOCK

    view = EvalView()
    try:
        with view:
            outcome = start(listener=view.listener)
    except TrtxError:
        if view.run_dir is not None and (view.run_dir / LOCK.file).exists():
            if (view.run_dir / "summary.md").exists():
                add_step_summary(view.run_dir)
            tell(f"go on with it: trtx eval --resume {shlex.quote(str(view.run_dir))}")
        raise
    add_step_summary(outcome.run_dir)
    shown = read_evaluation_view(outcome.run_dir)
    view.print_table(evaluation_table(shown), to_stderr=as_json)
    if outcome.error is not None:
        tell(f"trtx: {outcome.error}")
    if as_json:
        tell(f"report: {outcome.report}")
        typer.echo(json.dumps({"run_dir": str(outcome.run_dir), **evaluation_fields(shown)}))
    else:
        typer.echo(str(outcome.report))
    if outcome.error is not None:
        raise typer.Exit(outcome.error.exit_code)
