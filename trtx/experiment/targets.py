"""Who is measured: a topology of ours, or a deployment that something else serves."""

from __future__ import annotations

from pathlib import Path

import httpx

from trtx.bench import Target
from trtx.checkpoint import list_shapes, resolve_checkpoint
from trtx.errors import UsageError
from trtx.experiment.spec import ATTACHED, Attach
from trtx.topology import Plan


def target_of(plan: Plan) -> Target:
    """The topology of ``plan``, as a load sees it."""
    return Target(plan.url, plan.model, plan.model_path, plan.mode, plan.gpu_count, plan.worker_count)


def attached_target(attach: Attach) -> Target:
    """Asks the deployment which model it serves. Raises UsageError when it does not answer or serves several."""
    url = attach.url.rstrip("/")
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10)
        answer.raise_for_status()
        served = [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{url}/v1/models did not answer as OpenAI's API does ({reason}); check --url") from error
    model = attach.model or (served[0] if len(served) == 1 else None)
    if model is None or model not in served:
        asked = f"model {attach.model!r} is not served at {url}" if attach.model else f"--model is needed for {url}"
        raise UsageError(f"{asked}, which serves {', '.join(served) or 'no model'}; name one of them with --model")
    return Target(url, model, _tokenizer(attach, model), ATTACHED, attach.gpu_count)


def _tokenizer(attach: Attach, model: str) -> Path:
    name = attach.tokenizer or model
    if (Path(name) / "tokenizer_config.json").exists():
        return Path(name).absolute()
    # A model that `trtx serve` made carries its shape's short name.
    try:
        return resolve_checkpoint(
            f"synthetic:{name}" if f"synthetic:{name}" in dict(list_shapes()) else name, on_gpu=False
        ).path
    except UsageError as error:
        raise UsageError(
            f"aiperf needs the tokenizer of {model!r}, and {name!r} has none here ({error}); "
            "give its directory with --tokenizer"
        ) from error
