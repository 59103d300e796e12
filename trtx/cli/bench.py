"""``trtx bench``: serves each mode, or attaches to a server, measures a sweep, and writes a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, typed
from trtx.cli.gate_options import GateOptions, gate_overlay
from trtx.cli.load_options import (
    AxisOptions,
    ImageOptions,
    LoadOptions,
    PromptOptions,
    load_fields,
    load_uses,
    sweep_fields,
)
from trtx.cli.placement import refuse_ignored
from trtx.cli.request_options import RequestOptions
from trtx.cli.sentences import tell
from trtx.errors import TrtxError, UsageError

if TYPE_CHECKING:
    from trtx.experiment import ExperimentSpec, FinishedRun
    from trtx.runs.forms import ComparedWith

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LOAD, _OUTPUT = "Load", "Output"


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 every judgement passed; 1 requests failed, a bound was missed or a metric regressed; 2 usage "
    "or config; 3 no verdict; 4 launch failed; 5 aiperf failed; 129, 130 and 143 interrupted.",
)
@options.spread(port=0)
def bench(
    context: typer.Context,
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP]", help="The same as --sweep.", show_default=False)
    ] = None,
    *,
    sweep: Annotated[
        Path | None,
        typer.Option("--sweep", help="Sweep file (YAML) to start from; flags win over it.", rich_help_panel=_LOAD),
    ] = None,
    load: LoadOptions,
    prompts: PromptOptions,
    images: ImageOptions,
    requests: RequestOptions,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Measure what already answers there; serve nothing. Where it asks for an API key: OPENAI_API_KEY.",
            rich_help_panel="Attach",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="With --url: directory or name of the served model's tokenizer. Default: the model's name.",
            rich_help_panel="Attach",
        ),
    ] = None,
    gpu_count: Annotated[
        int | None,
        typer.Option(
            "--gpu-count", help="With --url: GPUs behind it. Default: what it publishes.", rich_help_panel="Attach"
        ),
    ] = None,
    etcd: Annotated[
        list[str] | None,
        typer.Option(
            "--etcd",
            metavar="URL",
            help="With --url: the etcd in which its workers are registered, to count their GPUs there. Repeatable.",
            rich_help_panel="Attach",
        ),
    ] = None,
    etcd_auth: Annotated[
        str | None,
        typer.Option(
            "--etcd-auth",
            metavar="FILES",
            help="With --etcd: ca=FILE,certificate=FILE,key=FILE or username=NAME,password_file=FILE. Default: none.",
            rich_help_panel="Attach",
        ),
    ] = None,
    model: options.ModelOptions,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="agg,disagg",
            help="Modes to serve and measure, one after the other. Default: agg.",
            rich_help_panel="Topology",
        ),
    ] = None,
    topology: options.TopologyOptions,
    media: options.MediaOptions,
    axes: AxisOptions,
    gate: GateOptions,
    output: options.OutputOption = Path("runs"),
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_DIR",
            help="Go on with a run that ended early: keep its finished cells, measure the others.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be started and sent; start nothing.", rich_help_panel=_OUTPUT),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End with the summary as one line of JSON on stdout.", rich_help_panel=_OUTPUT),
    ] = False,
) -> None:
    """Sweep a served topology with aiperf and render a report.

    Serves each mode in turn, warms it up with the load that it measures, lets
    aiperf make that load, compares the modes in one page, and judges them. A run
    is made again from its lock by `trtx bench reproduce LOCK`.

    \b
    Examples:
      trtx bench sweeps/demo.yaml
      trtx bench --mode agg,disagg --concurrency 1,8,64 --isl 128 --osl 32
      trtx bench --mode disagg --prefill 1 --decode 2 --concurrency 8 --trials 3
      trtx bench --concurrency 8 --slo time_to_first_token:p99:le:500
      trtx bench --engine simulated --concurrency 64 --dry-run
    """
    if resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment import resume as go_on

        run_and_show(partial(go_on, resume, argv=own_command_line()), as_json)
        return
    from trtx.cli.console import warn
    from trtx.experiment import run as measure

    spec = asked_of(context)
    warn(() if spec.attach is None else spec.attach.warnings)
    if spec.attach is None:
        refuse_ignored(context, [*spec.modes] if len(spec.modes) == 1 else [])
        encode = max((one.spec.encoders for one in spec.topologies), default=0)
        options.check_roles(spec.modes, model.config, model.overrides, model.recipe, encode=encode)
    if dry_run:
        show_plans(spec, output)
        return
    run_and_show(partial(measure, spec, parent=output, argv=own_command_line()), as_json)


def asked_of(context: typer.Context) -> ExperimentSpec:
    """Builds the experiment spec from a command line of ``trtx bench``.

    Raises UsageError for options that exclude each other and for invalid values.
    """
    given = {str(one.name): context.params[str(one.name)] for one in typed(context)}
    if "sweep" in given and "sweep_file" in given:
        raise UsageError("--sweep names one file and SWEEP another; leave one of them out")
    sweep, url = given.get("sweep", given.get("sweep_file")), given.get("url")
    uses = [*options.engine_uses(context.params["engine"]), *(["dry run"] if context.params["dry_run"] else [])]
    if url is not None or sweep is None:
        uses.append("serve" if url is None else "attach")
    refuse_ignored(context, [*uses, *load_uses(given.keys())])
    from trtx.experiment import load_sweep

    return load_sweep(sweep, _overlay(given))


def own_command_line() -> list[str]:
    """Returns the command line of this process as the run's record stores it."""
    return ["trtx", *sys.argv[1:]]


