"""Parses the multimodal part of a config.json: placeholders, embedding rows of an image, and the nested decoder."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from pathlib import Path

from trtx.checkpoint.class_defaults import ConfigValues
from trtx.checkpoint.documents import Fields, config_fields
from trtx.checkpoint.known_fields import PREFIXES_WITHOUT_EFFECT, WITHOUT_EFFECT
from trtx.checkpoint.processor import check_processor
from trtx.errors import UnsupportedModel

TEXT, VISION = "text_config", "vision_config"
_LARGEST_SIZE, _LARGEST_DEPTH, _LARGEST_IMAGE = 1 << 18, 1 << 12, 1 << 14


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image inputs of a model's decoder. An image's embedding has one row for each placeholder in the prompt."""

    architecture: str  # "LlavaForConditionalGeneration"
    hidden_size: int  # the decoder's hidden size
    image_token_id: int
    tokens_per_image: int | None  # a fixed number (LLaVA); None: depends on the grid
    spatial_merge: int = 1  # patches per side that one row represents
    video_token_id: int | None = None
    deepstack_levels: int = 0  # additional vectors in a row, which the first layers add to the hidden state
    temporal_patch: int = 1  # video frames that one row represents
    tokens_per_second: int | None = None  # the unit of a video's time positions (Qwen2.5-VL); None: frames

    @property
    def columns(self) -> int:
        """The columns of an embedding: ``hidden_size``, followed by as many for each deepstack level."""
        return self.hidden_size * (1 + self.deepstack_levels)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """An architecture that combines a nested decoder with a vision tower.

    ``decoder``: pairs of a prefix of stored tensor names and the prefix in the decoder alone. The longest matching
    prefix applies; of several pairs with the same decoder prefix, transformers writes the first. ``tower``: prefixes of
    the tensors of the tower and its projector, matched first. ``fields``: the known fields of the outer config.
    """

    model_type: str
    decoder: tuple[tuple[str, str], ...]
    tower: tuple[str, ...]
    fields: frozenset[str]
    text_type: str | None = None  # the only model_type of its decoder; None: any dense family
    tower_types: tuple[str, ...] = ()
    is_flat: bool = False  # without a text_config, the decoder's fields are at the top level, next to vision_config
    ties_by_decoder: bool = True  # tie_word_embeddings in text_config also ties the head


_QWEN_FIELDS = frozenset((
    "image_token_id", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "vision_token_id",  # positions don't depend on them
))  # fmt: skip

WRAPPERS = {
    "LlavaForConditionalGeneration": Wrapper(
        "llava",
        # First the names that transformers writes (5.23), then those of its modules.
        decoder=(
            ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."), ("lm_head.", "lm_head."),
        ),
        tower=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        fields=frozenset((
            "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_select_strategy",
            "vision_feature_layer", "multimodal_projector_bias",
            "image_seq_length", "ignore_index",  # transformers does not use the first, and the second only in a loss
        )),
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "qwen2_5_vl",
        decoder=(("model.", "model."), ("lm_head.", "lm_head."), ("model.language_model.", "model.")),
        tower=("visual.", "model.visual."),
        fields=_QWEN_FIELDS,
        text_type="qwen2_5_vl_text",
        tower_types=("qwen2_5_vl", "qwen2_5_vl_vision"),
        is_flat=True,
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        "qwen3_vl",
        decoder=(("model.language_model.", "model."), ("lm_head.", "lm_head.")),
        tower=("model.visual.",),
        fields=_QWEN_FIELDS,
        text_type="qwen3_vl_text",
        tower_types=("qwen3_vl", "qwen3_vl_vision"),
        ties_by_decoder=False,
    ),
}  # fmt: skip

_OF_EVERY_WRAPPER = (TEXT, VISION, "tie_word_embeddings", "vocab_size", "quantization_config")


def read_vision_config(model_dir: Path) -> VisionConfig | None:
    """Reads the multimodal part of ``model_dir/config.json``; None for a text model and for an unknown architecture.

    Raises UsageError, which names file, field and value, for a missing field, for an unsupported value, and for a
    ``preprocessor_config.json`` that does not fit the tower.
    """
    config = config_fields(model_dir)
    listed = config.values.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(named, str) or named not in WRAPPERS:
        return None
    found = parse_vision(config, named)
    check_processor(model_dir, _nested(config, VISION, "the vision tower's fields"))
    return found


