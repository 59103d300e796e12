"""Rules for the parallelism of one engine: experts, attention data parallelism, AutoDeploy."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from trtx.config import schema
from trtx.config.rules.rule import LLM_ROLES, RECIPES, Breach, RoleRule, Subject

_TP, _EP, _MOE_TP = "tensor_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size"
_ADP = "enable_attention_dp"
_BALANCER = "moe_config.load_balancer"
# AutoDeploy has only world_size and refuses these fields unless they have their defaults (AutoDeploy's LlmArgs).
_NOT_AUTODEPLOY = (
    _TP,
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    _MOE_TP,
    _EP,
    _ADP,
    "cp_config",
)


def _set_size(side: Subject, path: str) -> int | None:
    """Returns the size, or None if the engine chooses it (unset, null or -1)."""
    size = side.get(path)
    return size if isinstance(size, int) and size > 0 else None


def _expert_gpus(side: Subject) -> int:
    """Returns the number of GPUs that share the experts of a layer.

    These are the GPUs of tensor parallelism. With context parallelism of another type than ULYSSES, the number is
    multiplied by its size, as in ``moe_world_size`` of ``MappingBase`` in TensorRT-LLM's mapping.py (commit
    b35ac1b64368).
    """
    tp, context = _set_size(side, _TP) or 1, _set_size(side, "context_parallel_size") or 1
    return tp if (side.get("cp_config.cp_type") or "ULYSSES") == "ULYSSES" else tp * context


def _experts_fill_tp(side: Subject) -> Iterator[Breach]:
    names = (_MOE_TP, _EP, "moe_cluster_parallel_size")
    sizes = {name: size for name in names if (size := _set_size(side, name)) is not None}
    gpus, product = _expert_gpus(side), prod(sizes.values())
    chosen = {_MOE_TP, _EP} <= sizes.keys()
    if not sizes or not (product != gpus if chosen else gpus % product):
        return
    last, is_tp_alone = list(sizes)[-1], gpus == (_set_size(side, _TP) or 1)
    others = product // sizes.get(_MOE_TP, 1)
    if chosen and gpus % others == 0:
        fix = side.set(_MOE_TP, gpus // others)
    else:
        fix = side.set(_TP, product) if is_tp_alone else side.set(last, None)
    relation = f"{product} is not" if chosen else f"{product} does not divide"
    whole = side.says(_TP) if is_tp_alone else f"{side.says(_TP)} × {side.says('context_parallel_size')}"
    yield Breach(last, f"{' × '.join(side.says(name) for name in sizes)} = {relation} {whole}", fix)


def _slots_divide(side: Subject) -> Iterator[Breach]:
    path = f"{_BALANCER}.num_slots"
    slots, ranks = side.get(path), _set_size(side, _EP)
    if isinstance(slots, int) and ranks and slots % ranks:
        more = (slots // ranks + 1) * ranks
        yield Breach(path, f"{side.says(path)} over {side.says(_EP)}", side.set(path, more))


def _balancer_on_decode(prefill: Subject) -> Iterator[Breach]:
    if prefill.get(_BALANCER) is not None:
        yield Breach(_BALANCER, prefill.says(_BALANCER), prefill.set(_BALANCER, None))


def _batch_per_rank(side: Subject) -> Iterator[Breach]:
    ranks, batch = _set_size(side, _TP) or 1, side.batch_size
    if side.get(_ADP) and ranks > 1 and batch is not None and side.has("max_batch_size"):
        message = f"{side.says('max_batch_size')} is per rank: {ranks} ranks hold {ranks * batch} requests"
        yield Breach("max_batch_size", message, None)


def _adp_has_ranks(side: Subject) -> Iterator[Breach]:
    if side.get(_ADP) and (_set_size(side, _TP) or 1) == 1 and side.get("backend") != "_autodeploy":
        yield Breach(_ADP, f"{side.says(_ADP)} with {side.says(_TP)}", side.set(_ADP, False))


def _autodeploy_fields(side: Subject) -> Iterator[Breach]:
    if side.get("backend") != "_autodeploy":
        return
    for path in _NOT_AUTODEPLOY:
        if side.has(path) and side.get(path) not in (None, False, 1):
            unset = side.set(path, schema.default(path, side.version))
            size = f" {side.set('world_size', side.get(path))}" if path == _TP else ""
            yield Breach(path, f"{side.says(path)} is dropped", f"{unset}{size}")


def _autodeploy_beam(side: Subject) -> Iterator[Breach]:
    if side.get("backend") == "_autodeploy" and (side.get("max_beam_width") or 1) > 1:
        yield Breach("max_beam_width", side.says("max_beam_width"), side.set("max_beam_width", 1))


def _sleep_has_one_rank(side: Subject) -> Iterator[Breach]:
    if side.get("sleep_config") is not None and side.world_size > 1:
        message = f"{side.says('sleep_config')} over {side.world_size} ranks"
        yield Breach("sleep_config", message, side.set("sleep_config", None))


def _gms_without_balancer(side: Subject) -> Iterator[Breach]:
    if str(side.get("load_format")).upper() == "GMS" and side.get(_BALANCER) is not None:
        message = f"{side.says('load_format')} with {side.says(_BALANCER)}"
        yield Breach("load_format", message, side.set(_BALANCER, None))


def _moe_backend_for_gpu(side: Subject) -> Iterator[Breach]:
    path = "moe_config.backend"
    hopper = [gpu for gpu in side.gpus if any(name in gpu.upper() for name in ("H100", "H200", "H20", "GH200"))]
    if side.get(path) in ("TRTLLM", "CUTEDSL", "DEEPGEMM", "MEGAMOE_DEEPGEMM") and hopper:
        yield Breach(path, f"{side.says(path)} on {hopper[0]}", side.set(path, "CUTLASS"))


PARALLEL_RULES = (
    RoleRule(
        id="moe-backend-for-gpu",
        roles=LLM_ROLES,
        severity="warning",
        reason="this MoE backend is used on Blackwell alone",
        evidence=f"134 of 134 published H100 and H200 workers have CUTLASS or WIDEEP, {RECIPES}; gpt-oss has TRITON",
        check=_moe_backend_for_gpu,
    ),
    RoleRule(
        id="experts-fill-tp",
        roles=LLM_ROLES,
        severity="error",
        reason="moe_tp × moe_ep (× cluster) must be tp (× cp with HELIX): attention and experts have the same GPUs",
        evidence="aiconfigurator; Mapping in TensorRT-LLM's mapping.py",
        check=_experts_fill_tp,
    ),
    RoleRule(
        id="expert-slots-divide",
        roles=LLM_ROLES,
        severity="error",
        reason="each expert-parallel rank holds the same number of slots",
        evidence=f"256 slots over 16 ranks, 288 over 32, {RECIPES}; MoeLoadBalancerConfig",
        check=_slots_divide,
    ),
    RoleRule(
        id="balancer-on-decode",
        roles=("prefill",),
        severity="note",
        reason="expert balancing was published for decode workers only",
        evidence=f"18 of 18 published configs with an inline balancer, {RECIPES}",
        check=_balancer_on_decode,
    ),
    RoleRule(
        id="batch-per-rank",
        roles=LLM_ROLES,
        severity="note",
        reason="under attention data parallelism each rank has a batch of its own",
        evidence="InferenceX divides its concurrency by 4 or 8 ranks",
        check=_batch_per_rank,
        unmendable=("max_batch_size",),
    ),
    RoleRule(
        id="attention-dp-has-ranks",
        roles=LLM_ROLES,
        severity="note",
        reason="attention data parallelism replicates attention over the tp ranks, and there is one",
        evidence="BaseLlmArgs in TensorRT-LLM's llm_args.py",
        check=_adp_has_ranks,
    ),
    RoleRule(
        id="autodeploy-fields",
        roles=LLM_ROLES,
        severity="warning",
        reason="AutoDeploy takes no such field: world_size is its one parallel size",
        evidence="AutoDeploy's LlmArgs; Dynamo 1.4.2 drops them too",
        check=_autodeploy_fields,
    ),
    RoleRule(
        id="autodeploy-one-beam",
        roles=("agg",),
        severity="error",
        reason="AutoDeploy refuses beam search",
        evidence="AutoDeploy's LlmArgs",
        check=_autodeploy_beam,
    ),
    RoleRule(
        id="sleep-has-one-rank",
        roles=LLM_ROLES,
        severity="warning",
        reason="SleepConfig does not pickle to MPI ranks",
        evidence="Dynamo 1.4.2, which sleeps with one rank only",
        check=_sleep_has_one_rank,
        only_engine="tensorrt-llm",
    ),
    RoleRule(
        id="gms-without-balancer",
        roles=LLM_ROLES,
        severity="error",
        reason="TensorRT-LLM refuses load_format GMS together with an expert balancer",
        evidence="TorchLlmArgs in TensorRT-LLM's llm_args.py",
        check=_gms_without_balancer,
    ),
)
