"""A mixture of experts with trained weights: ``synthetic:tiny-trained``, the neurons of each MLP split into experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from trtx.checkpoint import resolve_checkpoint

EXPERTS, PER_TOKEN = 8, 4


def split_experts(directory: Path) -> Path:
    """Writes the checkpoint to ``directory``. A router row is the mean of its expert's gate: where the gate is open."""
    source = resolve_checkpoint("synthetic:tiny-trained").path
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    width = config["intermediate_size"] // EXPERTS
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": width, "norm_topk_prob": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        at, _, module = name.partition(".mlp.")
        if not module:
            tensors[name] = value
            continue
        is_down = module == "down_proj.weight"
        for expert, part in enumerate(value.split(width, dim=1 if is_down else 0)):
            # A token's experts have weights that sum to 1; the dense MLP adds them.
            tensors[f"{at}.mlp.experts.{expert}.{module}"] = (part * PER_TOKEN if is_down else part).contiguous()
        if module == "gate_proj.weight":
            tensors[f"{at}.mlp.gate.weight"] = value.view(EXPERTS, width, -1).mean(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
