"""Engines that span several nodes: their number of nodes, and the limits on their command lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.wording import quoted, with_article
from trtx.engine.tensorrt_llm.arguments import backend_of, world_size
from trtx.errors import UsageError

_MOST_GPUS = 1024  # the maximum for one engine; a larger number is a typing mistake


def refuse_encoders(spec: TopologySpec, several: str) -> None:
    """Raises UsageError if the topology has encode workers. ``several``: where the workers run, for the message."""
    if spec.encoders:
        raise UsageError(
            f"{spec.encoders_typed} can't be exported: encode workers hand embeddings over in files of a shared "
            f"directory, and {several} share none. Leave it out; each worker then encodes the images that it needs"
        )


def nodes_of(role: Role, values: Mapping[str, Any], engine: str, per_node: int) -> int:
    """Returns the number of nodes of one worker.

    ``values``: the worker's engine config. ``per_node``: the GPUs of a node; 0 if it has none or the engine uses none.
    Raises UsageError if a worker larger than a node does not fill whole nodes.
    """
    size = world_size(values)
    if not per_node or size <= per_node:
        return 1
    asked = f"{role} asks for {size} GPUs for each worker, and nodes have {per_node} (--gpus-per-node)"
    if engine != "tensorrt-llm":
        raise UsageError(
            f"{asked}; engine {engine} runs a worker on one node, so lower --tp, or use --engine tensorrt-llm"
        )
    if size % per_node:
        raise UsageError(
            f"{asked}; expected at most {per_node} or a multiple of {per_node}, because the nodes of an engine have "
            "equally many ranks"
        )
    if size > _MOST_GPUS:
        raise UsageError(f"{asked}; expected at most {_MOST_GPUS} for one engine")
    if backend_of(values) != "pytorch":
        raise UsageError(
            f"{asked}, and its backend is {backend_of(values)}; engines over several nodes need the backend pytorch"
        )
    if (orchestrator := values.get("orchestrator_type")) is not None:
        raise UsageError(
            f"{asked}, and its orchestrator_type is {orchestrator}; ranks on several nodes are started by MPI, so "
            "leave it out"
        )
    stated = values.get("gpus_per_node")
    if stated is not None and int(stated) != per_node:
        raise UsageError(
            f"{role} has gpus_per_node {stated} in its engine config, and --gpus-per-node is {per_node}; give both the "
            "same"
        )
    return size // per_node


def layout_of(role: str, values: Mapping[str, Any], per_node: int) -> Iterator[str]:
    """Yields clauses that describe how the ranks of an engine are placed on its nodes of ``per_node`` GPUs."""

    def size(name: str) -> int:
        return int(values.get(f"{name}_parallel_size") or 1)

    ranks, tp, pp = world_size(values), size("tensor"), size("pipeline")
    yield (
        f"{with_article(f'{role} worker')} is {ranks} ranks on {ranks // per_node} nodes of {per_node} GPUs, "
        f"tensor {tp} x pipeline {pp} x context {size('context')}, of which Dynamo sees rank 0 alone"
    )
    stage = tp * size("context")  # the ranks of a pipeline stage are consecutive: pipeline is the outermost dimension
    if pp > 1:
        inside, whole = per_node % stage == 0, stage % per_node == 0
        where = "inside a node" if inside else f"over {stage // per_node} nodes" if whole else "some over a node's edge"
        yield f"the {pp} pipeline stages of {role} have {stage} ranks each, {where}"
    if values.get("enable_attention_dp"):
        yield (
            f"attention data parallelism gives each of the {tp} ranks of {role} requests of its own: max_batch_size "
            f"{values.get('max_batch_size') or 'of the engine'} is a rank's, and a router can choose the rank"
        )
    elif per_node % stage:
        yield (
            f"layers of {role} have allreduces between nodes, as tensor parallelism does not end at a node's edge: "
            f"tensor_parallel_size {per_node} and pipeline_parallel_size {ranks // per_node} would keep them inside"
        )
    if (experts := values.get("moe_expert_parallel_size") or 1) > 1:
        slots = ((values.get("moe_config") or {}).get("load_balancer") or {}).get("num_slots")
        each = f", {slots // experts} of {slots} slots on each" if isinstance(slots, int) else ""
        yield f"experts of {role} are over {experts} ranks{each}; what they share is named TRTLLM_EPLB_SHM_NAME"


def check_launched_words(words: Iterable[str]) -> None:
    """Raises UsageError for an argument with spaces or wildcards.

    ``trtllm-llmapi-launch`` expands its command unquoted, so a shell would split or glob such an argument.
    """
    for word in words:
        if len(word.split()) != 1 or any(character in word for character in "*?["):
            raise UsageError(
                f"{quoted(word)} has a space or a wildcard, which trtllm-llmapi-launch would expand when it starts an "
                "engine over several nodes; choose a name without them"
            )
