"""Loads a tower that is ready to encode from a model directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import check_weights, stored_tensors, weight_files, without_weights
from trtx.errors import UsageError
from trtx.ipc.encoder_messages import EncoderArgs
from trtx.memory.torch_engine import compute_dtype
from trtx.torch_engine.device import resolve_device
from trtx.torch_engine.vision.attention import attend_by_length
from trtx.torch_engine.vision.towers import (
    LlavaTower,
    LlavaWithoutDecoder,
    Qwen3WithoutDecoder,
    Qwen25WithoutDecoder,
    QwenTower,
    Tower,
)

log = logging.getLogger(__name__)

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Prefixes of stored names and their replacements, applied in order: several releases of transformers wrote such
# checkpoints (5.23 reads all of these too, conversion_mapping.py).
_NAMES = (("model.", ""), ("vision_tower.vision_model.", "vision_tower."))


_MODELS: dict[str, type[PreTrainedModel]] = {
    "LlavaForConditionalGeneration": LlavaWithoutDecoder,
    "Qwen2_5_VLForConditionalGeneration": Qwen25WithoutDecoder,
    "Qwen3VLForConditionalGeneration": Qwen3WithoutDecoder,
}


@torch.inference_mode()
def load_tower(args: EncoderArgs) -> Tower:
    """Loads only the tower's and the projector's weights, or draws them if the checkpoint stores none.

    They are in the decoder's dtype on its device. Raises UsageError for an unusable checkpoint, device or dtype.
    """
    model_dir = Path(args.model)
    config = read_model_config(model_dir)
    if config.vision is None:
        raise UsageError(
            f"{model_dir} is a {config.architecture}, which has no vision tower; expected a model with a vision tower"
        )
    device = resolve_device("auto")
    torch.backends.cudnn.allow_tf32 = False  # else a float32 tower's convolution is rounded to 10 bits
    dtype = getattr(torch, compute_dtype(args.dtype, config.dtype, is_gpu=device.type == "cuda"))
    try:
        theirs = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            model = _MODELS[config.vision.architecture]._from_config(theirs, dtype=dtype)
    except Exception as error:  # of any class, about any field: transformers validates configs in many places
        raise UsageError(
            f"{model_dir}/config.json describes no vision tower that transformers builds ({type(error).__name__}: "
            f"{str(error)[:300]}); use another checkpoint"
        ) from error
    try:
        _fill(model, model_dir, config)
        model.to(device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise UsageError(
            f"the vision tower of {model_dir.name} does not fit on {device}, which has {free >> 20} of {total >> 20} "
            "MiB free; free the GPU, or give the encoder another GPU"
        ) from error
    model.eval()
    rows = config.vision.tokens_per_image
    if rows is not None:
        return LlavaTower(model, rows)
    attend_by_length(model.visual)
    if device.type == "cuda":
        from trtx.torch_engine.vision.triton_tower import fuse  # Triton is available wherever CUDA is

        fuse(model.visual)
    return QwenTower(model)


def _fill(model: PreTrainedModel, model_dir: Path, config: ModelConfig) -> None:
    """Sets every parameter. Raises UsageError for a missing, misshapen, unexpected or unreadable tensor."""
    files = weight_files(model_dir)
    check_weights(model_dir, files)
    if not files:
        _draw(model, model_dir, config)
        return
    wanted = dict(model.named_parameters()) | dict(_persistent_buffers(model))
    missing = set(wanted)
    for stored_as, read in _stored(model_dir, config.architecture):
        name = _own_name(stored_as)
        if name not in wanted:
            if name.endswith("position_ids"):  # a buffer that old releases stored and new ones compute
                continue
            raise UsageError(
                f"{model_dir} holds the tensor {stored_as}, but according to its config.json the vision "
                f"tower of {config.architecture} has no such tensor; expected the config.json of these weights"
            )
        value, own = read(), wanted[name]
        if value.shape != own.shape or value.dtype not in _FLOATS:
            raise UsageError(
                f"{model_dir}: tensor {stored_as} is {value.dtype} of shape {list(value.shape)}; its config.json says "
                f"a float of shape {list(own.shape)}"
            )
        own.data.copy_(value)
        missing.discard(name)
    if missing:
        raise UsageError(
            f"{model_dir} lacks {len(missing)} tensors of the vision tower of {config.architecture}, first "
            f"{min(missing)}; download the checkpoint whole"
        )


def _persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _own_name(stored_as: str) -> str:
    name = stored_as
    for begin, instead in _NAMES:
        if name.startswith(begin):
            name = instead + name.removeprefix(begin)
    return name


def _stored(model_dir: Path, architecture: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yields the tower's tensors. Reads only the header of a file that has none of them."""
    by_file: dict[Path, list[str]] = {}
    for name, stored in (stored_tensors(model_dir) or {}).items():
        if decoder_name(architecture, name) is None:
            by_file.setdefault(stored.file, []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, lambda file=file, name=name: file.get_tensor(name)  # type: ignore[misc]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _draw(model: PreTrainedModel, model_dir: Path, config: ModelConfig) -> None:
    """Draws weights on the CPU in float32, so that a seed gives the same weights on every device."""
    if config.synthetic_seed is None:
        raise UsageError(without_weights(model_dir))
    generator = torch.Generator("cpu").manual_seed(config.synthetic_seed)
    tensors: dict[str, Any] = dict(model.named_parameters()) | dict(_persistent_buffers(model))
    for name in sorted(tensors):
        own = tensors[name]
        if own.dim() == 1 and name.endswith(".weight"):  # a norm's weight
            own.data.fill_(1.0)
        else:
            own.data.copy_(torch.empty(own.shape).normal_(0.0, config.synthetic_std, generator=generator))
