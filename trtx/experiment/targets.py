"""Targets of a measurement: a topology that trtx serves, or an attached deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trtx.bench import Target
from trtx.checkpoint import list_shapes, resolve_checkpoint
from trtx.errors import UsageError
from trtx.experiment.bench.spec import ATTACHED, Attach
from trtx.experiment.deployment import api_key
from trtx.runs.forms import Deployment
from trtx.topology import Plan


def target_of(label: str, plan: Plan, gpu_hour_price: float | None = None) -> Target:
    """The topology of ``plan`` as a target of a load. Only the cost of tokens needs the price of a GPU."""
    return Target(
        plan.url,
        plan.model,
        plan.model_path,
        label,
        plan.gpu_count,
        plan.worker_count,
        plan.routes_by_prefix,
        certificate=plan.certificate,
        gpu_hour_price=gpu_hour_price,
    )


def attached_target(attach: Attach, deployment: Deployment, gpu_hour_price: float | None = None) -> Target:
    """The deployment at ``attach.url`` as a target. Raises UsageError if the tokenizer of its model isn't available
    here.
    """
    return Target(
        url=attach.url,
        model=deployment.model,
        tokenizer_path=_tokenizer(attach, deployment.model),
        topology=ATTACHED,
        gpu_count=deployment.gpu_count,
        worker_count=deployment.worker_count,
        api_key=api_key(deployment),
        gpu_hour_price=gpu_hour_price,
    )


def context_length(plan: Plan) -> int | None:
    """Maximum tokens of prompt and answer for the model and all workers of ``plan``; None: unknown."""
    limits = [config.get("max_seq_len") for config in plan.engine_configs.values()]
    limits.append(resolve_checkpoint(str(plan.model_path)).context_by(plan.engine))
    return min((length for length in limits if length is not None), default=None)


def common_context_length(plans: Mapping[str, Plan]) -> int | None:
    """The smallest :func:`context_length` of all topologies; None: unknown."""
    known = [length for plan in plans.values() if (length := context_length(plan)) is not None]
    return min(known, default=None)


def _tokenizer(attach: Attach, model: str) -> Path:
    name = attach.tokenizer or model
    if (Path(name) / "tokenizer_config.json").exists():
        return Path(name).absolute()
    # A synthetic model of `trtx serve` is named after its shape.
    try:
        return resolve_checkpoint(
            f"synthetic:{name}" if f"synthetic:{name}" in dict(list_shapes()) else name, on_gpu=False
        ).path
    except UsageError as error:
        raise UsageError(
            f"aiperf needs the tokenizer of {model!r}, but {name!r} has none on this machine ({error}); "
            "give its directory with --tokenizer"
        ) from error
