"""``MultimodalEncoder``: the torch engine's tower behind the real one's surface."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm._facts import follows, public
from tensorrt_llm._impl.disagg import DisaggregatedParams
from tensorrt_llm._impl.llm import BaseLLM
from tensorrt_llm._impl.multimodal import InputProcessor, create_input_processor
from tensorrt_llm._impl.results import Feed, RequestOutput, request_output
from tensorrt_llm._impl.sampling import SamplingParams

_NO_ENCODER = ("Llama4ForConditionalGeneration",)
_MAX_NUM_TOKENS = 16384


@dataclass(slots=True)
class _Encoded:
    """What a request of the torch engine looks like, for one that is over already."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[Any] = field(default_factory=list)
    finished: bool = True

    def result(self, timeout: float | None) -> None: ...

    async def __anext__(self) -> None: ...

    def abort(self) -> None: ...


@public
class MultimodalEncoder(BaseLLM):
    """The vision part of a model alone (tensorrt_llm/llmapi/mm_encoder.py)."""

    @follows("MultimodalEncoder.__init__")
    def __init__(self, model: Any, **given: Any) -> None:
        if given.get("max_num_tokens") is None:
            given["max_num_tokens"] = _MAX_NUM_TOKENS
        super().__init__(model, **given)

    def _build_model(self) -> None:
        config = json.loads((Path(self.args.model) / "config.json").read_text(encoding="utf-8"))
        for architecture in config.get("architectures") or ():
            if architecture in _NO_ENCODER:
                raise ValueError(f"{architecture} has no standalone multimodal encoder")
        if self.args.max_batch_size is None:
            raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")  # the real one's crash
        self.args.mm_encoder_only = True
        self.input_processor = create_input_processor(str(self.args.model), self._fast_tokenizer())
        if not isinstance(self.input_processor, InputProcessor):
            raise ValueError(f"{config.get('architectures')} has no vision encoder")
        self.input_processor.dtype = self.args.dtype
        self.input_processor.start()
        self._ids = itertools.count(1)
        self._is_open = True

    def generate(self, inputs: Any, **_: Any) -> Any:
        is_one = not isinstance(inputs, list)
        outputs = [self.generate_async(item) for item in ([inputs] if is_one else inputs)]
        return outputs[0] if is_one else outputs

    def generate_async(self, inputs: Any, **_: Any) -> RequestOutput:
        if not self._is_open:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, dict) or ("prompt" not in inputs and "prompt_token_ids" not in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        token_ids = inputs.get("prompt_token_ids")
        if token_ids is None:
            token_ids = self._fast_tokenizer().encode(inputs["prompt"]).ids
        images = (inputs.get("multi_modal_data") or {}).get("image") or []
        expanded, params = self._encoded(list(token_ids), images if isinstance(images, list) else [images])
        inner = _Encoded(next(self._ids), expanded)
        output = request_output(
            Feed(
                inner=inner,
                sampling=SamplingParams(),
                streaming=False,
                prompt=inputs.get("prompt"),
                disaggregated_params=params,
                stop_words=[],
                decode=None,
                fail=lambda error: error,
                seen=lambda: None,
            )
        )
        output._done = True
        output._outputs[0].finish_reason = "length"
        output._outputs[0].disaggregated_params = output.disaggregated_params
        return output

    def shutdown(self) -> None:
        self._is_open = False
        self.input_processor.close()

    def _check_health(self) -> bool:
        return self._is_open

    def _encoded(self, token_ids: list[int], images: list[Any]) -> tuple[list[int], Any]:
        places = token_ids.count(int(self.input_processor.get_mm_token_ids()[0]))
        if not images and not places:
            return token_ids, None
        if places != len(images):
            raise ValueError(f"Number of image tokens ({places}) does not match number of images ({len(images)})")
        embedded, hashes = self.input_processor.embed(images)
        expanded, made = self.input_processor.assemble(token_ids, embedded)
        config = made.multimodal_data.get("mrope_config") or {}
        return expanded, DisaggregatedParams(
            multimodal_embedding_handles=made.multimodal_data["multimodal_embedding"],
            multimodal_hashes=hashes,
            mrope_position_ids_handle=config.get("mrope_position_ids"),
            mrope_position_deltas_handle=config.get("mrope_position_deltas"),
        )
