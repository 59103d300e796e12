"""Images through TensorRT-LLM: converts images or an encoder's handles to the input of ``generate_async``.

The model's processor is TensorRT-LLM's own. It runs in ``LLM.preprocess``, which can run in a thread, while
``generate_async`` would block the event loop. Its result also shows the prompt's length before submission.
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
_MROPE = ("mrope_position_ids_handle", "mrope_position_deltas_handle")  # both are present, or neither
FIELDS = (HANDLES, HASHES, *_MROPE)
"""Fields of DisaggregatedParams that an encoder passes to prefill."""

_PLACEHOLDERS = ("image_token_id", "image_token_index")  # keys of config.json, depending on the model family


class PreparationFailed(Exception):
    """The model's processor failed on a prompt that it did not refuse. Nothing was submitted to the engine."""


def placeholder_of(model: Path) -> int | None:
    """The image placeholder token; None for a text model, or if config.json does not contain it.

    Raises LaunchError if config.json contains two different ones.
    """
    config = read_config(model)
    found = {config[name] for name in _PLACEHOLDERS if isinstance(config.get(name), int)}
    if not found or not isinstance(config.get("vision_config"), Mapping):
        return None
    if len(found) > 1:
        raise LaunchError(f"{model}/config.json says {' and '.join(_PLACEHOLDERS)}, which differ; leave one out")
    return int(found.pop())


def image_token_id(llm: Any, model: Path) -> int | None:
    """The placeholder token if ``llm`` accepts images in prompts, as far as this can be known without sending one; else
    None.

    Logs the reason for a None.
    """
    found = placeholder_of(model)
    if found is not None and not versions.can_preprocess(llm):
        logger.warning(
            "images are refused: this TensorRT-LLM has no LLM.preprocess, which came after 1.3.0rc7, and without it "
            "each image would hold up all other requests of this worker"
        )
        return None
    return found


def takes_handles(llm: Any) -> bool:
    """Whether prefill can work without the vision tower: the input processor says so, and AutoDeploy never can."""
    processor = getattr(llm, "input_processor", None)
    is_autodeploy = versions.argument(llm, "backend") == "_autodeploy"
    return getattr(processor, "support_mm_disagg", False) is True and not is_autodeploy


def rows_of(llm: Any, picture: Any) -> int | None:
    """Number of tokens that the model's input processor computes from the image's size; None if it can't.

    Raises ValueError for a shape that it refuses.
    """
    from PIL import Image

    count = getattr(getattr(llm, "input_processor", None), "get_num_tokens_per_image", None)
    if count is None:
        return None
    try:
        return int(count(image=Image.fromarray(picture)))
    except ValueError:
        raise
    except Exception as error:  # the processor can't count in advance; the number is known after preprocessing
        logger.warning("the model's processor does not say how many tokens an image takes: %s", error)
        return None


def prepare(llm: Any, prompt: PicturePrompt) -> ReadyPrompt:
    """Runs the model's input processor. Raises ValueError if it refuses the prompt, PreparationFailed if it fails."""
    params = importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams(**prompt.handles)
    inputs: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
    if prompt.handles:
        # With handles, the processors of Qwen and LLaVA build the prompt from the text only and ignore the token ids.
        inputs["prompt"] = prompt.text
    else:
        inputs |= _images(prompt.pictures)
    try:
        # preprocess requires sampling parameters; without end_id it would look up the tokenizer's.
        sampling = importlib.import_module("tensorrt_llm.llmapi").SamplingParams(end_id=-1)
        made = llm.preprocess(inputs, sampling, params)
    # raised to refuse, for example too many images or another model's
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"the model's processor refuses the request's images: {error}") from error
    except Exception as error:
        raise PreparationFailed(f"the model's processor failed on the request's images: {error}") from error
    # For models that need them, preprocess has added position handles for decode.
    carried = {name: value for name, value in stated(params).items() if name in FIELDS}
    return ReadyPrompt(list(made.prompt_token_ids), made, carried)


def encode(encoder: Any, prompt: PicturePrompt) -> Mapping[str, Any]:
    """Runs a ``MultimodalEncoder`` on the prompt's images. Several threads may call it; the engine batches their calls.

    Raises ValueError for a prompt that is refused or yields no embeddings, PreparationFailed if the processor fails,
    and any other exception if the engine died.
    """
    request_error = importlib.import_module("tensorrt_llm.executor.utils").RequestError
    # The text from which prefill will build the prompt: positions refer to the whole prompt.
    inputs = {"prompt": prompt.text, **_images(prompt.pictures)}
    try:
        # The model's processor runs in the caller's thread, before anything is submitted.
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
    """Drops embeddings that no request will use, so that their encoder can free the memory.

    Each handle is opened once and discarded: the producer keeps the memory until a consumer has opened the handle
    (pytorch #149187).
    """
    container = importlib.import_module("tensorrt_llm._torch.shared_tensor").SharedTensorContainer
    for handle in (*(handles.get(HANDLES) or ()), *(handles[name] for name in _MROPE if handles.get(name))):
        _open("an embedding", partial(_view, container, handle))


def drop_prompt(ready: ReadyPrompt) -> None:
    """Drops a prompt that ``preprocess`` prepared: its pixels, or the handles of an encoder's embeddings."""
    made = ready.inputs.multimodal_params
    if made is not None:
        _open("a prompt's images", lambda: made.to_tensor("multimodal_data"))


def _view(container: Any, handle: Mapping[str, Any]) -> Any:
    return container.from_dict(handle).get_local_view()


def _open(what: str, read: Callable[[], Any]) -> None:
    try:
        read()
    except Exception as error:
        logger.warning("%s of a cancelled request could not be released: %s", what, error)


def _images(pictures: Sequence[Any]) -> dict[str, Any]:
    from PIL import Image

    images = [Image.fromarray(picture) for picture in pictures]
    return {"multi_modal_data": {"image": images}, "mm_processor_kwargs": {}}  # must be a dict, not None
