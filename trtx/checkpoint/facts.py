"""What the rest of trtx needs to know of a checkpoint without opening its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.documents import CONFIG, Fields, config_fields, read_object
from trtx.checkpoint.formats import DTYPE_BYTES
from trtx.checkpoint.model_config import DRAWN_WEIGHTS, FAMILIES, LARGEST, read_model_config
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import WRAPPERS
from trtx.checkpoint.weight_index import stored_dtype, weight_files
from trtx.errors import UsageError

_GENERATION = "generation_config.json"
_NESTED = ("text_config", "llm_config")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face directory, ready to serve.

    ``path``: directory with ``config.json`` and tokenizer; safetensors too when ``has_weights``, else
    ``config.json`` carries ``trtx_synthetic: {seed, init_std}`` and the engine draws the weights.
    ``context_length``: the most tokens, prompt and output together, that the positions allow; None where the config
    leaves it to the model's code (Gemma 3).
    ``architecture``: as in ``config.json``, such as ``Qwen3ForCausalLM``.
    ``weight_bytes``: of the files; of all parameters in ``dtype`` where weights are drawn.
    """

    path: Path
    served_model_name: str
    architecture: str
    context_length: int | None
    dtype: str
    has_weights: bool
    weight_bytes: int

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)

    def context_by(self, engine: str) -> int | None:
        """``context_length`` as ``engine`` takes it. The torch engine follows YaRN beyond ``max_position_embeddings``;
        TensorRT-LLM does not (``infer_max_seq_len`` of its models, 1.3.0rc20). Raises UsageError for a model that the
        torch engine refuses."""
        return read_model_config(self.path).max_position if engine == "torch" else self.context_length


def read_checkpoint(path: Path, served_model_name: str) -> Checkpoint:
    """Reads ``config.json`` of a directory. Raises UsageError where it describes no model that generates text."""
    config = read_config(path)
    text = text_config(config)
    if not all(isinstance(text.get(field), int) for field in ("hidden_size", "num_hidden_layers")):
        raise UsageError(
            f"{path / CONFIG} has no hidden_size or num_hidden_layers, at its top or in text_config; expected a "
            "text model in Hugging Face form"
        )
    dtype = dtype_of(path, config)
    stored = sum(file.stat().st_size for file in weight_files(path) if file.is_file())
    is_drawn = not stored and DRAWN_WEIGHTS in config
    return Checkpoint(
        path=path,
        served_model_name=served_model_name,
        architecture=architecture_of(config),
        context_length=context_length_of(config),
        dtype=dtype,
        has_weights=stored > 0,
        weight_bytes=stored or (_drawn_bytes(path, config, dtype) if is_drawn else 0),
    )


def _drawn_bytes(path: Path, config: Mapping[str, Any], dtype: str) -> int:
    decoder = sum(tensor.nbytes(dtype) for tensor in checkpoint_tensors(read_model_config(path)).values())
    return decoder + sum(map(prod, tower_tensors(config).values())) * DTYPE_BYTES[dtype]


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``, else ``model_type``, else "unknown"."""
    listed = config.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else listed
    return next((name for name in (named, config.get("model_type")) if name and isinstance(name, str)), "unknown")


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """The positions of the decoder; None where the config leaves them to the model's code."""
    positions = text_config(config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def read_end_ids(path: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids: ``generation_config.json``'s, else ``config.json``'s, else none.

    Raises UsageError, naming the file, for a file that is no JSON object and for ids that are none.
    """
    for name in (_GENERATION, CONFIG):
        if (path / name).exists():
            fields = Fields(read_object(path / name, "what transformers writes"), str(path / name))
            if fields.has("eos_token_id"):
                return fields.token_ids("eos_token_id")
    return ()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: multimodal checkpoints nest it."""
    nested = next(filter(None, map(config.get, _NESTED)), None)
    return nested if isinstance(nested, Mapping) else config


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding; transformers' Gemma 3 ties the two where the file is silent."""
    if architecture_of(config) in WRAPPERS:
        return any(bool(place.get("tie_word_embeddings")) for place in (config, text_config(config)))
    silent = architecture_of(config).startswith("Gemma3")
    return bool(text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", silent)))


def dtype_of(path: Path, config: Mapping[str, Any]) -> str:
    """What config.json names, at its top or for the decoder, else what the weights are stored in."""
    stated = (of.get(name) for of in (config, text_config(config)) for name in ("dtype", "torch_dtype"))
    return str(next(filter(None, stated), None) or stored_dtype(path))


def read_config(path: Path) -> Mapping[str, Any]:
    """``config.json`` of a directory, whatever model it describes. Raises UsageError, naming the file, for no JSON
    object, and for sizes that no model has."""
    config = config_fields(path)
    is_dense = architecture_of(config.values) in FAMILIES or architecture_of(config.values) in WRAPPERS
    _check_sizes(config, is_dense=is_dense)
    for name in _NESTED:
        if isinstance(config.values.get(name), Mapping):
            _check_sizes(Fields(config.values[name], config.file, f"{name}."), is_dense=is_dense)
    return config.values


def _check_sizes(fields: Fields, *, is_dense: bool) -> None:
    """``is_dense``: of a family that the torch engine knows, whose sizes all have the bounds of ``read_model_config``.
    Elsewhere some sizes may be 0, and lists of one a layer pass."""
    for name, most in LARGEST.items():
        value = fields.values.get(name)
        if value is not None and not isinstance(value, (list, dict)):
            has_some = is_dense or name in ("hidden_size", "num_hidden_layers")
            fields.count(name, most=most, least=1 if has_some else 0)
