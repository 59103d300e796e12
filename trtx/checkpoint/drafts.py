"""Draft models of speculative decoding: finds them, and checks that they fit their target model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import CONFIG, Fields, config_fields, read_object
from trtx.checkpoint.families import COMMON
from trtx.checkpoint.hub import find_on_hub
from trtx.checkpoint.model_config import LARGEST, ModelConfig, head_shape, read_model_config
from trtx.checkpoint.resolve import resolve_checkpoint
from trtx.checkpoint.rope import read_rope
from trtx.checkpoint.shapes import PREFIX
from trtx.checkpoint.weight_index import check_weights, weight_files, without_weights
from trtx.errors import UsageError

EAGLE3 = "Eagle3"
SMALL, HEAD = f"{PREFIX}tiny-draft", f"{PREFIX}tiny-eagle3"
TRAINED = {SMALL: "tiny_draft", HEAD: "tiny_eagle3"}
"""The draft models of ``synthetic:tiny-trained``, which are part of the package: ``tools/training/train_drafts.py``."""
_FEATURE_LAYERS, _LAYER_IDS = 3, "eagle_aux_hidden_state_layer_ids"
_FIELD = "speculative_config.speculative_model"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The shape of an EAGLE-3 head. ``decoder``: its one layer, with the target model's vocabulary.

    ``draft_vocab_size``: rows of its LM head. ``captured``: the target model's layers whose outputs it reads; -1 for
    the embeddings.
    """

    decoder: ModelConfig
    draft_vocab_size: int
    captured: tuple[int, ...]


def find_draft(name: str, kind: str) -> Path:
    """Returns the directory of a draft model. ``kind``: its ``decoding_type``. Raises UsageError.

    An EAGLE-3 head has no tokenizer: it shares the target model's.
    """
    if name in TRAINED:
        return Path(__file__).with_name(TRAINED[name])
    path = Path(name).expanduser()
    if not path.exists() and name.startswith((".", "/", "~")):
        raise UsageError(
            f"{_FIELD} is {name!r}, which does not exist on this machine; expected the directory of a draft model, a "
            f"Hugging Face name or {HEAD if kind == EAGLE3 else SMALL}"
        )
    if kind != EAGLE3:
        return resolve_checkpoint(name).path
    if name.startswith(PREFIX):
        raise UsageError(f"{_FIELD} is {name!r}; the synthetic EAGLE-3 head is {HEAD}")
    path = path if path.exists() or name.startswith((".", "/", "~")) else find_on_hub(name)
    if not (path / CONFIG).is_file():
        raise UsageError(f"{_FIELD} is {name!r}, which has no {CONFIG}; expected the directory of an EAGLE-3 head")
    files = weight_files(path)
    check_weights(path, files)
    if not files:
        raise UsageError(without_weights(path))
    return path.resolve()


def check_draft_of(speculation: Mapping[str, Any], target: Path) -> None:
    """Refuses the draft model of a ``speculative_config`` that does not fit ``target``, with UsageError."""
    name = speculation.get("speculative_model") or speculation.get("speculative_model_dir")
    kind = speculation.get("decoding_type")
    if isinstance(name, str) and kind in ("Draft_Target", EAGLE3):
        check_draft(target, find_draft(name, kind), kind, layers=speculation.get("eagle3_layers_to_capture"))


def check_draft(target: Path, draft: Path, kind: str, *, layers: list[int] | None = None) -> None:
    """Refuses a draft model that does not fit ``target``, with UsageError.

    ``layers``: ``eagle3_layers_to_capture``.
    """
    config = read_model_config(target)
    if config.windows and None not in config.windows:
        raise UsageError(
            f"{kind} keeps draft KV for all positions, and every layer of {target.name} has a sliding window; draft "
            "with NGram or SA"
        )
    if kind == EAGLE3:
        read_eagle_config(draft, config, layers=layers)
        return
    own = read_model_config(draft)
    if own.vocab_size != config.vocab_size:
        raise UsageError(
            f"{_FIELD}: {draft.name} has {own.vocab_size} tokens and {target.name} has {config.vocab_size}; expected a "
            "draft model with the same vocabulary"
        )
    if (difference := _difference(target, draft)) is not None:
        raise UsageError(
            f"{_FIELD}: {draft.name} and {target.name} have different tokenizers ({difference}); expected a draft "
            "model with the same tokenizer"
        )
    if own.vision is not None or own.rope.mrope_section is not None or any(own.windows):
        raise UsageError(
            f"{_FIELD}: {draft.name} has a vision tower or sliding windows, with which the torch engine does not "
            "draft; expected a text model that attends to all positions"
        )


