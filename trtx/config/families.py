"""The shipped engine configs: the folder for each model architecture, and the header of each file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtx.config.strict_yaml import parse_yaml
from trtx.config.topology import Role
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

CONFIG_ROOT = Path(__file__).resolve().parents[2] / "engine_configs"

_FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2.5",
    "LlamaForCausalLM": "llama3",
    "Qwen3MoeForCausalLM": "qwen3-30b-a3b",
    "Llama4ForConditionalGeneration": "llama4",
    "DeepseekV3ForCausalLM": "deepseek-r1",
    "GptOssForCausalLM": "gpt-oss-120b",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3-27b",
    "Qwen2_5_VLForConditionalGeneration": "qwen2.5-vl",
    "Qwen3VLForConditionalGeneration": "qwen3-vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3-vl-30b-a3b",
}
# The torch engine's folder, if it differs: gpt-oss-120b's configs need two GPUs and attention data parallelism, and
# gemma3's list attention windows, which the torch engine takes from config.json.
_TORCH_FAMILIES = {"GptOssForCausalLM": "gpt-oss-20b", "Gemma3ForCausalLM": "gemma3-1b"}


class ConfigHeader(BaseModel):
    """The header comment ``# trtx: {tensorrt_llm: 1.3.0rc22, gpus: 8, gpu: [H200], model: NAME}`` of a config.

    It is a comment because TensorRT-LLM refuses unknown keys. ``gpus``: the number of GPUs of one worker. ``gpu``: the
    GPU types that the config was written for. ``architecture``: the model's architecture, as in its ``config.json``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorrt_llm: str
    gpus: int
    gpu: tuple[str, ...] = Field(min_length=1)
    model: str
    architecture: str | None = None


def config_family(architecture: str, *, on_gpu: bool, engine: str = "tensorrt-llm") -> str:
    """Returns the folder of ``engine_configs`` for an architecture; without a GPU it is always ``tiny``."""
    families = _FAMILIES | _TORCH_FAMILIES if engine == "torch" else _FAMILIES
    return families.get(architecture, architecture.lower()) if on_gpu else "tiny"


def is_multimodal(architecture: str) -> bool:
    """Returns whether prompts for this architecture may contain images."""
    return architecture.endswith("ForConditionalGeneration")


def recipe_names() -> tuple[str, ...]:
    """Returns the names of the folders in ``engine_configs``, sorted."""
    return tuple(sorted(folder.name for folder in CONFIG_ROOT.iterdir() if folder.is_dir()))


def recipe_files(name: str) -> dict[Role, Path]:
    """Returns the config file of each role in the folder ``name`` of ``engine_configs``.

    Raises UsageError if there is no such folder.
    """
    if name not in recipe_names():
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        nearest = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(recipe_names())}"
        raise UsageError(f"--recipe {quoted(name)} is not a folder of engine_configs; {nearest}")
    return _files_in(CONFIG_ROOT / name)


def built_files(checkpoint: Path) -> dict[Role, Path]:
    """Returns the engine configs that ``trtx build`` wrote in the checkpoint directory; empty if there are none."""
    return _files_in(checkpoint / "engine_configs")


def _files_in(folder: Path) -> dict[Role, Path]:
    return {role: folder / f"{role}.yaml" for role in get_args(Role) if (folder / f"{role}.yaml").is_file()}


def shown_path(path: Path) -> str:
    """Returns the path to print: ``engine_configs/qwen3/agg.yaml`` for a shipped file, else ``path`` unchanged."""
    return str(path.relative_to(CONFIG_ROOT.parent)) if path.is_relative_to(CONFIG_ROOT) else str(path)


def read_header(text: str, source: str) -> ConfigHeader | None:
    """Parses the header comment in the text of a config file; returns None if there is none.

    Raises UsageError for a header that can't be parsed.
    """
    found = re.search(r"^#\s*trtx:[ \t]*(\{[^}]*\}|.*)", text, re.MULTILINE)
    if found is None:
        return None
    try:
        return ConfigHeader.model_validate(parse_yaml(found.group(1).replace("\n#", "\n"), "header", is_file=False))
    except (UsageError, ValidationError) as error:
        line = text.count("\n", 0, found.start()) + 1
        raise UsageError(
            f"{shown(source)}, line {line}: {quoted(found.group(1))} is not a header; expected "
            "# trtx: {tensorrt_llm: 1.3.0rc22, gpus: 1, gpu: [H100], model: NAME}"
        ) from error
