"""The facts about a checkpoint that the rest of trtx uses, read without loading the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.documents import CONFIG, Fields, config_fields, read_object
from trtx.checkpoint.families import FAMILIES
from trtx.checkpoint.formats import DTYPE_BYTES
from trtx.checkpoint.model_config import DRAWN_WEIGHTS, LARGEST, read_model_config
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import WRAPPERS
from trtx.checkpoint.weight_index import stored_dtype, weight_files
from trtx.errors import UsageError

_GENERATION = "generation_config.json"
_NESTED = ("text_config", "llm_config")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face directory, ready to serve.

    ``path``: a directory with ``config.json`` and the tokenizer. If ``has_weights``, it also has safetensors files;
    otherwise ``config.json`` contains ``trtx_synthetic: {seed, init_std}`` and the engine generates random weights.
    ``context_length``: the maximum number of tokens, prompt and output together, that the positions allow; None if the
    config leaves it to the model's code (Gemma 3).
    ``architecture``: as in ``config.json``, such as ``Qwen3ForCausalLM``.
    ``weight_bytes``: the size of the weight files, or of all parameters in ``dtype`` if the weights are generated.
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
        """Returns the context length that ``engine`` supports.

        The torch engine applies YaRN beyond ``max_position_embeddings``; TensorRT-LLM does not (``infer_max_seq_len``
        of its models, 1.3.0rc20). Raises UsageError for a model that the torch engine refuses.
        """
        return read_model_config(self.path).max_position if engine == "torch" else self.context_length


def read_checkpoint(path: Path, served_model_name: str) -> Checkpoint:
    """Reads the facts of the checkpoint in a directory. Raises UsageError if it is not a text generation model."""
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
    """Returns the first entry of ``architectures``, else ``model_type``, else "unknown"."""
    listed = config.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else listed
    return next((name for name in (named, config.get("model_type")) if name and isinstance(name, str)), "unknown")


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Returns the decoder's ``max_position_embeddings``, or None if the config leaves it to the model's code."""
    positions = text_config(config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def read_end_ids(path: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids in ``generation_config.json``, else those in ``config.json``, else none.

    Raises UsageError, which names the file, for a file that is not a JSON object and for invalid ids.
    """
    for name in (_GENERATION, CONFIG):
        if (path / name).exists():
            fields = Fields(read_object(path / name, "what transformers writes"), str(path / name))
            if fields.has("eos_token_id"):
                return fields.token_ids("eos_token_id")
    return ()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of ``config.json`` that describes the decoder; multimodal checkpoints nest it."""
    nested = next(filter(None, map(config.get, _NESTED)), None)
    return nested if isinstance(nested, Mapping) else config


def is_tied(config: Mapping[str, Any]) -> bool:
    """Returns whether the head shares the embedding's weights. In transformers Gemma 3 ties them by default."""
    if architecture_of(config) in WRAPPERS:
        return any(bool(place.get("tie_word_embeddings")) for place in (config, text_config(config)))
    silent = architecture_of(config).startswith("Gemma3")
    return bool(text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", silent)))


def dtype_of(path: Path, config: Mapping[str, Any]) -> str:
    """Returns the dtype in config.json, at its top level or in the decoder's part, else the dtype of the weights."""
    stated = (of.get(name) for of in (config, text_config(config)) for name in ("dtype", "torch_dtype"))
    return str(next(filter(None, stated), None) or stored_dtype(path))


def read_config(path: Path) -> Mapping[str, Any]:
    """Reads ``config.json`` of any model. Raises UsageError, which names the file, if it is not a JSON object, and for
    sizes beyond those of any model."""
    config = config_fields(path)
    is_dense = architecture_of(config.values) in FAMILIES or architecture_of(config.values) in WRAPPERS
    _check_sizes(config, is_dense=is_dense)
    for name in _NESTED:
        if isinstance(config.values.get(name), Mapping):
            _check_sizes(Fields(config.values[name], config.file, f"{name}."), is_dense=is_dense)
    return config.values


def _check_sizes(fields: Fields, *, is_dense: bool) -> None:
    """Refuses sizes outside their bounds.

    ``is_dense``: the model belongs to a family that the torch engine supports, so all sizes have the bounds of
    ``read_model_config``. In other models some sizes may be 0, and a size may be a list with one entry per layer.
    """
    for name, most in LARGEST.items():
        value = fields.values.get(name)
        if value is not None and not isinstance(value, (list, dict)):
            has_some = is_dense or name in ("hidden_size", "num_hidden_layers")
            fields.count(name, most=most, least=1 if has_some else 0)
