"""Pictures in prompts: a model's input processor, its tower, and handles that cross between processes.

The tower is the torch engine's. What the real package has inside its LLM runs in a process beside it here; where text
and pictures meet, what is refused and which handle is whose follow the real one (tensorrt_llm/llmapi/llm.py,
``_preprocess``; modeling_qwen2vl.py, ``build_disagg_prefill_multimodal_inputs``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, prod, sqrt
from pathlib import Path
from typing import Any

from tensorrt_llm._impl.shared_tensor import SharedTensorContainer
from tensorrt_llm._standin import absent

_DISAGGREGATED = (
    "LlavaForConditionalGeneration",  # in place of LLaVA-NeXT, whose decoder and rows the torch engine has not
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
_LARGEST_ASPECT = 200


@dataclass(slots=True)
class MultimodalParams:
    """What the processor made beside the ids. As ``multimodal_data`` it holds handles, which the executor makes tensors
    of: ``multimodal_embedding``, one a picture, and of models that count three positions ``mrope_config``, those of the
    whole prompt."""

    multimodal_data: dict[str, Any] | None

    def to_tensor(self, element: str) -> None:
        """In place. Every handle is used up."""
        if element != "multimodal_data":
            raise ValueError(f"Unsupported element '{element}'. Only 'multimodal_data' is supported.")
        if self.multimodal_data is not None:
            self.multimodal_data = _read(self.multimodal_data)


def _read(held: Any) -> Any:
    if isinstance(held, dict) and "method_key" in held:
        return SharedTensorContainer.from_dict(held).get_local_view()
    if isinstance(held, dict):
        return {name: _read(value) for name, value in held.items()}
    return [_read(value) for value in held]


def params_of(rows: list[Mapping[str, Any]], positions: Any, deltas: Any) -> MultimodalParams:
    """Of handles."""
    data: dict[str, Any] = {"multimodal_embedding": rows}
    if positions is not None:
        data["mrope_config"] = {"mrope_position_ids": positions, "mrope_position_deltas": deltas}
    return MultimodalParams(data)


@dataclass(slots=True)
class Taken:
    """What the executor makes of them."""

    embeddings: dict[str, Any]  # multi_modal_embeddings of the torch engine
    positions: Any = None
    deltas: Any = None


class InputProcessor:
    """Of a model that sees."""

    def __init__(self, model_dir: Path, vision: Any, tokenizer: Any) -> None:
        self.support_mm_disagg = vision.architecture in _DISAGGREGATED
        self.tokenizer = tokenizer
        self.dtype = "auto"  # of the tower, which is as its LLM's or encoder's: whoever owns it says so
        self._model, self._vision = model_dir, vision
        self._tower: Any = None

    @property
    def counts_three_positions(self) -> bool:
        return self._vision.tokens_per_image is None

    def get_mm_token_ids(self) -> Any:
        import torch

        return torch.tensor([self._vision.image_token_id], dtype=torch.int32)

    def get_num_tokens_per_image(self, *, image: Any) -> int:
        """By the picture's size alone. Raises ValueError for one that is more than 200 times as long as wide."""
        if self._vision.tokens_per_image is not None:
            return int(self._vision.tokens_per_image)
        return _rows(self._model, *image.size)

    def start(self) -> None:
        """The tower, as the real one's is loaded with its model."""
        from trtx.torch_engine.llmapi import MultimodalEncoder as Tower

        if self._tower is None:
            self._tower = Tower(str(self._model), dtype=self.dtype, max_batch_size=4)

    def embed(self, images: Any) -> tuple[list[tuple[Any, Any]], list[list[int]]]:
        """(rows, grid) of each picture, and their hashes."""
        from trtx.ipc.shared_tensor import open_shared, remove_shared
        from trtx.torch_engine.embeddings import EmbeddingReader, parse_handle
        from trtx.torch_engine.llmapi import RequestError

        self.start()
        try:
            made = self._tower.generate({"multi_modal_data": {"image": images}}).disaggregated_params
        except RequestError as error:
            raise ValueError(str(error)) from error  # as transformers' processors do
        embedded = []
        for one in made.multimodal_embedding_handles:
            handle = parse_handle(one)
            rows = EmbeddingReader().read(handle)
            embedded.append((open_shared(rows), handle.grid))
            remove_shared(rows)
        return embedded, made.multimodal_hashes

    def with_pictures(self, token_ids: Sequence[int], data: Mapping[str, Any]) -> tuple[list[int], MultimodalParams]:
        """The prompt with its pictures, of one placeholder each. Raises ValueError where these are not as many."""
        if others := sorted(kind for kind, held in data.items() if kind != "image" and held):
            raise absent(f"{', '.join(others)} in multi_modal_data")
        given = data.get("image") or []
        images = list(given) if isinstance(given, (list, tuple)) else [given]
        places = list(token_ids).count(self._vision.image_token_id)
        if places != len(images):
            raise ValueError(f"Number of image tokens ({places}) does not match number of images ({len(images)})")
        embedded, _ = self.embed(images)
        return self.assemble(token_ids, embedded)

    def assemble(
        self, token_ids: Sequence[int], embedded: Sequence[tuple[Any, Any]]
    ) -> tuple[list[int], MultimodalParams]:
        expanded, starts = self._expanded(token_ids, [int(rows.shape[0]) for rows, _ in embedded])
        rows = [SharedTensorContainer.from_tensor(rows).dump_to_dict() for rows, _ in embedded]
        if not self.counts_three_positions:
            return expanded, params_of(rows, None, None)
        both = (
            SharedTensorContainer.from_tensor(one).dump_to_dict() for one in self._positions(expanded, starts, embedded)
        )
        return expanded, params_of(rows, *both)

    def build_disagg_prefill_multimodal_inputs(self, inputs: Mapping[str, Any], mm_handles: Any) -> list[int]:
        """The expanded prompt. The real one also says where its runs are, of which the torch engine has no need."""
        if not inputs.get("prompt"):
            raise ValueError("Text prompt is required but not provided")
        if not isinstance(mm_handles, list):
            raise TypeError("mm_handles must be a list")
        for index, handle in enumerate(mm_handles):
            if (width := handle["tensor_size"][1]) != self._vision.columns:
                raise RuntimeError(
                    f"Multimodal embedding {index} hidden size {width} must match model hidden size "
                    f"{self._vision.columns}"
                )
        token_ids = self.tokenizer.encode(inputs["prompt"]).ids
        places = token_ids.count(self._vision.image_token_id)
        assert places == len(mm_handles), "Number of images must match number of mm_handles"
        return self._expanded(token_ids, [handle["tensor_size"][0] for handle in mm_handles])[0]

    def take(self, token_ids: Sequence[int], params: MultimodalParams) -> Taken:
        """What the executor makes of ``params``."""
        params.to_tensor("multimodal_data")
        data = params.multimodal_data
        assert data is not None
        rows = data["multimodal_embedding"]
        if not self.counts_three_positions:
            return Taken({"image": rows})
        config = data["mrope_config"]  # as the real engine's forward pass, which takes it for granted
        positions, deltas = config["mrope_position_ids"], config["mrope_position_deltas"]
        if positions.shape[-1] != len(token_ids):
            raise RuntimeError(f"positions of {positions.shape[-1]} tokens for a prompt of {len(token_ids)}")
        grids = self._grids(token_ids, rows, positions[:, 0])
        return Taken({"image": rows, "image_grid_thw": grids}, positions, deltas)

    def close(self) -> None:
        if self._tower is not None:
            self._tower.shutdown()

    def _expanded(self, token_ids: Sequence[int], rows: Sequence[int]) -> tuple[list[int], list[int]]:
        expanded: list[int] = []
        starts: list[int] = []
        counts = iter(rows)
        for token_id in token_ids:
            if token_id == self._vision.image_token_id:
                starts.append(len(expanded))
                expanded += [token_id] * next(counts)
            else:
                expanded.append(token_id)
        return expanded, starts

    @staticmethod
    def _positions(expanded: list[int], starts: Sequence[int], embedded: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """[3, 1, tokens] and [1, 1], both int32."""
        import torch

        from trtx.torch_engine.media_positions import position_delta
        from trtx.torch_engine.messages import MediaSpan
        from trtx.torch_engine.runner.mrope import positions_between

        length = len(expanded)
        spans = [
            MediaSpan(at, int(rows.shape[0]), b"", grid) for at, (rows, grid) in zip(starts, embedded, strict=True)
        ]
        found = torch.from_numpy(positions_between(spans, 0, length).copy())
        return found.reshape(3, 1, length), torch.tensor([[position_delta(spans)]], dtype=torch.int32)

    def _grids(self, token_ids: Sequence[int], rows: Sequence[Any], positions: Any) -> list[tuple[int, int, int]]:
        """In patches, of positions alone: nothing else says them."""
        merge = self._vision.spatial_merge
        places = [at for at, token_id in enumerate(token_ids) if token_id == self._vision.image_token_id]
        grids = []
        for one in rows:
            mine, places = places[: len(one)], places[len(one) :]
            t, h, w = (int(axis[mine].max() - axis[mine].min()) + 1 for axis in positions)
            if prod((t, h, w)) != len(one):
                raise RuntimeError(f"positions say {t} x {h} x {w} of a picture with {len(one)} rows")
            grids.append((t, h * merge, w * merge))
        return grids


def _rows(model_dir: Path, width: int, height: int) -> int:
    """Of a processor like Qwen's, whose pictures have grids."""
    if max(width, height) > _LARGEST_ASPECT * min(width, height):
        raise ValueError(f"absolute aspect ratio must be smaller than {_LARGEST_ASPECT}, got {width} x {height}")
    config = json.loads((model_dir / "preprocessor_config.json").read_text(encoding="utf-8"))
    factor = config["patch_size"] * config["merge_size"]
    size = config.get("size") or {}
    least = config.get("min_pixels") or size["shortest_edge"]
    most = config.get("max_pixels") or size["longest_edge"]
    sides = [round(side / factor) for side in (height, width)]
    if prod(sides) * factor**2 > most:
        shrink = sqrt(height * width / most)
        sides = [max(1, floor(side / shrink / factor)) for side in (height, width)]
    elif prod(sides) * factor**2 < least:
        grow = sqrt(least / (height * width))
        sides = [ceil(side * grow / factor) for side in (height, width)]
    return prod(sides)


class _TextProcessor:
    """The input processor of a model without images."""

    support_mm_disagg = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_mm_token_ids(self) -> None:
        return None

    def get_num_tokens_per_image(self, *, image: Any) -> int:
        raise absent("multimodal input processor of a text model")

    def close(self) -> None: ...


def create_input_processor(model_path_or_dir: str, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    from trtx.checkpoint.vision import read_vision_config

    vision = read_vision_config(Path(model_path_or_dir))
    return _TextProcessor(tokenizer) if vision is None else InputProcessor(Path(model_path_or_dir), vision, tokenizer)
