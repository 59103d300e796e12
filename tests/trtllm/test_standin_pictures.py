"""The contract of pictures in the stand-in, by the real package's own rules: what prefill and decode must be given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer

pytestmark = pytest.mark.usefixtures("only_standin")

TEXT = "one <|image_pad|> and <|image_pad|> here"
IMAGES = [Image.new("RGB", (56, 112), "red"), Image.new("RGB", (140, 56), "blue")]  # 2 x 4 rows high, 2 x 5 wide
ROWS = (8, 10)


@pytest.fixture(scope="module")
def vl(api: Any) -> Iterator[SimpleNamespace]:
    model = resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path
    arguments = {"max_batch_size": 2, "max_seq_len": 128, "cache_transceiver_config": {"backend": "NIXL"}}
    with (
        pytest.MonkeyPatch.context() as patch,
        api.LLM(str(model), **arguments) as llm,
        api.MultimodalEncoder(str(model), max_batch_size=2) as encoder,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        yield SimpleNamespace(
            llm=llm,
            encoder=encoder,
            make_llm=lambda: api.LLM(str(model), **arguments),
            token_ids=list(load_tokenizer(Path(model)).encode(TEXT).ids),
            Params=api.DisaggregatedParams,
            container=api.SharedTensorContainer,
            sampling=lambda: api.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, end_id=-1),
        )


def encoded(vl: SimpleNamespace, request_type: str) -> Any:
    (output,) = vl.encoder.generate([{"prompt": TEXT, "multi_modal_data": {"image": IMAGES}}], use_tqdm=False)
    params = output.disaggregated_params
    params.request_type = request_type
    return params


def generate(vl: SimpleNamespace, inputs: Any, params: Any = None) -> Any:
    return vl.llm.generate(inputs, vl.sampling(), disaggregated_params=params)


@pytest.mark.proof  # what tests/trtllm/test_images.py asks through workers
def test_pictures_handles_and_both_stages_give_the_same_tokens(vl: SimpleNamespace) -> None:
    raw = {"prompt_token_ids": vl.token_ids, "multi_modal_data": {"image": IMAGES}, "mm_processor_kwargs": {}}
    expected = generate(vl, raw)
    assert len(expected.prompt_token_ids) == len(vl.token_ids) - 2 + sum(ROWS)
    prepared = vl.llm.preprocess(raw, vl.sampling())
    assert prepared.prompt_token_ids == expected.prompt_token_ids
    assert generate(vl, prepared).outputs[0].token_ids == expected.outputs[0].token_ids
    handles = encoded(vl, "context_and_generation")
    assert [handle["tensor_size"][0] for handle in handles.multimodal_embedding_handles] == list(ROWS)
    assert all(len(words) == 8 for words in handles.multimodal_hashes)
    assert generate(vl, {"prompt": TEXT}, handles).outputs[0].token_ids == expected.outputs[0].token_ids
    context = generate(vl, {"prompt": TEXT}, encoded(vl, "context_only"))
    handed = context.outputs[0].disaggregated_params
    handed.request_type = "generation_only"
    with vl.make_llm() as decode:
        inputs = {"prompt_token_ids": context.prompt_token_ids, "multi_modal_data": None}
        output = decode.generate(inputs, vl.sampling(), disaggregated_params=handed)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        again = generate(vl, {"prompt": TEXT}, encoded(vl, "context_only")).outputs[0].disaggregated_params
        again.request_type = "generation_only"
        again.mrope_position_ids_handle = again.mrope_position_deltas_handle = None
        with pytest.raises(RuntimeError, match="mrope_config"):  # it would go on by the positions of text
            decode.generate(inputs, vl.sampling(), disaggregated_params=again)
        assert not decode._check_health()


def test_a_prefill_that_the_real_one_would_refuse_is_refused(vl: SimpleNamespace) -> None:
    params = encoded(vl, "context_and_generation")
    with pytest.raises(ValueError, match="Text prompt is required"):
        generate(vl, vl.token_ids, params)
    with pytest.raises(AssertionError, match="Number of images must match"):
        generate(vl, {"prompt": "one <|image_pad|> here"}, params)
    params.request_type = "generation_only"
    with pytest.raises(ValueError, match="Generation-only mode should not need multimodal parameters"):
        generate(vl, {"prompt": TEXT}, params)
    params.request_type = "context_and_generation"
    narrow = {**params.multimodal_embedding_handles[0], "tensor_size": [ROWS[0], 7]}
    other = vl.Params(multimodal_embedding_handles=[narrow, narrow])
    with pytest.raises(RuntimeError, match="hidden size 7 must match"):
        generate(vl, {"prompt": TEXT}, other)
    with pytest.raises(ValueError, match="does not match number of images"):
        vl.encoder.generate({"prompt": TEXT, "multi_modal_data": {"image": IMAGES[:1]}})
    with pytest.raises(TypeError, match="must be a mapping"):
        generate(vl, {"prompt": TEXT, "multi_modal_data": {"image": IMAGES}, "mm_processor_kwargs": None})
    generate(vl, {"prompt": TEXT}, params)
    with pytest.raises(FileNotFoundError):  # one consumer a handle
        vl.container.from_dict(params.multimodal_embedding_handles[0]).get_local_view()


def test_an_encoder_needs_pictures_a_batch_size_and_a_model_that_sees(
    vl: SimpleNamespace, model_directory: str
) -> None:
    assert vl.encoder.generate([{"prompt_token_ids": [100]}])[0].disaggregated_params is None
    assert vl.encoder.tokenizer.decode([100])
    make = type(vl.encoder)
    with pytest.raises(TypeError):
        make(model_directory, max_batch_size=None)
    with pytest.raises(ValueError, match="no vision encoder"):
        make(model_directory, max_batch_size=2)
