"""``trtx build``: a checkpoint made ready to serve: quantized, configured, proved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtx.cli import topology_options as options
from trtx.config import Mode
from trtx.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_QUANTIZATION, _CHECK, _OUTPUT = "Quantization", "Check", "Output"
Quant = Literal["fp8", "int4_awq", "nvfp4", "int8_sq", "none"]


@app.command(
    no_args_is_help=True,
    epilog="Exit codes: 1 past --max-ppl-increase; 2 usage, config or a full disk; 4 the build failed; "
    "130 and 143 interrupted.",
)
def build(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory, Hugging Face name or synthetic:<shape>.", show_default=False),
    ] = None,
    quant: Annotated[
        Quant | None,
        typer.Option("--quant", help="Format of the weights.", rich_help_panel=_QUANTIZATION, show_default=False),
    ] = None,
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        typer.Option("--kv-dtype", help="KV cache: fp8, or auto, the model's own.", rich_help_panel=_QUANTIZATION),
    ] = "auto",
    calib: Annotated[
        Path | None,
        typer.Option(
            "--calib",
            metavar="FILE.jsonl",
            help="Calibration text: a JSON object a line with text, prompt or messages. Default: a small built-in set.",
            rich_help_panel=_QUANTIZATION,
            show_default=False,
        ),
    ] = None,
    calib_size: Annotated[
        int, typer.Option("--calib-size", min=1, help="Texts to calibrate on.", rich_help_panel=_QUANTIZATION)
    ] = 128,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(
            "--max-ppl-increase",
            metavar="PCT",
            help="Exit 1 if perplexity on held-out text rises by more per cent. The build is kept.",
            rich_help_panel=_QUANTIZATION,
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Literal["pytorch", "tensorrt"],
        typer.Option(
            "--backend", help="tensorrt: a TensorRT engine, with TensorRT-LLM 1.2 or earlier.", rich_help_panel=_OUTPUT
        ),
    ] = "pytorch",
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Roles to write engine configs for. Repeatable. Default: agg, prefill and decode.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    config: options.ConfigOption = None,
    overrides: options.SetOption = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Parent of the build's directory.", rich_help_panel=_OUTPUT)
    ] = Path("builds"),
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="The GPU to build or check for. Default: the one here.", show_default=False
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check engine configs against their rules; build nothing.", rich_help_panel=_CHECK
        ),
    ] = False,
    mode: Annotated[
        Mode, typer.Option("--mode", help="With --check: the roles to check.", rich_help_panel=_CHECK)
    ] = "agg",
) -> None:
    """Build a model: quantize it, resolve its engine configs, prove it against the source.

    \b
    Examples:
      trtx build synthetic:tiny-trained --quant fp8 -o builds
      trtx build Qwen/Qwen3-8B --quant fp8 --kv-dtype fp8 --calib text.jsonl
      trtx build Qwen/Qwen3-8B --quant int4_awq --max-ppl-increase 2
      trtx build --check synthetic:qwen3-8b --mode disagg
    """
    raise UsageError("trtx build is not there yet; expected soon")
