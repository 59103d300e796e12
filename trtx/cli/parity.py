"""``trtx eval parity``: sends the same prompts through several routes of one model and compares them with the first."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import TaskID

from trtx.cli import topology_options as options
from trtx.cli.bars import BarsView
from trtx.cli.command import Verb, typed
from trtx.cli.placement import refuse_ignored
from trtx.cli.sentences import tell
from trtx.config import Mode
from trtx.errors import TrtxError

if TYPE_CHECKING:
    from trtx.experiment.parity.run import FinishedParity, ParityListener
    from trtx.experiment.parity.spec import ParitySpec
    from trtx.launch import Event

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REQUESTS, _OUTPUT, _TOPOLOGY, _ATTACH = "Requests", "Output", "Topology", "Attach"
# The topology events to show; the log has the others.
_SHOWN = {
    "ready",
    "exited",
    "vanished",
    "lost",
    "found",
    "recomputed",
    "unproved",
    "restarting",
    "recovered",
    "gave-up",
}


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """The topology options that a route does not determine; :class:`TopologySpec` has fields of the same names."""

    workers: Annotated[
        int | None, _option(_TOPOLOGY, "--workers", "Workers of the routes kv and migrated, 2 or more. Default: 2.")
    ] = None
    prefill: Annotated[int | None, _option(_TOPOLOGY, "--prefill", "Prefill workers of disagg. Default: 1.")] = None
    decode: Annotated[int | None, _option(_TOPOLOGY, "--decode", "Decode workers of disagg. Default: 1.")] = None
    tp: Annotated[
        int | None, _option(_TOPOLOGY, "--tp", "GPUs a worker (tensor parallel); tensorrt-llm only. Default: 1.")
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Every route has to give the reference's tokens and log-probabilities to the bit; torch engine only.",
            rich_help_panel=_TOPOLOGY,
        ),
    ] = False
    gpus: Annotated[
        str | None,
        _option(_TOPOLOGY, "--gpus", "GPUs to use, as indices into those visible. Default: all.", metavar="0,1"),
    ] = None
    router_args: Annotated[
        str | None,
        _option(_TOPOLOGY, "--router-args", "Further flags of dynamo.frontend, in quotes.", metavar="FLAGS"),
    ] = None


class ParityVerb(Verb):
    """The only verb that serves with a planted fault; all its output mentions the fault."""

    takes_planted_fault = True


@app.command(
    cls=ParityVerb,
    no_args_is_help=False,
    epilog="Exit codes: 0 every route answers as the reference does; 1 one does not, or leaves requests unanswered; "
    "2 usage; 3 no verdict: a route was not seen to be one, or too little was compared; 4 launch failed; 129, 130 and "
    "143 interrupted.",
)
@options.spread()
def parity(
    context: typer.Context,
    *,
    routes: Annotated[
        str | None,
        _option(
            _REQUESTS,
            "--routes",
            "What agg, the reference, is compared with. Default: agg,disagg,kv,migrated,chunked.",
            metavar="A,B",
        ),
    ] = None,
    prompts: Annotated[
        int | None, _option(_REQUESTS, "--prompts", "Requests that are compared; a quarter more are cancelled.")
    ] = None,
    isl: Annotated[int | None, _option(_REQUESTS, "--isl", "Tokens of the longest prompt. Default: 256.")] = None,
    osl: Annotated[int | None, _option(_REQUESTS, "--osl", "Tokens of every answer. Default: 32.")] = None,
    concurrency: Annotated[int | None, _option(_REQUESTS, "--concurrency", "Requests in flight. Default: 8.")] = None,
    seed: Annotated[int | None, _option(_REQUESTS, "--seed", "Of the prompts. Default: 0.")] = None,
    max_num_tokens: Annotated[
        int | None,
        _option(
            _REQUESTS,
            "--max-num-tokens",
            "Tokens of a step on the route chunked. Default: twice the concurrency, and 32 at least.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        _option(
            _ATTACH,
            "--url",
            "Compare what already answers there, in place of routes. Where it asks for an API key: OPENAI_API_KEY.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        _option(
            _ATTACH,
            "--against",
            "With --url: what it is held against, another server's address or a model that trtx serves.",
            metavar="URL|MODEL",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(_ATTACH, "--tokenizer", "With --url: directory or name of the served model's tokenizer."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        _option(_ATTACH, "--dtype", "With --url: what is computed in there, which says how far rounding may go."),
    ] = None,
    model: options.ModelOptions,
    topology: RouteOptions,
    output: options.OutputOption = Path("runs"),
    resume: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "--resume",
            "Go on with a run that ended early: make the passes that had not ended.",
            metavar="RUN_DIR",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End with the summary as one line of JSON on stdout.", rich_help_panel=_OUTPUT),
    ] = False,
) -> None:
    """Send the same prompts through several routes of one model, and compare.

    The reference, agg, is asked twice: what two identical runs differ by is the
    yardstick. Prompts of mixed lengths, some with a common beginning, some
    cancelled; tokens and log-probabilities of answers and prompts are compared.

    \b
    Examples:
      trtx eval parity --model synthetic:tiny-trained
      trtx eval parity --model Qwen/Qwen3-0.6B --routes agg,disagg --concurrency 64
      trtx eval parity --url http://127.0.0.1:8000 --against http://127.0.0.1:9000
      trtx eval parity --url http://127.0.0.1:8000 --against Qwen/Qwen3-0.6B
    """
    from trtx.cli.bench import own_command_line

    if resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment.parity.run import resume_parity

        _run_and_show(partial(resume_parity, resume, argv=own_command_line()), as_json)
        return
    refuse_ignored(context, _attached_uses(url, against))
    from trtx.experiment.parity.run import check_parity

    given = {str(one.name): context.params[str(one.name)] for one in typed(context)}
    spec = _spec(given)
    if spec.attach is None:
        refuse_ignored(context, _uses(spec, model.engine))
    modes: list[Mode] = ["agg", "disagg"] if "disagg" in spec.routes else ["agg"]
    options.check_roles(modes, model.config, model.overrides, model.recipe)
    _run_and_show(partial(check_parity, spec, parent=output, argv=own_command_line()), as_json)


_OWN = ("prompts", "isl", "osl", "concurrency", "seed", "max_num_tokens", "dtype")
_FIELDS = {"config": "engine_configs", "recipe": "engine_configs"}  # option -> field, if they differ


def _attached_uses(url: str | None, against: str | None) -> list[str]:
    """Returns the uses of ``trtx eval parity``, by their names in :mod:`trtx.cli.placement`."""
    if url is None:
        return ["serve"]
    if against is None:
        return ["no routes", "no against"]
    return ["no routes", "attach" if _is_address(against) else "against a model"]


def _is_address(against: str) -> bool:
    return "://" in against


def _uses(spec: ParitySpec, engine: str) -> list[str]:
    """Returns the uses that follow from the spec, by their names in :mod:`trtx.cli.placement`."""
    found = [*options.engine_uses(engine)]
    found += [] if "disagg" in spec.routes else ["no disagg"]
    found += [] if {"kv", "migrated"} & {*spec.routes} else ["one worker"]
    return found + ([] if "chunked" in spec.routes else ["no chunks"])


def _spec(given: dict[str, Any]) -> ParitySpec:
    """Builds the parity spec from the options that were given."""
    from trtx.experiment.parity.spec import parity_of, planted_fault

    fields: dict[str, Any] = {name: given[name] for name in _OWN if name in given}
    if "url" in given:
        return parity_of({**fields, **_attached(given)})
    if "routes" in given:
        fields["routes"] = [name.strip() for name in given["routes"].split(",")]
    if (fault := planted_fault()) is not None:
        fields["fault"] = fault
    if topology := _topology_fields(given):
        fields["topology"] = {"port": 0, **topology}
    return parity_of(fields)


def _attached(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an attached comparison: of two servers, or of one server and the model in ``--against``,
    which trtx serves."""
    own = {name: given[name] for name in ("url", "model", "tokenizer") if name in given}
    fields: dict[str, Any] = {"routes": (), "attach": own}
    if _is_address(given["against"]):
        return {**fields, "against": {"url": given["against"]}}
    return {**fields, "topology": {"port": 0, **_topology_fields({**given, "model": given["against"]})}}