def parse_vision(config: Fields, architecture: str) -> VisionConfig:
    """Parses the outer fields and the tower's fields of one of the :data:`WRAPPERS`. Raises UsageError."""
    text = decoder_fields(config, architecture)
    if text.parent:  # in a flat file, the fields are checked as the decoder's
        _refuse_unknown(config, architecture)
    tower = _nested(config, VISION, "the vision tower's fields")
    vocab_size = text.count("vocab_size", most=1 << 24)
    if text.parent and config.has("vocab_size") and config.values["vocab_size"] != vocab_size:
        config.refuse("vocab_size", f"{vocab_size} as in text_config, which transformers takes, or no such field")
    hidden = text.count("hidden_size", most=_LARGEST_SIZE)
    if WRAPPERS[architecture].text_type is None:
        placeholder = _placeholder(config, ("image_token_index", "image_token_id"), vocab_size)
        return VisionConfig(architecture, hidden, placeholder, _clip_rows(config, tower))
    return _qwen(config, tower, architecture, hidden, vocab_size)


def _qwen(config: Fields, tower: Fields, architecture: str, hidden: int, vocab_size: int) -> VisionConfig:
    """Parses Qwen2.5-VL and Qwen3-VL, which take images of any size; the grid determines the number of rows."""
    types = WRAPPERS[architecture].tower_types
    if tower.has("model_type") and tower.values["model_type"] not in types:
        tower.refuse("model_type", f"{' or '.join(map(repr, types))}, the tower of a {architecture}, or no such field")
    depth, width = tower.count("depth", most=_LARGEST_DEPTH), tower.count("hidden_size", most=_LARGEST_SIZE)
    tower.count("intermediate_size", most=1 << 20)
    if width % tower.count("num_heads", most=_LARGEST_DEPTH):
        tower.refuse("num_heads", f"a divisor of hidden_size, {width}")
    if tower.count("out_hidden_size", most=_LARGEST_SIZE) != hidden:
        tower.refuse("out_hidden_size", f"{hidden}, hidden_size of text_config")
    if tower.has("in_channels") and tower.count("in_channels", most=3) != 3:
        tower.refuse("in_channels", "3: images are red, green and blue")
    tower.count("patch_size", most=_LARGEST_IMAGE)
    is_third = architecture.startswith("Qwen3")
    if is_third:
        positions = tower.count("num_position_embeddings", most=1 << 24)
        if isqrt(positions) ** 2 != positions:
            tower.refuse("num_position_embeddings", "the square of a number: positions are a grid")
        deepstack = _layers_of(tower, "deepstack_visual_indexes", depth)
    else:
        tower.count("window_size", most=_LARGEST_IMAGE)
        _layers_of(tower, "fullatt_block_indexes", depth)
        deepstack = 0
    placeholder = _placeholder(config, ("image_token_id",), vocab_size)
    video = _placeholder(config, ("video_token_id",), vocab_size) if config.has("video_token_id") else None
    if video == placeholder:
        config.refuse("video_token_id", f"another id than image_token_id, {placeholder}")
    return VisionConfig(
        architecture,
        hidden,
        placeholder,
        tokens_per_image=None,
        spatial_merge=tower.count("spatial_merge_size", most=_LARGEST_IMAGE),
        video_token_id=video,
        deepstack_levels=deepstack,
        temporal_patch=tower.count("temporal_patch_size", most=1 << 10),
        tokens_per_second=None if is_third else tower.count("tokens_per_second", most=1 << 10),
    )


def _layers_of(tower: Fields, name: str, depth: int) -> int:
    """Returns the number of layers in a list of distinct layer indices."""
    listed = tower.values.get(name)
    if (
        not isinstance(listed, list)
        or not all(type(one) is int and 0 <= one < depth for one in listed)
        or len(set(listed)) < len(listed)
    ):
        tower.refuse(name, f"a list of layers of the tower, from 0 to {depth - 1}, each once")
    return len(listed)


def decoder_fields(config: Fields, architecture: str) -> Fields:
    """Returns the decoder's fields: ``text_config`` or, in a flat file, the top-level fields without the wrapper's.

    Qwen2.5-VL is published as a flat file.
    """
    wrapper = WRAPPERS[architecture]
    if wrapper.is_flat and config.values.get(TEXT) is None:
        outer = {TEXT, VISION, "architectures", *wrapper.fields}
        own = {name: value for name, value in config.values.items() if name not in outer}
        absent = config.values.absent if isinstance(config.values, ConfigValues) else frozenset()
        return Fields(ConfigValues(own | {"model_type": wrapper.text_type}, absent), config.file)
    return _nested(config, TEXT, "the decoder's fields")


def _nested(config: Fields, name: str, holds: str) -> Fields:
    found = config.inner(name)
    if found is None:
        config.refuse(name, f"a JSON object with {holds}")
    return found


def is_tied(config: Fields, architecture: str) -> bool:
    """Returns whether a wrapper ties the head to the embedding.

    transformers 5.23 ties the head of a LLaVA or a Qwen2.5-VL if either config requests it (``__post_init__`` of their
    classes), and that of a Qwen3-VL only if the outer config does.
    """
    text = decoder_fields(config, architecture)
    outer, inner = (place.flag("tie_word_embeddings", missing=False) for place in (config, text))
    if inner and not outer and not WRAPPERS[architecture].ties_by_decoder:
        config.refuse("tie_word_embeddings", "true, as in text_config: transformers ties the head by this one")
    return outer or inner


