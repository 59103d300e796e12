"""Engines that are larger than a node: how many nodes one takes, and what its command may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trtx.config import Role
from trtx.config.wording import quoted
from trtx.engine.tensorrt_llm.arguments import backend_of, world_size
from trtx.errors import UsageError

_MOST_GPUS = 1024  # of one engine; a typing mistake is far above it


def nodes_of(role: Role, values: Mapping[str, Any], engine: str, per_node: int) -> int:
    """Nodes of one worker of ``role``, whose engine config is ``values``. ``per_node``: GPUs of a node; 0: it has none,
    or the engine uses none. Raises UsageError where a worker's GPUs can't be those of whole nodes."""
    size = world_size(values)
    if not per_node or size <= per_node:
        return 1
    asked = f"{role} asks for {size} GPUs a worker, and nodes have {per_node} (--gpus-per-node)"
    if engine != "tensorrt-llm":
        raise UsageError(f"{asked}; engine {engine} runs a worker on one GPU, so use --tp 1, or --engine tensorrt-llm")
    if size % per_node:
        raise UsageError(
            f"{asked}; expected at most {per_node}, or a multiple of it, as every node of an engine has equally many"
        )
    if size > _MOST_GPUS:
        raise UsageError(f"{asked}; expected at most {_MOST_GPUS} for one engine")
    if backend_of(values) != "pytorch":
        raise UsageError(
            f"{asked}, and its backend is {backend_of(values)}; engines over several nodes need the backend pytorch"
        )
    stated = values.get("gpus_per_node")
    if stated is not None and int(stated) != per_node:
        raise UsageError(
            f"{role} has gpus_per_node {stated} in its engine config, and --gpus-per-node is {per_node}; give both the "
            "same"
        )
    return size // per_node


def check_launched_words(words: Iterable[str]) -> None:
    """``trtllm-llmapi-launch`` expands its command unquoted: an argument with a space is split, a wildcard becomes the
    files that it matches. Raises UsageError for one."""
    for word in words:
        if len(word.split()) != 1 or any(character in word for character in "*?["):
            raise UsageError(
                f"{quoted(word)} has a space or a wildcard in it, which trtllm-llmapi-launch, by which engines over "
                "several nodes are started, would expand; expected a name without"
            )
