"""Pictures through TensorRT-LLM: a prompt dict or an encoder's handles become what ``generate_async`` takes.

The model's processor is TensorRT-LLM's own. It runs in ``LLM.preprocess``, which can wait in a thread, where
``generate_async`` would hold the event loop; and what it makes says how long the prompt is before it is submitted.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trtx.checkpoint.facts import read_config
from trtx.engine.api import PicturePrompt, ReadyPrompt, stated
from trtx.engine.tensorrt_llm import versions
from trtx.errors import LaunchError

logger = logging.getLogger(__name__)

HANDLES, HASHES = "multimodal_embedding_handles", "multimodal_hashes"
_MROPE = ("mrope_position_ids_handle", "mrope_position_deltas_handle")  # both are there or neither is
FIELDS = (HANDLES, HASHES, *_MROPE)
"""Of DisaggregatedParams: what an encoder gives to prefill."""

_PLACEHOLDERS = ("image_token_id", "image_token_index")  # of config.json, by model family


class PreparationFailed(Exception):
    """The model's processor failed on a prompt that it did not refuse. The engine was not asked anything."""


def placeholder_of(model: Path) -> int | None:
    """The token that stands for a picture; None: a text model, or one whose config.json does not say it. Raises
    LaunchError for a config.json with two."""
    config = read_config(model)
    found = {config[name] for name in _PLACEHOLDERS if isinstance(config.get(name), int)}
    if not found or not isinstance(config.get("vision_config"), Mapping):
        return None
    if len(found) > 1:
        raise LaunchError(f"{model}/config.json says {' and '.join(_PLACEHOLDERS)}, which differ; leave one out")
    return int(found.pop())


def image_token_id(llm: Any, model: Path) -> int | None:
    """Of an LLM that takes pictures in prompts, as far as that can be known without one. Logs why not."""
    found = placeholder_of(model)
    if found is not None and not versions.can_preprocess(llm):
        logger.warning(
            "images are refused: this TensorRT-LLM has no LLM.preprocess, which came after 1.3.0rc7, and without it "
            "each image would hold up all other requests of this worker"
        )
        return None
    return found


def takes_handles(llm: Any) -> bool:
    """Whether prefill can go without the model's vision tower: its input processor says so, AutoDeploy's never."""
    processor = getattr(llm, "input_processor", None)
    is_autodeploy = versions.argument(llm, "backend") == "_autodeploy"
    return getattr(processor, "support_mm_disagg", False) is True and not is_autodeploy


def rows_of(llm: Any, picture: Any) -> int | None:
    """As the model's input processor counts them, by the picture's size; None where it can't. Raises ValueError for a
    shape that it refuses."""
    from PIL import Image

    count = getattr(getattr(llm, "input_processor", None), "get_num_tokens_per_image", None)
    if count is None:
        return None
    try:
        return int(count(image=Image.fromarray(picture)))
    except ValueError:
        raise
    except Exception as error:  # of a model whose processor has no such count: it is known once it is prepared
        logger.warning("the model's processor does not say how many tokens an image takes: %s", error)
        return None


def prepare(llm: Any, prompt: PicturePrompt) -> ReadyPrompt:
    """Runs the model's input processor. Raises ValueError where it refuses, PreparationFailed where it fails."""
    params = importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams(**prompt.handles)
    inputs: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
    if prompt.handles:
        # The processors of Qwen and LLaVA make the prompt of the text alone, whatever ids stand beside it.
        inputs["prompt"] = prompt.text
    else:
        inputs |= _images(prompt.pictures)
    try:
        # end_id: it is asked for sampling parameters, and would look for the tokenizer's with none.
        sampling = importlib.import_module("tensorrt_llm.llmapi").SamplingParams(end_id=-1)
        made = llm.preprocess(inputs, sampling, params)
    except (AssertionError, TypeError, ValueError) as error:  # how it refuses: too many pictures, another model's
        raise ValueError(f"the model's processor refuses the request's images: {error}") from error
    except Exception as error:
        raise PreparationFailed(f"the model's processor failed on the request's images: {error}") from error
    # Where the model needs them, preprocess has put handles of positions there for decode.
    carried = {name: value for name, value in stated(params).items() if name in FIELDS}
    return ReadyPrompt(list(made.prompt_token_ids), made, carried)


def encode(encoder: Any, prompt: PicturePrompt) -> Mapping[str, Any]:
    """Of a ``MultimodalEncoder``. Several threads may wait in it, and the engine batches what they ask. Raises
    ValueError for a prompt that it refuses, or makes nothing of; PreparationFailed where the processor fails; else what
    the engine died of."""
    request_error = importlib.import_module("tensorrt_llm.executor.utils").RequestError
    # The text that prefill will make the prompt of: positions are of the whole prompt.
    inputs = {"prompt": prompt.text, **_images(prompt.pictures)}
    try:
        # In the caller's thread, and before anything is submitted, the model's processor runs.
        asked = encoder.generate_async(inputs)
    except (AssertionError, TypeError, ValueError, request_error) as error:
        raise ValueError(f"the model's processor refuses the request's images: {error}") from error
    except Exception as error:
        raise PreparationFailed(f"the model's processor failed on the request's images: {error}") from error
    try:
        output = asked.result()
    except request_error as error:
        raise ValueError(str(error)) from error
    params = output.disaggregated_params
    made = {} if params is None else {name: value for name, value in stated(params).items() if name in FIELDS}
    count = len(made.get(HANDLES) or ())
    if count != len(prompt.pictures):
        raise ValueError(f"the encoder made {count} embeddings of {len(prompt.pictures)} images; expected one each")
    return made


def drop(handles: Mapping[str, Any]) -> None:
    """Opens each once: a producer keeps its memory until a consumer has (pytorch #149187)."""
    container = importlib.import_module("tensorrt_llm._torch.shared_tensor").SharedTensorContainer
    for handle in (*(handles.get(HANDLES) or ()), *(handles[name] for name in _MROPE if handles.get(name))):
        _open("an embedding", partial(_view, container, handle))


def drop_prompt(ready: ReadyPrompt) -> None:
    """The same for what ``preprocess`` made, pixels among it, and what an encoder's handles became in it."""
    made = ready.inputs.multimodal_params
    if made is not None:
        _open("a prompt's images", lambda: made.to_tensor("multimodal_data"))


def _view(container: Any, handle: Mapping[str, Any]) -> Any:
    return container.from_dict(handle).get_local_view()


def _open(what: str, read: Callable[[], Any]) -> None:
    try:
        read()
    except Exception as error:
        logger.warning("%s that no request takes could not be let go of: %s", what, error)


def _images(pictures: Sequence[Any]) -> dict[str, Any]:
    from PIL import Image

    images = [Image.fromarray(picture) for picture in pictures]
    return {"multi_modal_data": {"image": images}, "mm_processor_kwargs": {}}  # a dict: None is none of its types
