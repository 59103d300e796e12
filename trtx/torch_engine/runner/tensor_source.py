"""A checkpoint's tensors: read from safetensors files and validated one by one, or drawn from a seed on the device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtx.checkpoint.dense import EMBEDDING, HEAD
from trtx.checkpoint.experts import EXPERT_FORMATS
from trtx.checkpoint.formats import FP8_DTYPE, TensorSpec
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import check_weights, stored_tensors, weight_files, without_weights
from trtx.errors import UsageError
from trtx.torch_engine.runner.fp8 import FP8, FP8_MAX
from trtx.torch_engine.runner.stored_experts import NamedReads, single_experts

_FP8_STD = 96.0  # of drawn float8 weights before their scales; the largest value is at 4.7 times that
_LAYER, _LAYERS = re.compile(r"\blayers\.\d+"), "layers.*"


def tensors_of(
    model_dir: Path,
    config: ModelConfig,
    expected: Mapping[str, TensorSpec],
    *,
    device: torch.device,
    dtype: torch.dtype,
    drawn_on: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the expected tensors one at a time on ``device``, in the format's dtype if it has one, else in ``dtype``.

    ``drawn_on``: the device that draws the values of a checkpoint without weights; None: ``device``. On ``meta`` none
    are drawn. Raises UsageError for a missing, misshapen, unexpected or unreadable tensor.
    """
    files = weight_files(model_dir)
    check_weights(model_dir, files)
    if files:
        return _stored(files, expected, config, model_dir, device, dtype)
    if config.synthetic_seed is None:
        raise UsageError(without_weights(model_dir))
    if device.type == "meta":
        return ((name, torch.empty(wanted.shape, device=device, dtype=dtype)) for name, wanted in expected.items())
    drawn = _drawn(expected, config, drawn_on or device, dtype)
    return ((name, value.to(device)) for name, value in drawn)


def _read(model_dir: Path, files: list[Path]) -> NamedReads:
    counts = stored_tensors(model_dir) or {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safe_open handle is not a mapping)
                    if counts[name].file == path:
                        yield name, lambda file=file, name=name: file.get_tensor(name)  # type: ignore[misc]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _stored(
    files: list[Path],
    expected: Mapping[str, TensorSpec],
    config: ModelConfig,
    model_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    missing = {name for name, stored in expected.items() if not stored.is_optional}
    described = config.quantization.source if config.quantization is not None else "its config.json"
    tied: list[Tensor] = []
    seen: set[str] = set()
    for stored_as, read in single_experts(_read(model_dir, files), config, model_dir, device):
        name = decoder_name(config.architecture, stored_as)
        if name is None:  # belongs to the vision tower, which its own process loads
            continue
        seen.add(name)
        if config.tied_head and name in (EMBEDDING, HEAD):
            tied.append(read())
        if name not in expected:
            # A tied checkpoint may repeat its head; old ones have rotary buffers, which are computed here.
            if name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tied_head):
                continue
            raise UsageError(
                f"{model_dir} holds the tensor {stored_as}, but according to {described} a {config.architecture} "
                f"has no such tensor; expected {_alternative(name)}"
            )
        value, wanted = read(), expected[name]
        if misfit := wanted.misfit(tuple(value.shape), _name(value.dtype)):
            raise UsageError(f"{model_dir}: tensor {name} {misfit[0]}, {described} says {misfit[1]}")
        target = dtype if wanted.dtype is None else getattr(torch, wanted.dtype)
        missing.discard(name)
        # Copy: the file's mapped memory changes with the file.
        yield name, value.reshape(wanted.shape).to(device, target, copy=True)
    if len(tied) == 2 and not torch.equal(*tied):
        raise UsageError(
            f"{model_dir} has a {HEAD} that differs from {EMBEDDING}, but its config.json ties the two; set "
            "tie_word_embeddings to false, as transformers does then, or remove the wrong tensor"
        )
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors of {config.architecture}, first {min(missing)}; "
            + _cure(missing, seen, described)
        )


