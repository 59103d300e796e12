"""``trtx eval parity``: sends the same prompts through several routes of one model and compares them with the first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, given_options, optional
from trtx.cli.placement import refuse_ignored
from trtx.cli.run_options import ATTACH, RunOptions, TokenizerOption, UrlOption, show_run
from trtx.config import Mode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtx.experiment.parity.spec import ParitySpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_REQUESTS, _TOPOLOGY = "Requests", "Topology"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """The topology options that a route does not determine; :class:`TopologySpec` has fields of the same names."""

    workers: Annotated[
        int | None, optional(_TOPOLOGY, "--workers", "Workers of the routes kv and migrated, at least 2. Default: 2.")
    ] = None
    prefill: Annotated[
        int | None, optional(_TOPOLOGY, "--prefill", "Prefill workers of the route disagg. Default: 1.")
    ] = None
    decode: Annotated[
        int | None, optional(_TOPOLOGY, "--decode", "Decode workers of the route disagg. Default: 1.")
    ] = None
    tp: Annotated[
        int | None,
        optional(_TOPOLOGY, "--tp", "GPUs per worker (tensor parallel). Default: 1."),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Require tokens and log-probabilities that are bitwise equal to the reference; only with torch.",
            rich_help_panel=_TOPOLOGY,
        ),
    ] = False
    gpus: Annotated[
        str | None,
        optional(_TOPOLOGY, "--gpus", "GPUs to use, as indices into the visible ones. Default: all.", metavar="0,1"),
    ] = None
    router_args: Annotated[
        str | None,
        optional(_TOPOLOGY, "--router-args", "More flags for dynamo.frontend, in quotes.", metavar="FLAGS"),
    ] = None


class ParityVerb(Verb):
    """The only verb that serves with a planted fault; all its output mentions the fault."""

    takes_planted_fault = True


@app.command(
    cls=ParityVerb,
    no_args_is_help=False,
    epilog="Exit codes: 0 every route agrees with the reference; 1 a route differs, or left requests unanswered; 2 "
    "usage; 3 no verdict: nothing shows that a route was taken, or too few requests were compared; 4 launch failed; "
    "129, 130 and 143 interrupted.",
)
@options.spread()
def parity(
    context: typer.Context,
    *,
    routes: Annotated[
        str | None,
        optional(
            _REQUESTS,
            "--routes",
            "Routes to compare with agg, the reference. Default: agg,disagg,kv,migrated,chunked. speculating: one "
            "worker that speculates; agg then does not.",
            metavar="A,B",
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        optional(
            _REQUESTS, "--prompts", "Number of requests to compare; a quarter more are cancelled early. Default: 64."
        ),
    ] = None,
    isl: Annotated[
        int | None, optional(_REQUESTS, "--isl", "Length of the longest prompt in tokens. Default: 256.")
    ] = None,
    osl: Annotated[int | None, optional(_REQUESTS, "--osl", "Length of every answer in tokens. Default: 32.")] = None,
    concurrency: Annotated[
        int | None, optional(_REQUESTS, "--concurrency", "Number of concurrent requests. Default: 8.")
    ] = None,
    seed: Annotated[int | None, optional(_REQUESTS, "--seed", "Seed of the generated prompts. Default: 0.")] = None,
    max_num_tokens: Annotated[
        int | None,
        optional(
            _REQUESTS,
            "--max-num-tokens",
            "Token budget of a step on the route chunked. Default: twice the concurrency, at least 32.",
        ),
    ] = None,
    url: UrlOption = None,
    against: Annotated[
        str | None,
        optional(
            ATTACH,
            "--against",
            "With --url: the reference, either the address of another server or a model for trtx to serve.",
            metavar="URL|MODEL",
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        optional(
            ATTACH,
            "--dtype",
            "With --url: data type in which the server computes; it determines the tolerance for rounding.",
        ),
    ] = None,
    model: options.ModelOptions,
    topology: RouteOptions,
    run: RunOptions,
) -> None:
    """Send the same prompts through several routes of one model, and compare.

    The reference, agg, gets every prompt twice; the difference between its two
    passes is the tolerance. Prompts have mixed lengths, some share a prefix and
    some are cancelled. Tokens and log-probabilities are compared.

    \b
    Examples:
      trtx eval parity --model synthetic:tiny-trained
      trtx eval parity --model Qwen/Qwen3-0.6B --routes agg,disagg --concurrency 64
      trtx eval parity --url http://127.0.0.1:8000 --against http://127.0.0.1:9000
      trtx eval parity --url http://127.0.0.1:8000 --against Qwen/Qwen3-0.6B
    """
    if run.resume is not None:
        refuse_ignored(context, ("resume",))
        from trtx.experiment.parity.run import resume_parity

        show_run("trtx eval parity", partial(resume_parity, run.resume), _result, as_json=run.as_json)
        return
    refuse_ignored(context, _attached_uses(url, against))
    from trtx.experiment.parity.run import check_parity

    spec = _spec(given_options(context))
    if spec.attach is None:
        refuse_ignored(context, _uses(spec, model.engine))
    modes: list[Mode] = ["agg", "disagg"] if "disagg" in spec.routes else ["agg"]
    options.check_roles(modes, model.config, model.overrides, model.recipe)
    show_run("trtx eval parity", partial(check_parity, spec, parent=run.output), _result, as_json=run.as_json)


def _result(run_dir: Path) -> tuple[RenderableType, dict[str, Any]]:
    from trtx.report.parity import read_parity_view

    view = read_parity_view(run_dir)
    return view.on_terminal, view.summary


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
