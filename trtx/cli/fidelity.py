"""``trtx eval fidelity``: compares a served engine, token by token, with the checkpoint in its original precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtx.experiment.fidelity_spec import FidelitySpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REFERENCE, _VERDICT = "Reference", "Verdict"
_OWN = ("reference", "osl", "concurrency", "max_kl", "min_agreement")


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 every judgement passed; 1 a sequence has no answer, or a bound is missed; 2 usage; 3 no "
    "verdict, or the server is gone; 4 launch failed; 129, 130 and 143 interrupted.",
)
@options.spread(port=0)
def fidelity(
    context: typer.Context,
    *,
    reference: Annotated[
        str | None,
        optional(
            _REFERENCE,
            "--reference",
            "Checkpoint to compare with. Default: the source of a build, or the model itself.",
            metavar="MODEL",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        optional(
            _REFERENCE,
            "--prompts",
            'Number of prompts to generate, or a JSONL file with "text", "prompt" or "messages". Default: 192.',
            metavar="N|FILE",
        ),
    ] = None,
    osl: Annotated[
        int | None, optional(_REFERENCE, "--osl", "Most tokens that the reference writes after a prompt. Default: 64.")
    ] = None,
    concurrency: Annotated[
        int | None, optional(_REFERENCE, "--concurrency", "Number of concurrent requests. Default: 8.")
    ] = None,
    max_kl: Annotated[
        float | None,
        optional(_VERDICT, "--max-kl", "Largest KL divergence from the reference, in nats per token.", metavar="NATS"),
    ] = None,
    min_agreement: Annotated[
        float | None,
        optional(
            _VERDICT,
            "--min-agreement",
            "Smallest share of positions (0 to 1) at which both have the same most likely token.",
            metavar="SHARE",
        ),
    ] = None,
    url: UrlOption = None,
    tokenizer: TokenizerOption = None,
    model: options.ModelOptions,
    mode: ModeOption = None,
    topology: options.TopologyOptions,
    run: RunOptions,
) -> None:
    """Compare a served engine with the embedded one in the checkpoint's own precision.

    The reference answers the prompts greedily and scores its own text. Then each
    topology is served and returns its log-probabilities of the same tokens. The
    report shows KL divergence, agreement on the most likely token, and perplexity.

    \b
    Examples:
      trtx eval fidelity --model builds/qwen3-8b-fp8-9a8b7c6d --max-kl 0.01
      trtx eval fidelity --model Qwen/Qwen3-8B --set kv_cache_config.dtype=fp8
      trtx eval fidelity --model Qwen/Qwen3-8B --mode disagg --concurrency 64
      trtx eval fidelity --url http://127.0.0.1:8000 --reference Qwen/Qwen3-8B
    """
    if run.resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment.fidelity import resume_fidelity

        show_run("trtx eval fidelity", partial(resume_fidelity, run.resume), _result, as_json=run.as_json)
        return
    refuse_ignored(context, ["serve" if url is None else "attach"])
    from trtx.experiment.fidelity import run_fidelity

    spec = _spec(given_options(context))
    refuse_unused(context, model, modes=spec.modes, attach=spec.attach, encode=spec.topology.encoders)
    show_run("trtx eval fidelity", partial(run_fidelity, spec, parent=run.output), _result, as_json=run.as_json)


def _result(run_dir: Path) -> tuple[RenderableType, dict[str, Any]]:
    from trtx.report.fidelity import read_fidelity_view

    view = read_fidelity_view(run_dir)
    return view.on_terminal, view.summary


def _spec(given: dict[str, Any]) -> FidelitySpec:
    """Builds the fidelity spec from the options that were given."""
    from trtx.experiment.fidelity_spec import fidelity_of

    fields: dict[str, Any] = {name: given[name] for name in _OWN if name in given}
    if "prompts" in given:
        text = str(given["prompts"]).strip()
        is_count = options.WHOLE_NUMBER.fullmatch(text) is not None
        fields |= {"prompts": int(text)} if is_count else {"prompts": None, "prompt_file": Path(text).expanduser()}
    return fidelity_of(fields | topology_and_attach(given))