def _topology_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the topology fields, checked by the same rules as ``trtx serve``'s options."""
    chosen = {name: given[name] for name in options.OPTION_NAMES if name in given}
    checked = options.build_spec(mode="agg", **chosen).model_dump(mode="json")
    return {name: checked[name] for name in (_FIELDS.get(one, one) for one in chosen)}


def _run_and_show(start: Any, as_json: bool) -> None:
    """Performs a run: shows its progress, then its result table and the path of its report."""
    from trtx.cli.step_summary import add_step_summary
    from trtx.report.parity import parity_fields, parity_table, read_parity_view
    from trtx.runs.forms import LOCK

    view = _ParityView()
    try:
        with view:
            outcome: FinishedParity = start(listener=view.listener)
    except TrtxError:
        if view.run_dir is not None and (view.run_dir / LOCK.file).exists():
            if (view.run_dir / "summary.md").exists():
                add_step_summary(view.run_dir)
            if (report := view.run_dir / "report.html").exists():
                tell(f"what was compared until then: {report}")
            tell(f"go on with it: trtx eval parity --resume {shlex.quote(str(view.run_dir))}")
        raise
    add_step_summary(outcome.run_dir)
    shown = read_parity_view(outcome.run_dir)
    view.print_table(parity_table(shown), to_stderr=as_json)
    if outcome.error is not None:
        tell(f"trtx: {outcome.error}")
    if as_json:
        tell(f"report: {outcome.report}")
        typer.echo(json.dumps({"run_dir": str(outcome.run_dir), **parity_fields(shown)}))
    else:
        typer.echo(str(outcome.report))
    if outcome.error is not None:
        raise typer.Exit(outcome.error.exit_code)


class _ParityView(BarsView):
    """Shows the progress of one run. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir: Path | None = None  # None until the run directory exists
        self._passes: dict[str, TaskID] = {}
        self._said: set[str] = set()

    @property
    def listener(self) -> ParityListener:
        from trtx.experiment.parity.run import ParityListener

        return ParityListener(
            self._on_start, self._on_route, self._on_event, self._on_progress, self._on_kill, self.say
        )

    def _on_start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.say(f"run: {run_dir}")

    def _on_route(self, route: str, is_served: bool) -> None:
        self.say(f"{route}: starting the topology" if is_served else f"{route}: asking")

    def _on_event(self, route: str, event: Event) -> None:
        if event.kind in _SHOWN:
            self.say(f"{route}: {event.message}")

    def _on_progress(self, label: str, ended: int, total: int) -> None:
        if label not in self._passes:
            self._passes[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._passes[label], completed=ended)
        if ended == total and label not in self._said:
            self._said.add(label)
            self.say(f"{label}: {total} requests")

    def _on_kill(self, route: str, name: str, open_streams: int) -> None:
        self.say(f"{route}: killed {name} while {open_streams} streams were open there")