def decoder_name(architecture: str, stored: str) -> str | None:
    """Maps a stored tensor name to the decoder's name; None for a tensor of the vision tower.

    The names of a text model stay unchanged. For a wrapper, a name without a known prefix maps to a name that no
    decoder has.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return stored
    if stored.startswith(wrapper.tower):
        return None
    fitting = [pair for pair in wrapper.decoder if stored.startswith(pair[0])]
    if fitting:
        begin, own = max(fitting, key=lambda pair: len(pair[0]))
        return own + stored.removeprefix(begin)
    # An unknown name must not map to a decoder name, or the "model." tensors of a text model's file would be accepted.
    return f"{architecture}: {stored}"


def stored_name(architecture: str, own: str) -> str:
    """Maps the decoder's tensor name ``own`` to the name that transformers stores; the reverse of decoder_name."""
    wrapper = WRAPPERS.get(architecture)
    begin, inner = next(pair for pair in wrapper.decoder if own.startswith(pair[1])) if wrapper else ("", "")
    return begin + own.removeprefix(inner)


def _refuse_unknown(config: Fields, architecture: str) -> None:
    known = {*_OF_EVERY_WRAPPER, *WRAPPERS[architecture].fields}
    for name, value in config.values.items():
        if value and name not in known and name not in WITHOUT_EFFECT and not name.startswith(PREFIXES_WITHOUT_EFFECT):
            config.refuse_here(
                name,
                f"no such field beside the text_config of a {architecture}: the torch engine does not know what it "
                "asks for; delete it if the answers do not depend on it, or serve it with the engine tensorrt-llm",
            )


def _placeholder(config: Fields, names: tuple[str, ...], vocab_size: int) -> int:
    """Returns the token id of a placeholder; the field may have any of several names."""
    found = {name: config.values[name] for name in names if config.has(name)}
    if not found:
        config.refuse(names[0], f"the id of the placeholder of images, from 0 to {vocab_size - 1}")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            config.refuse(name, f"the id of the placeholder of images, from 0 to {vocab_size - 1}")
    if len(set(found.values())) > 1:
        config.refuse(names[1], f"{found[names[0]]} as in {names[0]}, or no such field")
    return int(next(iter(found.values())))


def _clip_rows(config: Fields, tower: Fields) -> int:
    """Returns the rows of an image: the patches of LLaVA's CLIP tower, plus the class token with strategy ``full``."""
    wanted = "'clip_vision_model', the tower of a llava that the torch engine knows"
    if tower.word("model_type", wanted) != "clip_vision_model":
        tower.refuse_here("model_type", f"{wanted}; use another checkpoint or the engine tensorrt-llm")
    hidden = tower.count("hidden_size", most=_LARGEST_SIZE)
    tower.count("intermediate_size", most=1 << 20)
    heads = tower.count("num_attention_heads", most=_LARGEST_DEPTH)
    if hidden % heads:
        tower.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden}")
    if tower.has("num_channels") and tower.count("num_channels", most=3) != 3:
        tower.refuse("num_channels", "3: images are red, green and blue")
    image = tower.count("image_size", most=_LARGEST_IMAGE)
    side = image // tower.count("patch_size", most=image)
    _check_layers(config, tower.count("num_hidden_layers", most=_LARGEST_DEPTH))
    if config.has("projector_hidden_act"):
        config.word("projector_hidden_act", "the name of an activation, such as 'gelu'")
    config.flag("multimodal_projector_bias", missing=True)
    strategy = config.values.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        config.refuse("vision_feature_select_strategy", "'default', patches alone, or 'full', the class token too")
    return side * side + int(strategy == "full")


def _check_layers(config: Fields, depth: int) -> None:
    stated = config.values.get("vision_feature_layer", -2)
    layers = stated if isinstance(stated, list) else [stated]
    if not layers or not all(type(layer) is int and -depth - 1 <= layer <= depth for layer in layers):
        config.refuse("vision_feature_layer", f"a layer of the tower from {-depth - 1} to {depth}, or a list of them")
    if stated == 0:  # transformers 5.23 (select_hidden_states) raises a TypeError for 0
        config.refuse("vision_feature_layer", f"{-depth - 1}, which is the same layer")


def refuse_quantized(model_dir: Path, architecture: str) -> None:
    """Raises UsageError: trtx does not determine which quantized modules belong to the decoder."""
    raise UnsupportedModel(
        f"{model_dir} is a quantized {architecture}; the torch engine loads such models in full precision alone: use "
        "the original checkpoint, or the engine tensorrt-llm"
    )
