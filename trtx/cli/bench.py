"""``trtx bench``: serves each mode, or attaches to a server, measures a sweep, and writes a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, given_options, optional
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
from trtx.cli.run_options import (
    ATTACH,
    DryRunOption,
    ModeOption,
    RunOptions,
    TokenizerOption,
    UrlOption,
    refuse_unused,
    show_run,
)
from trtx.config.wording import counted
from trtx.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtx.experiment import ExperimentSpec
    from trtx.runs.forms import ComparedWith

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LOAD = "Load"


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
        optional(_LOAD, "--sweep", "Sweep file (YAML); options given here override it."),
    ] = None,
    load: LoadOptions,
    prompts: PromptOptions,
    images: ImageOptions,
    requests: RequestOptions,
    url: UrlOption = None,
    tokenizer: TokenizerOption = None,
    gpu_count: Annotated[
        int | None,
        optional(
            ATTACH, "--gpu-count", "With --url: number of GPUs of the server. Default: the number that it publishes."
        ),
    ] = None,
    etcd: Annotated[
        list[str] | None,
        optional(
            ATTACH,
            "--etcd",
            "With --url: address of the etcd that lists the workers, to count their GPUs. Repeatable.",
            metavar="URL",
        ),
    ] = None,
    etcd_auth: Annotated[
        str | None,
        optional(
            ATTACH,
            "--etcd-auth",
            "With --etcd: ca=FILE,certificate=FILE,key=FILE or username=NAME,password_file=FILE. Default: none.",
            metavar="FILES",
        ),
    ] = None,
    model: options.ModelOptions,
    mode: ModeOption = None,
    topology: options.TopologyOptions,
    media: options.MediaOptions,
    axes: AxisOptions,
    gate: GateOptions,
    run: RunOptions,
    dry_run: DryRunOption = False,
) -> None:
    """Sweep a served topology with aiperf and render a report.

    Serves each mode in turn, warms it up with the measured load, lets aiperf
    generate that load, and compares and judges all modes on one page. To repeat a
    run, use `trtx bench reproduce LOCK`.

    \b
    Examples:
      trtx bench sweeps/demo.yaml
      trtx bench --mode agg,disagg --concurrency 1,8,64 --isl 128 --osl 32
      trtx bench --mode disagg --prefill 1 --decode 2 --concurrency 8 --trials 3
      trtx bench --concurrency 8 --slo time_to_first_token:p99:le:500
      trtx bench --engine simulated --concurrency 64 --dry-run
    """
    if run.resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment import resume

        show_run("trtx bench", partial(resume, run.resume), result, as_json=run.as_json)
        return
    from trtx.cli.console import warn

    spec = asked_of(context)
    warn(() if spec.attach is None else spec.attach.warnings)
    encode = max((one.spec.encoders for one in spec.topologies), default=0)
    refuse_unused(context, model, modes=spec.modes, attach=spec.attach, encode=encode)
    measure(spec, run.output, dry_run=dry_run, as_json=run.as_json)


def measure(spec: ExperimentSpec, output: Path, *, dry_run: bool, as_json: bool) -> None:
    """Performs the run of ``spec``, or prints its plans."""
    if dry_run:
        show_plans(spec, output)
        return
    from trtx.experiment import run

    show_run("trtx bench", partial(run, spec, parent=output), result, as_json=as_json)


def result(run_dir: Path) -> tuple[RenderableType, dict[str, Any]]:
    """Returns the result table and the fields of the summary."""
    from trtx.report import console_table, read_run
    from trtx.report.summary import summary_json

    view = read_run(run_dir)
    return console_table(view), summary_json(view)


def asked_of(context: typer.Context) -> ExperimentSpec:
    """Builds the experiment spec from a command line of ``trtx bench``.

    Raises UsageError for options that exclude each other and for invalid values.
    """
    given = given_options(context)
    if "sweep" in given and "sweep_file" in given:
        raise UsageError("--sweep and SWEEP both name a sweep file; leave one of them out")
    sweep, url = given.get("sweep", given.get("sweep_file")), given.get("url")
    uses = [*options.engine_uses(context.params["engine"]), *(["dry run"] if context.params["dry_run"] else [])]
    if url is not None or sweep is None:
        uses.append("serve" if url is None else "attach")
    refuse_ignored(context, [*uses, *load_uses(given.keys())])
    from trtx.experiment import load_sweep

    return load_sweep(sweep, _overlay(given))


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
                f"{load.isl or '–'} tokens in, {load.osl or '–'} out, {counted(spec.load.trials, 'trial')}"
            )
        if spec.load.description:
            typer.echo(f"  prompts: {spec.load.description}")
        if (dataset := dataset_of(spec.load)) is not None:
            typer.echo(f"  records: {dataset.description}")
        for call in planned.aiperf[: len(spec.load.loads)]:
            typer.echo(f"  $ {shlex.join(call)}")
        if spec.load.trials > 1:
            typer.echo(f"  and so on for trials 2 to {spec.load.trials}, each with its own seed")
        typer.echo("")
    ahead = cells_ahead(spec, [(planned.label, planned.plan) for planned in run.topologies])
    typer.echo(f"Cells: {', '.join(cell.name for cell in ahead)}")
    typer.echo(f"Time: {estimate(ahead, read_history(output)).sentence(output)}")
    typer.echo("Criteria for each cell:")
    for criterion in spec.gate.criteria:
        typer.echo(f"  {criterion}")
    if spec.eval is not None:
        tasks = ", ".join(f"{task} ({count} samples)" for task, count in run.samples.items())
        typer.echo(f"Tasks scored on each topology after its cells, not included in the time above: {tasks}")
        typer.echo("Criteria for its scores:")
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