def _difference(target: Path, draft: Path) -> str | None:
    """Returns a text that tells two tokenizers apart, or None if they give the same ids."""
    one, other = (read_object(path / "tokenizer.json", "a fast tokenizer") for path in (target, draft))
    ours, theirs = _ids(one), _ids(other)
    if ours != theirs:
        token = min(token for token, _ in set(ours.items()) ^ set(theirs.items()))
        return (
            f"the token {token[:40]!r} is {ours.get(token, 'none')} in one and {theirs.get(token, 'none')} in the other"
        )
    for part in ("normalizer", "pre_tokenizer"):
        if one.get(part) != other.get(part):
            return f"their {part} differs"
    merges = [(document.get("model") or {}).get("merges") for document in (one, other)]
    return "their merges differ" if merges[0] != merges[1] else None


def _ids(document: dict[str, Any]) -> dict[str, int]:
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    if not isinstance(vocabulary, dict):  # Unigram: a list of pieces with scores
        vocabulary = {json.dumps(piece): at for at, piece in enumerate(vocabulary)}
    added = {str(one.get("content")): one.get("id") for one in document.get("added_tokens") or ()}
    return {**vocabulary, **added}


def read_eagle_config(directory: Path, target: ModelConfig, *, layers: list[int] | None = None) -> EagleConfig:
    """Reads the ``config.json`` of an EAGLE-3 head in the layout of the public checkpoints. Raises UsageError.

    ``layers``: ``eagle3_layers_to_capture``; None: the head's own list, else TensorRT-LLM's default.
    """
    config = config_fields(directory)
    sizes = {name: config.count(name, most=LARGEST[name]) for name in LARGEST if config.has(name)}
    for name in ("hidden_size", "vocab_size"):
        own, wanted = config.count(name, most=LARGEST[name]), getattr(target, name)
        if own != wanted:
            raise UsageError(
                f"{config.file}: {name} is {own}, and the target model has {wanted}; expected an EAGLE-3 head that was "
                "trained for this model"
            )
    for name in ("intermediate_size", "num_attention_heads"):
        config.count(name, most=LARGEST[name])
    if sizes.get("num_hidden_layers", 1) != 1:
        config.refuse("num_hidden_layers", "1, the only layer of an EAGLE-3 head")
    heads, kv_heads, head_dim = head_shape(sizes)
    decoder = replace(
        target,
        intermediate_size=sizes["intermediate_size"],
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", at_least=0.0),
        rope=read_rope(config, default_theta=10000.0, max_position=target.max_position, head_dim=head_dim),
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        quantization=None,
        vision=None,
        windows=(),
        experts=None,
        arithmetic=COMMON,
        gemma3=None,
        tied_head=False,
    )
    draft_vocab = (
        config.count("draft_vocab_size", most=target.vocab_size)
        if config.has("draft_vocab_size")
        else target.vocab_size
    )
    return EagleConfig(decoder, draft_vocab, _captured(config, target.num_layers, layers))


def _captured(config: Fields, num_layers: int, layers: list[int] | None) -> tuple[int, ...]:
    """Returns the layers whose outputs the head reads, in ascending order."""
    where = "speculative_config.eagle3_layers_to_capture"
    found, first = layers, 0
    own = config.inner("eagle_config")
    if found is None and own is not None and own.has(_LAYER_IDS):
        # These number the layer that reads the hidden states, as in vLLM. The first layer reads the embeddings.
        found, where, first = [one - 1 for one in own.token_ids(_LAYER_IDS)], f"{config.file}: {_LAYER_IDS}", -1
    if found is None:
        found = [1, num_layers // 2 - 1, num_layers - 4]  # TensorRT-LLM's default
    captured = tuple(sorted(set(found)))
    if len(captured) != _FEATURE_LAYERS or captured[0] < first or captured[-1] > num_layers - 2:
        raise UsageError(
            f"{where} is {list(found)}; expected three different layers from {first} to {num_layers - 2}, as "
            f"the target model has {num_layers}"
        )
    return captured
