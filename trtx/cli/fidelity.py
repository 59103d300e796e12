"""``trtx eval fidelity``: compares a served engine, token by token, with the checkpoint in its original precision."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, typed
from trtx.cli.placement import refuse_ignored
from trtx.cli.sentences import tell
from trtx.errors import TrtxError

if TYPE_CHECKING:
    from trtx.experiment import FinishedEvaluation
    from trtx.experiment.fidelity_spec import FidelitySpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REFERENCE, _VERDICT, _OUTPUT, _ATTACH = "Reference", "Verdict", "Output", "Attach"
_OWN = ("reference", "osl", "concurrency", "max_kl", "min_agreement")


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 every judgement passed; 1 sequences without an answer, or a bound missed; 2 usage; 3 no "
    "verdict, or the server is gone; 4 launch failed; 129, 130 and 143 interrupted.",
)
@options.spread(port=0)
def fidelity(
    context: typer.Context,
    *,
    reference: Annotated[
        str | None,
        _option(
            _REFERENCE,
            "--reference",
            "Checkpoint to compare with. Default: what the build was made from, else the model itself.",
            metavar="MODEL",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        _option(
            _REFERENCE,
            "--prompts",
            'How many to make, or JSON lines with "text", "prompt" or "messages". Default: 192.',
            metavar="N|FILE",
        ),
    ] = None,
    osl: Annotated[
        int | None, _option(_REFERENCE, "--osl", "Tokens of the reference's text after each, at most. Default: 64.")
    ] = None,
    concurrency: Annotated[
        int | None, _option(_REFERENCE, "--concurrency", "Requests in flight to the served engine. Default: 8.")
    ] = None,
    max_kl: Annotated[
        float | None,
        _option(_VERDICT, "--max-kl", "KL divergence from the reference, nats a token, that may be.", metavar="NATS"),
    ] = None,
    min_agreement: Annotated[
        float | None,
        _option(
            _VERDICT,
            "--min-agreement",
            "Share of tokens, 0 to 1, at which the likeliest token has to be the same.",
            metavar="SHARE",
        ),
    ] = None,
    url: Annotated[
        str | None,
        _option(
            _ATTACH,
            "--url",
            "Compare what already answers there; serve nothing. Where it asks for an API key: OPENAI_API_KEY.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _option(_ATTACH, "--tokenizer", "With --url: directory or name of the served model's tokenizer."),
    ] = None,
    model: options.ModelOptions,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="agg,disagg",
            help="Modes to serve and compare, one after the other. Default: agg.",
            rich_help_panel="Topology",
        ),
    ] = None,
    topology: options.TopologyOptions,
    output: options.OutputOption = Path("runs"),
    resume: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "--resume",
            "Go on with a run that ended early: ask only for the sequences that have no answer.",
            metavar="RUN_DIR",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="End with the summary as one line of JSON on stdout.", rich_help_panel=_OUTPUT),
    ] = False,
) -> None:
    """Compare a served engine with the embedded one in the checkpoint's own precision.

    The reference answers prompts greedily and scores its text; then each
    topology is served and asked for its log-probabilities of the same tokens:
    KL divergence, how often the likeliest token is the same, perplexity.

    \b
    Examples:
      trtx eval fidelity --model builds/qwen3-8b-fp8-9a8b7c6d --max-kl 0.01
      trtx eval fidelity --model Qwen/Qwen3-8B --set kv_cache_config.dtype=fp8
      trtx eval fidelity --model Qwen/Qwen3-8B --mode disagg --concurrency 64
      trtx eval fidelity --url http://127.0.0.1:8000 --reference Qwen/Qwen3-8B
    """
    from trtx.cli.bench import own_command_line

    if resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment.fidelity import resume_fidelity

        _run_and_show(partial(resume_fidelity, resume, argv=own_command_line()), as_json)
        return
    refuse_ignored(context, ["serve" if url is None else "attach"])
    from trtx.experiment.fidelity import run_fidelity

    spec = _spec({str(one.name): context.params[str(one.name)] for one in typed(context)})
    if spec.attach is None:
        refuse_ignored(context, [*spec.modes] if len(spec.modes) == 1 else [])
        options.check_roles(spec.modes, model.config, model.overrides, model.recipe, encode=spec.topology.encoders)
    _run_and_show(partial(run_fidelity, spec, parent=output, argv=own_command_line()), as_json)


def _spec(given: dict[str, Any]) -> FidelitySpec:
    """Builds the fidelity spec from the options that were given."""
    from trtx.experiment import Attach
    from trtx.experiment.fidelity_spec import fidelity_of

    fields: dict[str, Any] = {name: given[name] for name in _OWN if name in given}
    if "prompts" in given:
        text = str(given["prompts"]).strip()
        is_count = options.WHOLE_NUMBER.fullmatch(text) is not None
        fields |= {"prompts": int(text)} if is_count else {"prompts": None, "prompt_file": Path(text).expanduser()}
    if "mode" in given:
        fields["modes"] = options.parse_modes(given["mode"])
    if "url" in given:
        fields["attach"] = {name: given[name] for name in Attach.model_fields if name in given}
    elif topology := options.topology_fields(given, fields.get("modes", [])):
        fields["topology"] = {"port": 0, **topology}
    return fidelity_of(fields)


def _run_and_show(start: Callable[..., FinishedEvaluation], as_json: bool) -> None:
    """Performs a run: shows its progress, then its result table and the path of its report."""
    from trtx.cli.fidelity_view import FidelityView
    from trtx.cli.step_summary import add_step_summary
    from trtx.report.fidelity import fidelity_fields, fidelity_table, read_fidelity_view
    from trtx.runs.forms import LOCK

    view = FidelityView()
    try:
        with view:
            outcome = start(listener=view.listener)
    except TrtxError:
        if view.run_dir is not None and (view.run_dir / LOCK.file).exists():
            if (view.run_dir / "summary.md").exists():
                add_step_summary(view.run_dir)
            tell(f"go on with it: trtx eval fidelity --resume {shlex.quote(str(view.run_dir))}")
        raise
    add_step_summary(outcome.run_dir)
    shown = read_fidelity_view(outcome.run_dir)
    view.print_table(fidelity_table(shown), to_stderr=as_json)
    if outcome.error is not None:
        tell(f"trtx: {outcome.error}")
    if as_json:
        tell(f"report: {outcome.report}")
        typer.echo(json.dumps({"run_dir": str(outcome.run_dir), **fidelity_fields(shown)}))
    else:
        typer.echo(str(outcome.report))
    if outcome.error is not None:
        raise typer.Exit(outcome.error.exit_code)
