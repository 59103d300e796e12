"""Checks before the start that the requests of a load fit a topology or an attached deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trtx.bench import LoadSpec, Target
from trtx.bench.body_ranges import check_body
from trtx.bench.fewest_prompt_tokens import fewest_tokens
from trtx.bench.sent_dataset import check_dataset, check_guidance
from trtx.checkpoint import Checkpoint, resolve_checkpoint
from trtx.checkpoint.vision import read_vision_config
from trtx.config.wording import counted
from trtx.engine import MODEL_ENGINES
from trtx.engine.tensorrt_llm.multimodal import placeholder_of
from trtx.errors import UsageError
from trtx.experiment.deployment import DYNAMO
from trtx.experiment.targets import context_length
from trtx.prompts.files import chat_template
from trtx.runs.forms import Deployment
from trtx.topology import Plan


class LoadTarget(Protocol):
    """The properties of a planned or exported topology that a load must fit."""

    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_configs(self) -> Mapping[str, Mapping[str, Any]]: ...


def check_fits(plan: Plan, load: LoadSpec) -> None:
    """Raises UsageError if requests of the load don't fit the topology.

    Checked are lengths above the limits of the model or a worker, prompts shorter than the chat template, images for a
    model that takes none, and fields that the frontend refuses.
    """
    if plan.chat_template is None:
        _check_has_template(plan.model, plan.model_path)
    if (lacks := _lacks_guidance(plan)) is not None:
        check_guidance(load, lacks)
    if load.dataset is not None:  # lengths and content of a dataset's requests are unknown
        check_body(load.extra_inputs)
        check_dataset(load, context_length=context_length(plan), is_dynamo=True)
    else:
        check_fits_served(plan, resolve_checkpoint(str(plan.model_path)), load)


def check_fits_served(served: LoadTarget, checkpoint: Checkpoint, load: LoadSpec) -> None:
    """Like :func:`check_fits`, for a topology that others will serve from ``checkpoint``."""
    check_body(load.extra_inputs)
    if load.dataset is not None:
        return
    _check_holds_template(load, served.model, checkpoint.path)
    image_tokens = _image_tokens(served, checkpoint.path, load)
    isl, osl = max(((isl or 0, osl or 0) for isl, osl in load.pairs), key=sum)
    turns = load.session_turns_mean
    asked = turns * (isl + osl + image_tokens)  # a turn's prompt contains all earlier turns and answers
    shown = f", and {counted(load.image_batch_size, 'image')} of {image_tokens} tokens in all" if image_tokens else ""
    each = f", {turns} turns of them" if load.has_sessions else ""
    what = f"isl {isl} and osl {osl}{shown}{each} make {asked} tokens"
    context = checkpoint.context_by(served.engine)
    if context is not None and asked > context:
        raise UsageError(f"{what}, but the context length of {served.model} is {context}; use shorter lengths")
    for role, config in served.engine_configs.items():
        longest = config.get("max_seq_len")
        if longest is not None and asked > longest:
            raise UsageError(
                f"{what}, and {role} workers of {served.model} take max_seq_len {longest}; "
                f"ask for less, or --set max_seq_len={asked}"
            )


def _lacks_guidance(plan: Plan) -> str | None:
    """Returns why the topology can't make answers follow a schema, and what to do; None if it can."""
    if plan.engine not in MODEL_ENGINES:
        return f"engine {plan.engine} makes no text of its own; choose another engine"
    for role, config in plan.engine_configs.items():
        if config.get("guided_decoding_backend", "") is None:
            return f"guided_decoding_backend turns guided decoding off on {role} workers; leave it out"
    return None


def _check_has_template(model: str, checkpoint: Path) -> None:
    """Raises UsageError for a base model, because every request of a load is a chat message."""
    try:
        template = chat_template(checkpoint)
    except (OSError, ValueError):  # a worker reports the error in the file
        return
    if template is None and (checkpoint / "tokenizer.json").is_file():
        raise UsageError(
            f"{model} has no chat template, but trtx bench sends chat messages; add a chat_template.jinja to "
            f"{checkpoint} that writes a message's content alone, or score the model with trtx eval"
        )


def _check_holds_template(load: LoadSpec, model: str, tokenizer: Path) -> None:
    isl = min(load.isl)
    fewest = fewest_tokens(tokenizer, isl - load.shared_length)
    if fewest is not None and isl - load.shared_length < fewest:
        shared = f", and {load.shared_length} are shared" if load.shared_length else ""
        raise UsageError(
            f"isl {isl} is shorter than any request of {model}, whose chat template adds {fewest - 1} tokens to "
            f"its text{shared}; ask for {fewest + load.shared_length} or more"
        )


def _image_tokens(served: LoadTarget, model_path: Path, load: LoadSpec) -> int:
    """Number of tokens for the images of a request; 0 if it depends on their grid.

    Raises UsageError for images if the topology accepts none.
    """
    if not load.image_batch_size:
        return 0
    if served.engine not in MODEL_ENGINES:
        raise UsageError(
            f"load.image_batch_size {load.image_batch_size} has no effect with engine {served.engine}, whose workers "
            "take no images; leave it out, or use --engine torch"
        )
    if served.engine == "tensorrt-llm" and placeholder_of(model_path) is not None:
        return 0  # supports more models than below; a request that doesn't fit is refused when it is sent
    vision = read_vision_config(model_path)
    if vision is None:
        raise UsageError(
            f"load.image_batch_size {load.image_batch_size} sends images to {served.model}, a text model; leave it "
            "out, or serve a model that accepts images"
        )
    return load.image_batch_size * (vision.tokens_per_image or 0)


def check_attached(deployment: Deployment, target: Target, load: LoadSpec) -> None:
    """Raises UsageError for settings that the deployment refuses, and for prompts shorter than its chat template."""
    if deployment.server == DYNAMO:
        check_body(load.extra_inputs)
    check_dataset(load, context_length=None, is_dynamo=deployment.server == DYNAMO)
    if load.dataset is None:
        _check_holds_template(load, deployment.model, target.tokenizer_path)