def run_and_show(start: Callable[..., FinishedRun], as_json: bool) -> None:
    """Performs a run: shows its progress, then its result table and the path of its report."""
    from trtx.cli.bench_view import BenchView
    from trtx.cli.step_summary import add_step_summary
    from trtx.report import console_table, read_run
    from trtx.report.summary import summary_json
    from trtx.runs.forms import LOCK

    view = BenchView()
    try:
        with view:
            outcome = start(listener=view.listener)
    except TrtxError:
        if view.run_dir is not None and view.run_dir.is_dir():
            if (report := view.run_dir / "report.html").exists():
                add_step_summary(view.run_dir)
                tell(f"what was measured until then: {report}")
            if (view.run_dir / LOCK.file).exists():
                tell(f"go on with it: trtx bench --resume {shlex.quote(str(view.run_dir))}")
        raise
    add_step_summary(outcome.run_dir)
    summary = read_run(outcome.run_dir)
    view.print_table(console_table(summary), to_stderr=as_json)
    if outcome.error is not None:
        tell(f"trtx: {outcome.error}")
    if outcome.baseline is not None:
        tell(f"candidate for a baseline: {outcome.baseline}")
    if outcome.unsaved is not None:
        tell(f"trtx: {outcome.unsaved}")
    if as_json:
        tell(f"report: {outcome.report}")
        typer.echo(json.dumps({"run_dir": str(outcome.run_dir), **summary_json(summary)}))
    else:
        typer.echo(str(outcome.report))
    if (error := outcome.error or outcome.unsaved) is not None:
        raise typer.Exit(error.exit_code)


def show_plans(spec: ExperimentSpec, output: Path) -> None:
    """Prints the output of ``--dry-run``: the topology of each mode, its load, and the aiperf commands."""
    from trtx.bench import dataset_of
    from trtx.cli.topology_text import describe_plan
    from trtx.experiment import cells_ahead, estimate, plan_only, read_history

    run = plan_only(spec, parent=output)
    for planned in run.topologies:
        if planned.plan is not None:
            typer.echo(describe_plan(planned.plan))
            typer.echo("")
        typer.echo(f"Load on {planned.label}:")
        for load in spec.load.loads:
            typer.echo(
                f"  {load.asked}: {load.request_count} requests after {load.warmup_request_count} for warm-up, "
                f"{load.isl or '–'} tokens in, {load.osl or '–'} out, {spec.load.trials} trial(s)"
            )
        if spec.load.said:
            typer.echo(f"  prompts: {spec.load.said}")
        if (dataset := dataset_of(spec.load)) is not None:
            typer.echo(f"  records: {dataset.said}")
        for call in planned.aiperf[: len(spec.load.loads)]:
            typer.echo(f"  $ {shlex.join(call)}")
        if spec.load.trials > 1:
            typer.echo(f"  and so on for trials 2 to {spec.load.trials}, each with a seed of its own")
        typer.echo("")
    ahead = cells_ahead(spec, [(planned.label, planned.plan) for planned in run.topologies])
    typer.echo(f"Cells: {', '.join(cell.name for cell in ahead)}")
    typer.echo(f"Time: {estimate(ahead, read_history(output)).sentence(output)}")
    typer.echo("Judged in each cell:")
    for criterion in spec.gate.criteria:
        typer.echo(f"  {criterion}")
    if spec.eval is not None:
        tasks = ", ".join(f"{task} ({count} samples)" for task, count in run.samples.items())
        typer.echo(f"Scored on each topology after its cells, which is not in the time above: {tasks}")
        typer.echo("Judged of its scores:")
        for criterion in spec.eval.criteria(has_baseline=spec.gate.baseline is not None):
            typer.echo(f"  {criterion}")
    if run.baseline is not None:
        for line in _compared_with(run.baseline):
            typer.echo(line)


def _compared_with(baseline: ComparedWith) -> Iterator[str]:
    from trtx.report.verdict import against_baseline, compared_with

    yield compared_with(baseline)
    yield from (f"  {one}" for one in against_baseline(baseline))


def _overlay(given: dict[str, Any]) -> dict[str, Any]:
    """Converts the options to the structure of a sweep file; options of ``load`` and ``attach`` keep their names."""
    from trtx.experiment import Attach

    overlay: dict[str, Any] = {}
    if "mode" in given:
        overlay["modes"] = options.parse_modes(given["mode"])
    if load := load_fields(given):
        overlay["load"] = load
    overlay |= sweep_fields(given)
    overlay |= gate_overlay(given)
    attach = {name: given[name] for name in Attach.model_fields if name in given}
    if attach.keys() - {"model"}:  # the sweep file may contain the URL
        return overlay | {"attach": attach}
    if topology := options.topology_fields(given, overlay.get("modes", [])):
        overlay["topology"] = topology
    return overlay