def _alternative(name: str) -> str:
    """Advice for a checkpoint with a tensor that the model lacks."""
    if said := _saying(name):
        return f"another {said} in its config.json, as the model was trained with"
    return "a checkpoint of that architecture, unquantized or in a format of docs/checkpoints.md"


def _cure(missing: set[str], seen: set[str], described: str) -> str:
    """Advice for missing tensors.

    An incomplete download lacks all tensors of some layers; a wrong config lacks one kind of tensor in all layers.
    """
    kinds = {_kind(name) for name in missing}
    of_layers = {kind for kind in map(_kind, seen) if _LAYERS in kind}
    if not of_layers or kinds & of_layers or not all(_LAYERS in kind for kind in kinds):
        return "download the checkpoint whole"
    said = _saying(min(missing))
    where = f"{said} in its config.json" if said else described
    return f"no layer has that tensor, so {where} describes another model; use the config.json of these weights"


def _kind(name: str) -> str:
    return _LAYER.sub(_LAYERS, name)


def _saying(name: str) -> str:
    """Text that names the fields of config.json that decide whether a model has such a tensor; "" if no single field
    does.
    """
    if name.endswith(".bias"):
        return "attention_bias or architectures"
    return "architectures" if name.endswith(("q_norm.weight", "k_norm.weight")) else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drawn(
    expected: Mapping[str, TensorSpec], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Draws weights. A seed gives the same weights on the same device type; torch's CPU and CUDA generators differ."""
    assert config.synthetic_seed is not None
    generator = torch.Generator(device).manual_seed(config.synthetic_seed)
    for name, wanted in expected.items():
        if wanted.dtype is not None:
            if not wanted.is_optional:
                yield name, _drawn_as_stored(name, wanted, config, device, generator)
            continue
        value = torch.empty(wanted.shape, device=device, dtype=dtype)
        if "norm" in name:
            yield name, value.fill_(0.0 if config.arithmetic.norm_adds_one else 1.0)
        else:
            yield name, value.normal_(0.0, config.synthetic_std, generator=generator)


def _drawn_as_stored(
    name: str, wanted: TensorSpec, config: ModelConfig, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Draws a tensor of an FP8 format. Raises UsageError for any other format.

    A weight times its scales has the config's standard deviation. A static scale represents inputs up to 8, since
    those of most matmuls are normalised.
    """
    if name.endswith(".weight") and wanted.dtype == FP8_DTYPE:
        value = torch.empty(wanted.shape, device=device, dtype=torch.bfloat16)
        return value.normal_(0.0, _FP8_STD, generator=generator).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    if wanted.dtype == "float32":
        scale = 8.0 / FP8_MAX if name.endswith("input_scale") else config.synthetic_std / _FP8_STD
        return torch.full(wanted.shape, scale, device=device)
    algorithm = config.quantization.algorithm if config.quantization is not None else None
    raise UsageError(
        f"{algorithm} weights can't be drawn from a seed; expected {', '.join(EXPERT_FORMATS)}, or a checkpoint with "
        "weights"
    )


def read_tensors(
    directory: Path,
    files: list[Path],
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a small checkpoint, such as an EAGLE-3 head, as they are stored.

    Raises UsageError for a missing, misshapen, unexpected or unreadable tensor.
    """
    missing = set(required)
    for name, read in _read(directory, files):
        wanted = required.get(name) or optional.get(name)
        if wanted is None:
            raise UsageError(
                f"{directory} holds the tensor {name}, which the torch engine does not expect there; expected "
                f"{', '.join(sorted(required))}"
            )
        value = read()
        if tuple(value.shape) != tuple(wanted):
            raise UsageError(
                f"{directory}: tensor {name} has shape {list(value.shape)}, its config.json and the target model say "
                f"{list(wanted)}"
            )
        missing.discard(name)
        yield name, value.clone()  # the file's mapped memory changes with the file
    if missing:
        raise UsageError(f"{directory} lacks the tensor {min(missing)}; download the checkpoint whole")
