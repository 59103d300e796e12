"""``trtx build``: quantizes a checkpoint, resolves its engine configs, and compares the result with the source."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb, optional
from trtx.cli.placement import refuse_ignored
from trtx.config import Mode, Role
from trtx.config.files import name_problem
from trtx.config.wording import quoted
from trtx.errors import GateError, Interrupted, NoVerdictError, UsageError

if TYPE_CHECKING:
    from trtx.build import BuildRequest

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_QUANTIZATION, _CHECK, _OUTPUT = "Quantization", "Check", "Output"
Quant = Literal["fp8", "int4_awq", "nvfp4", "int8_sq", "none"]
Backend = Literal["pytorch", "tensorrt"]


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 1 the perplexity rose by more than --max-ppl-increase; 2 usage, config, a damaged checkpoint "
    "or a full disk; 3 no perplexity for --max-ppl-increase; 4 the build failed; 130 and 143 interrupted.",
)
def build(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Directory, Hugging Face name or synthetic:<shape>.", show_default=False),
    ] = None,
    quant: Annotated[
        Quant | None,
        optional(_QUANTIZATION, "--quant", "Format of the weights."),
    ] = None,
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        typer.Option("--kv-dtype", help="KV cache: fp8, or auto (the model's).", rich_help_panel=_QUANTIZATION),
    ] = "auto",
    calib: Annotated[
        Path | None,
        optional(
            _QUANTIZATION,
            "--calib",
            "Calibration texts: JSON lines with text, prompt or messages. Default: a small built-in set.",
            metavar="FILE.jsonl",
        ),
    ] = None,
    calib_size: Annotated[
        int, typer.Option("--calib-size", min=1, help="Number of calibration texts.", rich_help_panel=_QUANTIZATION)
    ] = 128,
    max_ppl_increase: Annotated[
        float | None,
        optional(
            _QUANTIZATION,
            "--max-ppl-increase",
            "Exit with 1 if the perplexity of held-out text rises by more than this, in %. The build is kept.",
            metavar="PCT",
        ),
    ] = None,
    backend: Annotated[
        Backend,
        typer.Option(
            "--backend", help="tensorrt: a TensorRT engine, with TensorRT-LLM 1.2 or earlier.", rich_help_panel=_OUTPUT
        ),
    ] = "pytorch",
    role: Annotated[
        list[str] | None,
        optional(
            _OUTPUT,
            "--role",
            "Roles to write engine configs for. Repeatable. Default: agg, prefill and decode.",
            metavar="ROLE",
        ),
    ] = None,
    config: options.ConfigOption = None,
    overrides: options.SetOption = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Directory in which the build's directory is created.", rich_help_panel=_OUTPUT
        ),
    ] = Path("builds"),
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="GPU to build or check for. Default: that of this machine.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check engine configs against schema and rules; build nothing.", rich_help_panel=_CHECK
        ),
    ] = False,
    mode: Annotated[
        Mode | None,
        optional(_CHECK, "--mode", "Mode of the topology to check. Default: both."),
    ] = None,
    recipe: options.RecipeOption = None,
    every_recipe: Annotated[
        bool, typer.Option("--all", help="Check every shipped engine config.", rich_help_panel=_CHECK)
    ] = False,
    trtllm_version: Annotated[
        str | None,
        optional(
            _CHECK,
            "--trtllm-version",
            "TensorRT-LLM version to check for, such as 1.2.1. Default: the version that the configs name.",
            metavar="VERSION",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON.", rich_help_panel=_CHECK)
    ] = False,
) -> None:
    """Build a model: quantize it, resolve its engine configs, prove it against the source.

    \b
    Examples:
      trtx build synthetic:tiny-trained --quant fp8 -o builds
      trtx build Qwen/Qwen3-8B --quant fp8 --kv-dtype fp8 --calib text.jsonl
      trtx build Qwen/Qwen3-8B --quant int4_awq --max-ppl-increase 2
      trtx build --check synthetic:qwen3-8b --mode disagg
      trtx build --check --recipe deepseek-r1-mtp --trtllm-version 1.3.0rc24
    """
    uses = ("check", *(["check all"] if every_recipe else [])) if check else ("build", str(quant), backend)
    refuse_ignored(context, uses)
    if check:
        from trtx.cli.check import CheckRequest
        from trtx.cli.check import check as check_configs

        options.check_roles((mode,) if mode else get_args(Mode), config, overrides, recipe, beside=("encode",))
        asked = CheckRequest(
            model=model,
            modes=(mode,) if mode else get_args(Mode),
            recipe=recipe,
            files=options.role_files(config),
            overrides=tuple(overrides or ()),
            version=trtllm_version,
            gpu=gpu,
            every_recipe=every_recipe,
        )
        raise typer.Exit(check_configs(asked, as_json=as_json))
    request = _request(
        model=model,
        quant=quant,
        kv_dtype=kv_dtype,
        calib=calib,
        calib_size=calib_size,
        roles=role,
        recipe=recipe,
        config=config,
        overrides=overrides,
        trtllm_version=trtllm_version,
        backend=backend,
        max_ppl_increase=max_ppl_increase,
        output=output,
        gpu=gpu,
    )
    _run(request)


def _request(
    *,
    model: str | None,
    quant: Quant | None,
    kv_dtype: str,
    calib: Path | None,
    calib_size: int,
    roles: list[str] | None,
    recipe: str | None,
    config: list[str] | None,
    overrides: list[str] | None,
    trtllm_version: str | None,
    backend: Backend,
    max_ppl_increase: float | None,
    output: Path,
    gpu: str | None,
) -> BuildRequest:
    """Builds the request from validated options. Raises UsageError, which names the option."""
    from trtx.build import BuildRequest
    from trtx.launch import probe
    from trtx.memory import MemoryDevice, device_named
    from trtx.memory.gpus import capability_of

    if not model:
        raise UsageError("MODEL is missing; give a model, as in trtx build synthetic:tiny-trained --quant fp8")
    if problem := name_problem(model):
        raise UsageError(
            f"model {quoted(model)} {problem}; expected a directory, a name of the hub or a synthetic shape"
        )
    if quant is None:
        raise UsageError(f"--quant is missing; expected one of {', '.join(get_args(Quant))}")
    asked = set(roles or (("agg",) if backend == "tensorrt" else ("agg", "prefill", "decode")))
    chosen: tuple[Role, ...] = tuple(name for name in get_args(Role) if name in asked)
    for name in asked - set(chosen):
        raise UsageError(f"--role {name!r} is not a role; expected one of {', '.join(get_args(Role))}")
    files = options.role_files(config)
    if recipe is not None and asked <= files.keys():
        raise UsageError(options.unused_recipe(recipe))
    files |= {name: path for name, path in options.recipe_roles(recipe).items() if name in asked - files.keys()}
    for name in files.keys() - asked:
        raise UsageError(
            f"--config {name}=… is for a role that this build leaves out; add --role {name}, or leave it out"
        )
    by_hand = next((text for text in overrides or () if text.partition("=")[0].endswith("kv_cache_config.dtype")), None)
    if kv_dtype != "auto" and by_hand is not None:
        raise UsageError(f"--kv-dtype {kv_dtype} has no effect with --set {quoted(by_hand)}; leave one of them out")
    found = probe().gpus
    here = (
        MemoryDevice(found[0].name, found[0].memory_bytes, capability=capability_of(found[0].name)) if found else None
    )
    return BuildRequest(
        model=model,
        form=quant,
        output=output,
        backend=backend,
        kv_dtype=kv_dtype,
        calibration=calib,
        calibration_size=calib_size,
        roles=chosen,
        engine_configs={name: files[name] for name in chosen if name in files},
        overrides=tuple(overrides or ()),
        trtllm_version=trtllm_version,
        max_ppl_increase=max_ppl_increase,
        here=here,
        target=device_named(gpu) if gpu else here,
    )


def _run(request: BuildRequest) -> None:
    from trtx.build import build as make
    from trtx.cli.build_view import BuildView, proof_table
    from trtx.cli.console import ResultConsole
    from trtx.cli.sentences import tell

    with _sigterm_raises(), BuildView() as view:
        made = make(request, on_progress=view)
    for line in made.left_out:
        tell(f"trtx: {line}")
    manifest = made.manifest
    console = ResultConsole()
    console.print(proof_table(manifest))
    took = f"built in {sum(manifest.seconds.values()):.0f} s" if made.is_new else f"found, built {manifest.created}"
    console.print(f"\n{made.directory} ({took})\n", soft_wrap=True)
    if manifest.unproved:
        console.print(f"not proved: {manifest.unproved}\n", soft_wrap=True)
        if request.max_ppl_increase is not None:
            raise NoVerdictError(
                f"--max-ppl-increase can't be judged, because the perplexity was not measured; the build is kept in "
                f"{made.directory}"
            )
    if manifest.gate and not manifest.gate["passed"]:
        assert manifest.proof is not None
        raise GateError(
            f"perplexity rose by {manifest.proof.increase_pct:.2f} %, past --max-ppl-increase "
            f"{manifest.gate['max_ppl_increase_pct']:g}; the build is kept in {made.directory}, marked as failed"
        )
    if request.backend == "tensorrt":
        console.print(f"trtllm-serve {made.directory} --backend tensorrt", soft_wrap=True)
    else:
        console.print(f"trtx serve --model {made.directory}", soft_wrap=True)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turns SIGTERM into an exception, like SIGINT; unwinding then ends the child and removes the unfinished build."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal_number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
