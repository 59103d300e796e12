"""``trtx bench ab``: compares two topologies on the same GPUs, one at a time, and restarts both in every round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb
from trtx.cli.gate_options import MaxErrorRateOption, MaxRegressionOption, MetricsOption, WindowOption
from trtx.cli.placement import refuse_ignored
from trtx.cli.run_options import DryRunOption, JsonOption

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: as trtx bench; also 1 if B regressed, and 3 if the rounds don't show whether it did.",
)
def ab(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="Sweep file with one topology, the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Sweep file with the other topology and the same load.")],
    *,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often each topology is started and measured, in the order ABBA.")
    ] = 5,
    max_regression: MaxRegressionOption = None,
    metrics: MetricsOption = None,
    window: WindowOption = None,
    max_error_rate: MaxErrorRateOption = None,
    output: options.OutputOption = Path("runs"),
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure two topologies in turn on the same GPUs, and compare B with A.

    Each round restarts both in the opposite order of the round before, so that a
    drift of the machine affects both alike. A run that ended early can be resumed
    with `trtx bench --resume`.

    \b
    Examples:
      trtx bench ab bf16.yaml fp8.yaml
      trtx bench ab main.yaml change.yaml --rounds 8 --max-regression 3%
    """
    uses = ["dry run"] if dry_run else []
    refuse_ignored(context, [*uses, *(["no gate"] if max_regression is None else [])])
    from trtx.cli.bench import measure
    from trtx.experiment.bench.ab import ab_spec

    gate: dict[str, Any] = {
        "max_regression": max_regression,
        "metrics": metrics,
        "window": window,
        "max_error_rate": max_error_rate,
    }
    spec = ab_spec(a, b, rounds, {name: value for name, value in gate.items() if value is not None})
    measure(spec, output, dry_run=dry_run, as_json=as_json)
