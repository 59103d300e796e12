"""Rules for the step of one engine: its sequences, its tokens, and the batch sizes with a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

from trtx.config.findings import Severity
from trtx.config.rules.rule import LLM_ROLES, RECIPES, Breach, RoleRule, Subject

_GRAPHS = "cuda_graph_config"
_GRAPH_BATCH = f"{_GRAPHS}.max_batch_size"
_MLA_GRAPH_LIMIT = 1024


def _graphs_cover_batch(decode: Subject) -> Iterator[Breach]:
    batch, reach = decode.batch_size, decode.graph_batch
    if batch is None or reach >= batch or not (decode.has("max_batch_size") or decode.has(_GRAPHS)):
        return
    if reach == 0:
        graphs = {"enable_padding": True, "max_batch_size": batch}
        yield Breach(_GRAPHS, f"{decode.says(_GRAPHS)}: no step replays a graph", decode.set(_GRAPHS, graphs))
    elif decode.get(f"{_GRAPHS}.batch_sizes"):
        path = f"{_GRAPHS}.batch_sizes"
        message = f"{decode.says(path)} ends below {decode.says('max_batch_size')}"
        yield Breach(path, message, decode.set(path, [*decode.get(path), batch]))
    else:
        message = f"{decode.says(_GRAPH_BATCH)}, graphs to {reach}, is below {decode.says('max_batch_size')}"
        # Dynamo's own engine_configs/qwen3/decode.yaml sets graphs up to 16 and no batch size; every counted recipe
        # sets both.
        severity: Severity | None = None if decode.has("max_batch_size") else "warning"
        yield Breach(_GRAPH_BATCH, message, decode.set(_GRAPH_BATCH, batch), severity)


def _graph_sizes_agree(side: Subject) -> Iterator[Breach]:
    sizes, largest = side.get(f"{_GRAPHS}.batch_sizes"), side.get(_GRAPH_BATCH)
    if sizes and largest and largest != max(sizes):
        message = f"{side.says(_GRAPH_BATCH)} with {side.says(f'{_GRAPHS}.batch_sizes')}"
        yield Breach(_GRAPH_BATCH, message, side.set(_GRAPH_BATCH, max(sizes)))


def _prefill_graphs_off(prefill: Subject) -> Iterator[Breach]:
    if prefill.graph_batch:
        message = f"prefill captures graphs of decode batches to {prefill.graph_batch} ({prefill.source})"
        yield Breach(_GRAPHS, message, prefill.set(_GRAPHS, None))


def _graphs_within_mla_limit(side: Subject) -> Iterator[Breach]:
    deepseek = side.model is not None and side.model.architecture.startswith("Deepseek")
    if deepseek and side.graph_batch > _MLA_GRAPH_LIMIT:
        yield Breach(_GRAPH_BATCH, f"graphs to {side.graph_batch} on {side.role}", side.set(_GRAPH_BATCH, 1024))


def _autodeploy_graphs_fit(side: Subject) -> Iterator[Breach]:
    batch = side.batch_size
    if side.get("backend") == "_autodeploy" and side.has(_GRAPHS) and batch is not None and side.graph_batch > batch:
        message = f"graphs to {side.graph_batch} are above {side.says('max_batch_size')}"
        yield Breach(_GRAPH_BATCH, message, side.set(_GRAPH_BATCH, batch))


def _tokens_cover_batch(side: Subject) -> Iterator[Breach]:
    batch, tokens = side.batch_size, side.num_tokens
    if batch is None or tokens is None or not (side.has("max_batch_size") or side.has("max_num_tokens")):
        return
    needed = batch * (side.draft_length + 1)
    if tokens < needed:
        drafted = f" × ({side.draft_length} drafted + 1)" if side.draft_length else ""
        message = f"{side.says('max_num_tokens')} is below {side.says('max_batch_size')}{drafted} = {needed}"
        yield Breach("max_num_tokens", message, side.set("max_num_tokens", needed))


def _prompts_fit_a_step(side: Subject) -> Iterator[Breach]:
    tokens, longest = side.num_tokens, side.longest_sequence
    if side.get("enable_chunked_prefill") or tokens is None or longest is None or tokens >= longest:
        return
    message = f"{side.says('max_num_tokens')} is below the longest prompt, {longest} tokens, and nothing is chunked"
    yield Breach("max_num_tokens", message, side.set("enable_chunked_prefill", True))


BATCHING_RULES = (
    RoleRule(
        id="decode-graphs-cover-batch",
        roles=("decode",),
        severity="error",
        reason="a batch above the largest graph runs without one, and decode steps become bound by the host",
        evidence=f"423 of 423 published decode workers, {RECIPES}; no batch stated: Dynamo's qwen3/decode.yaml",
        check=_graphs_cover_batch,
    ),
    RoleRule(
        id="graph-sizes-agree",
        roles=LLM_ROLES,
        severity="error",
        reason="TensorRT-LLM refuses a cuda_graph_config whose max_batch_size is not the largest of its batch_sizes",
        evidence="CudaGraphConfig in TensorRT-LLM's llm_args.py",
        check=_graph_sizes_agree,
    ),
    RoleRule(
        id="prefill-graphs-off",
        roles=("prefill",),
        severity="warning",
        reason="a prefill worker decodes nothing: graphs cost it memory and start-up time",
        evidence=f"null in 388 of 423 published prefill workers, {RECIPES}",
        check=_prefill_graphs_off,
    ),
    RoleRule(
        id="graphs-within-mla-limit",
        roles=LLM_ROLES,
        severity="warning",
        reason="warm-up of graphs above batch 1024 crashes where MLA overlaps",
        evidence="TensorRT-LLM #15265",
        check=_graphs_within_mla_limit,
    ),
    RoleRule(
        id="autodeploy-graphs-fit",
        roles=LLM_ROLES,
        severity="error",
        reason="AutoDeploy refuses graphs above its max_batch_size",
        evidence="AutoDeploy's LlmArgs",
        check=_autodeploy_graphs_fit,
    ),
    RoleRule(
        id="tokens-cover-batch",
        roles=("agg", "decode"),
        severity="error",
        reason="each sequence takes one token a step, and one more for each drafted one",
        evidence=f"422 of 423 published decode workers, {RECIPES}; aiconfigurator; an error of AutoDeploy",
        check=_tokens_cover_batch,
    ),
    RoleRule(
        id="prompts-fit-a-step",
        roles=("agg", "prefill"),
        severity="warning",
        reason="with chunked prefill off a prompt above max_num_tokens is refused (RequestError)",
        evidence="TensorRT-LLM's llm.py",
        check=_prompts_fit_a_step,
    ),
)
