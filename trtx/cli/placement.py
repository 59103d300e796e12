"""The table of all options with the uses of their verb that would ignore them.

An option is refused in a use that would ignore it. Tests pass each option in each use of its verb and check that it is
either refused or changes something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import typer

from trtx.cli.command import option_name, spoken_name, typed
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Use:
    """One way to call a verb. The fields are parts of the message that refuses an option in this use."""

    where: str
    because: str
    way_out: str = "leave one of them out"


_SERVED: Mapping[str, Use] = {
    "agg": Use("with --mode agg", "whose workers --workers counts", "leave it out, or choose --mode disagg"),
    "disagg": Use(
        "with --mode disagg", "whose workers --prefill and --decode count", "leave it out, or choose --mode agg"
    ),
    "no GPU": Use("with --engine simulated or paced", "which has nothing to spread over GPUs"),
}
# verb -> name of the use -> its texts. Several uses of a verb can apply at once.
USES: Mapping[str, Mapping[str, Use]] = {
    "serve": {
        **_SERVED,
        "hosts": Use("beside --hosts", "whose file says what is where", "leave it out"),
        "no hosts": Use("without --hosts", "whose machines it is about", "add --hosts, or leave it out"),
        "roles": Use("beside --hosts with roles", "which count the workers", "leave it out, or leave roles out"),
    },
    "serve join": {},
    "bench": {
        **_SERVED,
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which measures what is served already"),
        "serve": Use("without --url", "whose deployment it describes", "add --url, or leave it out"),
        "closed loop": Use("without --request-rate", "whose requests it spaces", "add --request-rate, or leave it out"),
        "open loop": Use("beside --request-rate", "which says when requests are sent already"),
        "schedule": Use("beside --fixed-schedule", "which sends all of a mooncake_trace by its own times"),
        "dataset": Use("beside --input-file or --public-dataset", "which has prompts of its own"),
        "file": Use("beside --input-file", "which is a dataset already"),
        "public": Use("beside --public-dataset", "which is a dataset already"),
        "no file": Use("without --input-file", "whose records it is about", "add --input-file, or leave it out"),
        "one turn": Use(
            "without --session-turns-mean", "whose sessions it shapes", "add --session-turns-mean, or leave it out"
        ),
        "no delay": Use(
            "without --session-turn-delay-mean", "which it spreads", "add --session-turn-delay-mean, or leave it out"
        ),
        "prefix": Use("beside --prefix-prompt-length", "which says what prompts share already"),
        "no prefix": Use(
            "without --prefix-prompt-length", "whose prefixes it counts", "add --prefix-prompt-length, or leave it out"
        ),
        "no images": Use(
            "without --image-batch-size", "whose images it shapes", "add --image-batch-size, or leave it out"
        ),
        "dry run": Use("beside --dry-run", "which measures nothing"),
    },
    "bench ab": {
        "no gate": Use("without --max-regression", "which alone compares in a verdict", "add it, or leave it out"),
        "dry run": Use("beside --dry-run", "which measures nothing"),
    },
    "bench reproduce": {"dry run": Use("beside --dry-run", "which measures nothing")},
    "eval": {
        **_SERVED,
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which scores what is served already"),
        "serve": Use("without --url", "whose deployment it describes", "add --url, or leave it out"),
        "no baseline": Use("without --baseline", "which alone it bounds", "add --baseline, or leave it out"),
        "no needle": Use("without needle in --tasks", "whose prompts it shapes", "add that task, or leave it out"),
        "no perplexity": Use("without perplexity in --tasks", "which scores it", "add that task, or leave it out"),
    },
    "eval fidelity": {
        "agg": _SERVED["agg"],
        "disagg": _SERVED["disagg"],
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which compares what is served already"),
        "serve": Use("without --url", "whose deployment it describes", "add --url, or leave it out"),
    },
    "eval parity": {
        "resume": Use("beside --resume", "which goes on with what its run was asked", "leave it out"),
        "attach": Use("beside --url", "which compares what is served already"),
        "serve": Use("without --url", "whose server it is about", "add --url, or leave it out"),
        "no against": Use(
            "without --against", "which it is held against", "name another server's address there, or a model to serve"
        ),
        "against a server": Use("with --against URL", "where nothing is served", "leave it out"),
        "against a model": Use("with --against MODEL", "whose tokenizer is taken", "leave it out"),
        "no GPU": _SERVED["no GPU"],
        "no disagg": Use("without the route disagg", "whose workers it counts", "add it to --routes, or leave it out"),
        "one worker": Use(
            "without the routes kv and migrated", "whose workers it counts", "add one to --routes, or leave it out"
        ),
        "no chunks": Use("without the route chunked", "whose steps it bounds", "add it to --routes, or leave it out"),
    },
    "build": {
        "build": Use("without --check", "to which it belongs", "add --check, or leave it out"),
        "none": Use("beside --quant none", "which calibrates nothing"),
        "tensorrt": Use("beside --backend tensorrt", "which builds for the GPU that is here and proves nothing"),
        "check": Use("beside --check", "which builds nothing"),
        "check all": Use("beside --all", "which checks every shipped config by itself"),
    },
    "export nginx": {"hosts": Use("beside --hosts", "whose file says what is where", "leave it out")},
    "export kubernetes": {**_SERVED, "dry run": Use("beside --dry-run", "which writes nothing", "leave it out")},
    "export slurm": {
        "dry run": Use("beside --dry-run", "which writes nothing", "leave it out"),
        **_SERVED,
        "no container": Use("without --container-image", "whose mounts they are", "add it, or leave it out"),
    },
    "compare": {
        "no gate": Use("without --max-regression", "which alone refuses to compare", "add it, or leave it out"),
    },
    "baseline": {
        "list": Use("with list", "which shows all of them", "leave it out"),
        "show": Use("with show", "which removes nothing", "leave it out"),
        "save": Use("with save", "which makes a candidate", "leave it out"),
        "promote": Use("with promote", "which removes nothing", "leave it out"),
        "expire": Use("with expire", "which goes by state and age", "leave it out"),
    },
    "report": {},
    "doctor": {"no hosts": Use("without --hosts", "whose other machines it is about", "add it, or leave it out")},
}


def _placed(*rows: tuple[tuple[str, ...], str]) -> dict[str, tuple[str, ...]]:
    """Builds the mapping option -> uses from rows of (uses, options)."""
    places: dict[str, tuple[str, ...]] = {}
    for uses, options in rows:
        for option in options.split():
            if option in places:
                raise ValueError(f"{option} stands in two rows of PLACES of trtx/cli/placement.py; leave one of them")
            places[option] = uses
    return places


# The options in ModelOptions and TopologyOptions, except --model, which bench also accepts with --url.
_TOPOLOGY = _placed(
    ((), "--served-model-name --engine --config --recipe --set --router-mode --router-args --host --port"),
    ((), "--encode --encode-shared --tls-cert --tls-key --deterministic"),
    (("disagg",), "--workers"),
    (("agg",), "--prefill --decode"),
    (("no GPU",), "--tp --gpus"),
)
_MEDIA = (
    "--allowed-media-path --allow-http-media --allow-private-media --max-media-bytes --max-image-pixels --max-images "
    "--max-videos --max-video-frames --max-video-s --media-timeout-s --media-idle-s --media-memory-bytes "
    "--decode-processes --decode-queue --decode-timeout-s --decode-memory-bytes"
)
# verb -> option -> the uses that would ignore it. Every option must have an entry; those of a load's fields have theirs
# in the fields' records (trtx/bench/load_field.py).
PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "serve": {
        **_TOPOLOGY,
        "--workers": ("disagg", "roles"),
        "--prefill": ("agg", "roles"),
        "--decode": ("agg", "roles"),
        "--gpus": ("no GPU", "hosts"),
        "--host": ("hosts",),
        **_placed(
            ((), "--model --mode --output --dry-run --hosts"),
            (("hosts",), "--frontends"),
            (("no hosts",), "--this-host"),
            ((), _MEDIA),
        ),
    },
    "serve join": _placed(((), "--etcd --name --this-host --model --etcd-auth --nats-auth --output")),
    "bench": {
        **{option: ("resume", "attach", *uses) for option, uses in _TOPOLOGY.items()},
        **_placed(
            ((), "--resume"),
            (("resume",), "--sweep --max-cells"),
            (("resume",), "--temperature --top-p --top-k --extra-inputs --aiperf-args"),
            (("resume",), "SWEEP_FILE --url --model --output --dry-run"),
            (("resume",), "--slo --min-goodput --max-error-rate --baseline --max-regression --metrics --window"),
            (("resume",), "--allow-different --baseline-dir --save-baseline"),
            (("resume", "serve"), "--tokenizer --gpu-count --etcd --etcd-auth"),
            (("resume", "attach"), "--mode --axis"),
            (("resume", "attach"), _MEDIA),
            (("dry run",), "--json"),
        ),
    },
    "bench ab": _placed(
        ((), "A B --rounds --max-regression --max-error-rate --output --dry-run"),
        (("no gate",), "--metrics --window"),
        (("dry run",), "--json"),
    ),
    "bench reproduce": _placed(((), "LOCK --exact --output --dry-run"), (("dry run",), "--json")),
    "eval": {
        **{option: ("resume", "attach", *uses) for option, uses in _TOPOLOGY.items()},
        **_placed(
            ((), "--resume --json"),
            (("resume",), "--tasks --limit --num-fewshot --task-dir --endpoint-type --concurrency"),
            (("resume",), "--min-score --baseline --url --model --output"),
            (("resume", "no baseline"), "--max-drop"),
            (("resume",), "--request-timeout"),
            (("resume", "no needle"), "--needle-lengths --needle-depths --needle-samples"),
            (("resume", "no perplexity"), "--text"),
            (("resume", "serve"), "--tokenizer"),
            (("resume", "attach"), "--mode"),
            (("resume", "attach"), _MEDIA),
        ),
    },
    "eval fidelity": {
        **{
            option: ("resume", "attach", *(use for use in uses if use != "no GPU"))
            for option, uses in _TOPOLOGY.items()
        },
        **_placed(
            ((), "--resume --json"),
            (("resume",), "--reference --prompts --osl --concurrency --max-kl --min-agreement"),
            (("resume",), "--url --model --output"),
            (("resume", "serve"), "--tokenizer"),
            (("resume", "attach"), "--mode"),
        ),
    },
    "eval parity": _placed(
        ((), "--resume --json"),
        (("resume",), "--prompts --isl --osl --concurrency --seed --model --output"),
        (("resume", "no against"), "--url"),
        (("resume", "attach"), "--routes"),
        (("resume", "serve"), "--against --dtype"),
        (("resume", "serve", "against a model"), "--tokenizer"),
        (("resume", "against a server"), "--served-model-name --engine --config --recipe --set --router-args"),
        (("resume", "against a server"), "--deterministic"),
        (("resume", "attach", "no chunks"), "--max-num-tokens"),
        (("resume", "attach", "one worker"), "--workers"),
        (("resume", "attach", "no disagg"), "--prefill --decode"),
        (("resume", "against a server", "no GPU"), "--tp --gpus"),
    ),
    "build": _placed(
        ((), "--set --trtllm-version --check"),
        (("check",), "--quant --kv-dtype --backend --role --output"),
        (("check", "none"), "--calib --calib-size"),
        (("check", "tensorrt"), "--max-ppl-increase"),
        (("tensorrt",), "--gpu"),
        (("build",), "--mode --all --json"),
        (("check all",), "MODEL --config --recipe"),
    ),
    "export nginx": _placed(
        ((), "--hosts --port --tls-cert --tls-key --max-media-bytes"),
        (("hosts",), "--frontends --host"),
        ((), "--listen --listen-cert --listen-key --api-keys --output"),
    ),
    "export kubernetes": _placed(
        ((), "--model --served-model-name --engine --config --recipe --set --mode --router-mode --router-args"),
        ((), "--encode --encode-shared --deterministic"),
        ((), "--image --plain --name --namespace --frontends --model-claim --hub-secret --image-pull-secret"),
        ((), "--tls-secret --nats --gpus-per-node --ucx-devices --resource --node-selector --cpu --memory"),
        ((), "--shared-memory --bench --dry-run"),
        (("dry run",), "--output"),
        ((), _MEDIA),
        (("disagg",), "--workers"),
        (("agg",), "--prefill --decode"),
        (("no GPU",), "--tp"),
    ),
    "export slurm": _placed(
        ((), "--model --served-model-name --engine --config --recipe --set --mode --router-mode --router-args --port"),
        ((), "--encode --encode-shared --deterministic"),
        ((), "--name --time --partition --account --sbatch --nodes --frontends --interface --ucx-devices"),
        ((), "--first-port --model-dir --local-dir --python --etcd --nats --mpi --container-image --bench --dry-run"),
        (("dry run",), "--output"),
        ((), "--ready-timeout-s --drain-s --lease-ttl-s"),
        ((), _MEDIA),
        (("no container",), "--container-mounts"),
        (("disagg",), "--workers"),
        (("agg",), "--prefill --decode"),
        (("no GPU",), "--tp --gpus-per-node"),
    ),
    "compare": _placed(
        ((), "RUNS --metrics --window --max-regression --max-error-rate --max-drop --baseline-dir --json"),
        (("no gate",), "--allow-different"),
    ),
    "baseline": _placed(
        ((), "ACTION --baseline-dir"),
        (("list", "expire"), "WORDS"),
        (("list", "show", "save", "promote"), "--older-than --remove"),
        (("save", "promote", "expire"), "--json"),
    ),
    "report": _placed(((), "RUN --json")),
    "doctor": _placed(((), "--engine --port --output --hosts --json"), (("no hosts",), "--this-host --wait")),
}


def places_of(verb: str) -> Mapping[str, tuple[str, ...]]:
    """Returns for every option of ``verb`` the uses that would ignore it."""
    if verb != "bench":
        return PLACES[verb]
    from trtx.cli.load_options import LOAD_PLACES  # imports trtx.bench, which other verbs don't need

    return {**LOAD_PLACES, **PLACES[verb]}


def ignored_in(verb: str, option: str) -> tuple[str, ...]:
    """Returns the uses of ``verb`` that would ignore ``option``."""
    try:
        return places_of(verb)[option]
    except KeyError:
        raise LookupError(
            f"trtx {verb} {option} has no place: name it in the row of PLACES of trtx/cli/placement.py whose uses "
            "would ignore it, () where none would"
        ) from None


def refuse_ignored(context: typer.Context, uses: Iterable[str]) -> None:
    """Raises UsageError for the first given option that one of ``uses`` would ignore."""
    verb, held = str(context.info_name), tuple(uses)
    for parameter in typed(context):
        for use in ignored_in(verb, option_name(parameter)):
            if use in held:
                words = USES[verb][use]
                raise UsageError(
                    f"{spoken_name(parameter)} means nothing {words.where}, {words.because}; {words.way_out}"
                )
