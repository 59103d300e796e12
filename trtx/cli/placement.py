"""The uses of each verb, and the options that each use would ignore, which are refused there.

Options that are generated from a field name these uses in the field's record (``trtx/config/option_field.py``); all
other options are named here. Tests pass each option in each use of its verb and check that it is either refused or
changes something.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import typer

from trtx.cli.command import spoken_name, typed
from trtx.cli.field_options import option_of
from trtx.cli.verb_help import option_name
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class VerbUse:
    """One way to call a verb: the options that it refuses, and the parts of the message that refuses them."""

    where: str
    because: str
    way_out: str = "leave one of them out"
    options: str = ""  # besides those whose field's record names this use
    all_but: str | None = None  # every option but these

    def ignores(self, option: str) -> bool:
        return option in self.options.split() or (self.all_but is not None and option not in self.all_but.split())

    def of(self, options: str) -> VerbUse:
        """Returns the same use for other options."""
        return replace(self, options=options)


_SERVED: Mapping[str, VerbUse] = {
    "agg": VerbUse(
        "with --mode agg",
        "which has --workers, not prefill and decode workers",
        "leave it out, or choose --mode disagg",
    ),
    "disagg": VerbUse(
        "with --mode disagg", "where --prefill and --decode set it", "leave it out, or choose --mode agg"
    ),
    "no GPU": VerbUse("with --engine simulated or paced", "which uses no GPU"),
}
_RESUME = VerbUse("with --resume", "which continues a run as it was started", "leave it out", all_but="--resume --json")
# The options of a deployment that trtx serves, besides those of TopologySpec's and MediaLimits' fields.
_DEPLOYMENT = "--served-model-name --engine --config --recipe --set"
_UNSERVED = VerbUse(
    "without --url", "because it describes the server there", "add --url, or leave it out", "--tokenizer"
)
# verb -> name of the use -> the use. Several uses of a verb can apply at once.
USES: Mapping[str, Mapping[str, VerbUse]] = {
    "serve": {
        **_SERVED,
        "hosts": VerbUse("with --hosts", "because the hosts file places the processes", "leave it out", "--frontends"),
        "no hosts": VerbUse(
            "without --hosts", "because it names a host of that file", "add --hosts, or leave it out", "--this-host"
        ),
        "roles": VerbUse(
            "with roles in the hosts file", "which set the number of workers", "leave it out, or take the roles out"
        ),
    },
    "serve join": {},
    "bench": {
        "resume": _RESUME,
        "attach": VerbUse(
            "with --url", "which measures a server that already runs", options=f"{_DEPLOYMENT} --mode --axis"
        ),
        "serve": _UNSERVED.of("--tokenizer --gpu-count --etcd --etcd-auth"),
        **_SERVED,
        "closed loop": VerbUse(
            "without --request-rate", "because it spaces the requests of a rate", "add --request-rate, or leave it out"
        ),
        "open loop": VerbUse("with --request-rate", "which already sets when requests are sent"),
        "schedule": VerbUse("with --fixed-schedule", "which sends every request of a trace at its own time"),
        "dataset": VerbUse("with --input-file or --public-dataset", "which has its own prompts"),
        "file": VerbUse("with --input-file", "which already is a dataset"),
        "public": VerbUse("with --public-dataset", "which already is a dataset"),
        "no file": VerbUse(
            "without --input-file", "because it describes the records of that file", "add --input-file, or leave it out"
        ),
        "one turn": VerbUse(
            "without --session-turns-mean",
            "because it shapes sessions of several turns",
            "add --session-turns-mean, or leave it out",
        ),
        "no delay": VerbUse(
            "without --session-turn-delay-mean",
            "because it spreads that delay",
            "add --session-turn-delay-mean, or leave it out",
        ),
        "prefix": VerbUse("with --prefix-prompt-length", "which already sets what prompts share"),
        "no prefix": VerbUse(
            "without --prefix-prompt-length",
            "because it counts prefixes of that length",
            "add --prefix-prompt-length, or leave it out",
        ),
        "no images": VerbUse(
            "without --image-batch-size",
            "because requests then have no images",
            "add --image-batch-size, or leave it out",
        ),
        "dry run": VerbUse("with --dry-run", "which measures nothing", options="--json"),
    },
    "bench ab": {
        "no gate": VerbUse(
            "without --max-regression",
            "because only that limit compares metrics in a verdict",
            "add it, or leave it out",
            "--metrics --window",
        ),
        "dry run": VerbUse("with --dry-run", "which measures nothing", options="--json"),
    },
    "bench reproduce": {"dry run": VerbUse("with --dry-run", "which measures nothing", options="--json")},
    "eval": {
        "resume": _RESUME,
        "attach": VerbUse("with --url", "which scores a server that already runs", options=f"{_DEPLOYMENT} --mode"),
        "serve": _UNSERVED,
        **_SERVED,
        "no baseline": VerbUse(
            "without --baseline",
            "because it limits the difference to a baseline",
            "add --baseline, or leave it out",
            "--max-drop",
        ),
        "no needle": VerbUse(
            "without needle in --tasks",
            "because it shapes the prompts of that task",
            "add that task, or leave it out",
            "--needle-lengths --needle-depths --needle-samples",
        ),
        "no perplexity": VerbUse(
            "without perplexity in --tasks",
            "because only that task scores a text",
            "add that task, or leave it out",
            "--text",
        ),
        "no schemas": VerbUse(
            "without schemas in --tasks",
            "because only that task reads it",
            "add that task, or leave it out",
            "--schemas",
        ),
    },
    "eval fidelity": {
        "resume": _RESUME,
        "attach": VerbUse("with --url", "which compares a server that already runs", options=f"{_DEPLOYMENT} --mode"),
        "serve": _UNSERVED,
        "agg": _SERVED["agg"],
        "disagg": _SERVED["disagg"],
    },
    "eval parity": {
        "resume": _RESUME,
        "no routes": VerbUse(
            "with --url",
            "which compares a server that already runs",
            options="--routes --max-num-tokens --workers --prefill --decode",
        ),
        "serve": VerbUse(
            "without --url",
            "because it describes the server there",
            "add --url, or leave it out",
            "--against --dtype --tokenizer",
        ),
        "no against": VerbUse(
            "without --against",
            "because the server needs a reference",
            "add --against with the address of another server or a model to serve",
            "--url",
        ),
        "attach": VerbUse(
            "with --against URL",
            "because trtx then serves nothing",
            "leave it out",
            f"{_DEPLOYMENT} --router-args --deterministic --tp --gpus",
        ),
        "against a model": VerbUse(
            "with --against MODEL", "because the tokenizer is that model's", "leave it out", "--tokenizer"
        ),
        "no GPU": _SERVED["no GPU"].of("--tp --gpus"),
        "no disagg": VerbUse(
            "without the route disagg",
            "because it counts the workers of that route",
            "add it to --routes, or leave it out",
            "--prefill --decode",
        ),
        "one worker": VerbUse(
            "without the routes kv and migrated",
            "because it counts the workers of these routes",
            "add one to --routes, or leave it out",
            "--workers",
        ),
        "no chunks": VerbUse(
            "without the route chunked",
            "because it limits the steps of that route",
            "add it to --routes, or leave it out",
            "--max-num-tokens",
        ),
    },
    "build": {
        "build": VerbUse(
            "without --check", "because it belongs to the check", "add --check, or leave it out", "--mode --all --json"
        ),
        "none": VerbUse("with --quant none", "which needs no calibration", options="--calib --calib-size"),
        "tensorrt": VerbUse(
            "with --backend tensorrt",
            "which builds for the GPU of this machine and proves nothing",
            options="--max-ppl-increase --gpu",
        ),
        "check": VerbUse(
            "with --check",
            "which builds nothing",
            options="--quant --kv-dtype --backend --role --output --calib --calib-size --max-ppl-increase",
        ),
        "check all": VerbUse("with --all", "which checks every shipped config", options="MODEL --config --recipe"),
    },
    "export nginx": {
        "hosts": VerbUse("with --hosts", "because the hosts file places the processes", "leave it out", "--frontends"),
    },
    "export prometheus": {
        "runs": VerbUse("with RUN", "which is not a topology in Kubernetes", "leave it out", "--namespace"),
        "kubernetes": VerbUse("with --kubernetes", "where pods are found by their labels", options="RUNS"),
    },
    "export grafana": {},
    "export kubernetes": {
        **_SERVED,
        "dry run": VerbUse("with --dry-run", "which writes nothing", "leave it out", "--output"),
    },
    "export slurm": {
        "agg": _SERVED["agg"],
        "disagg": _SERVED["disagg"],
        "no GPU": _SERVED["no GPU"].of("--gpus-per-node"),
        "dry run": VerbUse("with --dry-run", "which writes nothing", "leave it out", "--output"),
        "no container": VerbUse(
            "without --container-image",
            "because a container has the mounts",
            "add it, or leave it out",
            "--container-mounts",
        ),
    },
    "compare": {
        "no gate": VerbUse(
            "without --max-regression",
            "because without that limit no condition prevents a comparison",
            "add it, or leave it out",
            "--allow-different",
        ),
    },
    "baseline": {
        "list": VerbUse("with list", "which lists all baselines", "leave it out", "WORDS --older-than --remove"),
        "show": VerbUse("with show", "which removes nothing", "leave it out", "--older-than --remove"),
        "save": VerbUse("with save", "which saves a candidate", "leave it out", "--older-than --remove --json"),
        "promote": VerbUse("with promote", "which removes nothing", "leave it out", "--older-than --remove --json"),
        "expire": VerbUse("with expire", "which selects baselines by state and age", "leave it out", "WORDS --json"),
    },
    "report": {},
    "sleep": {},
    "wake": {},
    "update": {},
    "explain": {},
    "doctor": {
        "no hosts": VerbUse(
            "without --hosts", "because it concerns the other hosts", "add it, or leave it out", "--this-host --wait"
        ),
    },
}


def uses_that_ignore(verb: str, option: str) -> tuple[str, ...]:
    """Returns the uses of ``verb`` that would ignore ``option``: they name it, or its field's record names them."""
    recorded = _recorded(verb).get(option, ())
    return tuple(name for name, use in USES[verb].items() if name in recorded or use.ignores(option))


@functools.cache
def _recorded(verb: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the uses in the records of the fields that the verb's generated options set, by option."""
    from trtx.cli.app import Verbs

    verb_function = Verbs().get_command(typer.Context, verb).callback
    return {option_of(field): uses for field, uses in getattr(verb_function, "uses", {}).items()}


def refuse_ignored(context: typer.Context, uses: Iterable[str]) -> None:
    """Raises UsageError for the first given option that one of ``uses`` would ignore."""
    verb, held = str(context.info_name), tuple(uses)
    for parameter in typed(context):
        for name in uses_that_ignore(verb, option_name(parameter)):
            if name in held:
                use = USES[verb][name]
                raise UsageError(f"{spoken_name(parameter)} has no effect {use.where}, {use.because}; {use.way_out}")
