"""Converts an engine config to keyword arguments of ``LLM``, AutoDeploy's ``LLM`` and ``MultimodalEncoder``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trtx.config.engine_uses import AUTODEPLOY_SIZES, ENCODER_ARGUMENTS, NOT_FOR_AUTODEPLOY
from trtx.errors import UsageError

logger = logging.getLogger(__name__)

_ENCODER_BATCH = 4
"""Default number of images per batch: MultimodalEncoder fails at its start without one.

aiconfigurator considers 4 enough.
"""
GRAMMAR_BACKEND = "xgrammar"
"""Default of guided_decoding_backend. TensorRT-LLM's own default is none, which refuses every grammar."""
_WITHOUT_ENCODER = frozenset({"Llama4ForConditionalGeneration"})
"""Architectures without a standalone encoder in TensorRT-LLM: their images are encoded inside prefill."""


def backend_of(config: Mapping[str, Any]) -> str:
    return str(config.get("backend") or "pytorch")


def world_size(config: Mapping[str, Any]) -> int:
    """Number of GPUs, and so ranks, of one worker. For AutoDeploy, ``world_size`` takes precedence."""
    if backend_of(config) == "_autodeploy" and config.get("world_size"):
        return int(config["world_size"])
    sizes = (config.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline", "context"))
    product = 1
    for size in sizes:
        product *= int(size)
    return product


def ranks_here(config: Mapping[str, Any]) -> int:
    """Number of GPUs that one node needs for its ranks, when a launcher started them; all nodes have equally many.

    Without ``gpus_per_node``, all ranks are on one node.
    """
    return min(world_size(config), int(config.get("gpus_per_node") or world_size(config)))


def for_llm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the class that ``versions.llm_class`` returns for the config's backend."""
    arguments = {"return_perf_metrics": True, **config}  # results then report how much of the prompt was cached
    arguments.pop("backend", None)
    if backend_of(config) == "_autodeploy":
        return _for_autodeploy(arguments, config)
    return {"guided_decoding_backend": GRAMMAR_BACKEND} | arguments


def _for_autodeploy(arguments: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    ranks = world_size(config)
    for name in (*AUTODEPLOY_SIZES, *NOT_FOR_AUTODEPLOY):
        value = arguments.pop(name, None)
        if value is None:
            continue
        kept = f"; its ranks became world_size {ranks}" if name == "tensor_parallel_size" else ""
        logger.warning("%s is not taken by backend _autodeploy and was dropped, it was %r%s", name, value, kept)
    arguments.setdefault("world_size", ranks)
    return arguments


def for_encoder(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Keyword arguments of ``MultimodalEncoder``.

    Raises UsageError for an architecture without a standalone encoder.
    """
    if architecture in _WITHOUT_ENCODER:
        raise UsageError(
            f"{architecture} has no standalone encoder in TensorRT-LLM: its images are encoded inside prefill; "
            "serve it without encode workers"
        )
    stated = {name: value for name, value in config.items() if value is not None}
    for name in sorted(stated.keys() - {*ENCODER_ARGUMENTS, "backend"}):
        logger.warning("%s is not handed to MultimodalEncoder and was dropped, it was %r", name, stated[name])
    arguments = {name: stated[name] for name in ENCODER_ARGUMENTS if name in stated}
    return {"max_batch_size": _ENCODER_BATCH} | arguments
