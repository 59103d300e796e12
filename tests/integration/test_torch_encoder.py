"""The encoder as a worker sees it: a real process, a real tower, pictures in files, rows in files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from processes import freeze
from random_models import HIDDEN, ROWS, SIDE, picture, save_llava, write_processor
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from trtx.errors import UsageError
from trtx.ipc.shared_tensor import SharedTensor, open_shared, remove_shared, share
from trtx.torch_engine.embeddings import EmbeddingReader
from trtx.torch_engine.embeddings.handle import parse_handle
from trtx.torch_engine.llmapi import Embedding, MultimodalEncoder, PreparedPicture, RequestError, RequestFailed
from trtx.torch_engine.llmapi.picture_inputs import pictures_of

pytestmark = pytest.mark.proof  # an encoder; make test has test_images.py and unit/torch_engine/vision


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a topology gives its processes: one directory for temporary files, and one thread."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("scratch")
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield path
    tempfile.tempdir = None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava")
    save_llava(directory)
    write_processor(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> LlavaForConditionalGeneration:
    return LlavaForConditionalGeneration.from_pretrained(model_dir).eval()


@pytest.fixture(scope="module")
def encoder(model_dir: Path) -> Iterator[MultimodalEncoder]:
    with MultimodalEncoder(model_dir, max_batch_size=4) as started:
        yield started


@pytest.fixture
def nothing_left(scratch: Path) -> Iterator[None]:
    yield
    assert not list(scratch.glob("*.tensor")) and not list(scratch.glob("*.partial"))


def prepared(*seeds: int, values: torch.Tensor | None = None) -> list[PreparedPicture]:
    return [
        PreparedPicture(seed.to_bytes(32, "big"), share(picture(seed) if values is None else values)) for seed in seeds
    ]


def taken(embedding: Embedding) -> torch.Tensor:
    rows = open_shared(embedding.tensor)
    remove_shared(embedding.tensor)
    return rows


def forget(items: list[PreparedPicture]) -> None:
    for item in items:
        remove_shared(item.pixels)


def whole_rows(model: LlavaForConditionalGeneration, seed: int) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = model.get_image_features(picture(seed)).pooler_output[0]
    return rows


@pytest.mark.usefixtures("nothing_left")
async def test_rows_are_those_of_the_whole_model(
    encoder: MultimodalEncoder, oracle: LlavaForConditionalGeneration
) -> None:
    items = prepared(*range(9))
    embeddings = await encoder.encode(items)
    forget(items)
    assert [one.key for one in embeddings] == [item.key for item in items]
    assert {(one.rows, one.hidden, one.dtype, one.grid) for one in embeddings} == {(ROWS, HIDDEN, "float32", None)}
    assert (encoder.hidden, encoder.dtype) == (HIDDEN, "float32")
    for seed, one in enumerate(embeddings):
        torch.testing.assert_close(taken(one), whole_rows(oracle, seed), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("nothing_left")
async def test_pictures_that_wait_together_share_batches(encoder: MultimodalEncoder) -> None:
    before = encoder.stats()
    ends = await asyncio.gather(*(encoder.encode(prepared(seed)) for seed in range(40)))
    for (one,) in ends:
        remove_shared(one.tensor)
    for path in Path(tempfile.gettempdir()).glob("*.tensor"):
        path.unlink()  # of the pixels, whose names were not kept here
    (last,) = await encoder.encode(items := prepared(0))  # the stats of the batches before have come by now
    remove_shared(last.tensor)
    forget(items)
    after = encoder.stats()
    assert after.items - before.items >= 40
    assert after.batches - before.batches < 30 and after.rows - before.rows >= 40 * ROWS
    assert encoder.num_open == 0


@pytest.mark.usefixtures("nothing_left")
async def test_a_bad_picture_harms_no_other(encoder: MultimodalEncoder, oracle: LlavaForConditionalGeneration) -> None:
    good = prepared(1, 2)
    nan = picture(3)
    nan[0, 0, 0, 0] = float("nan")
    bad = {
        "expected 1 x 3 x 28 x 28": prepared(3, values=torch.zeros(1, 3, SIDE, 7))[0],
        "expected float32": prepared(3, values=picture(3).half())[0],
        "pixels hold values that are NaN or infinite": prepared(3, values=nan)[0],
        "the encoder computed values that are NaN or infinite": prepared(
            3, values=torch.full((1, 3, SIDE, SIDE), 3e38)
        )[0],
        "is gone": PreparedPicture(b"gone", SharedTensor("/nowhere/x.tensor", "float32", (1, 3, SIDE, SIDE))),
    }
    ends = await encoder.encode_each([good[0], *bad.values(), good[1]])
    forget([*good, *bad.values()])
    for said, end in zip(bad, ends[1:-1], strict=True):
        assert isinstance(end, RequestError) and said in str(end), end
        # Whose fault it is: pixels are the client's, a lost file or a computation is not.
        assert isinstance(end, RequestFailed) is (said == "is gone" or said.startswith("the encoder"))
    for seed, end in zip((1, 2), (ends[0], ends[-1]), strict=True):
        assert isinstance(end, Embedding)
        torch.testing.assert_close(taken(end), whole_rows(oracle, seed), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("nothing_left")
async def test_encode_raises_the_first_error_and_leaves_nothing(encoder: MultimodalEncoder) -> None:
    items = prepared(1) + prepared(2, values=torch.zeros(1)) + prepared(3)
    with pytest.raises(RequestError, match="pixels of shape 1;"):
        await encoder.encode(items)
    forget(items)


@pytest.mark.usefixtures("nothing_left")
async def test_a_cancelled_caller_leaves_nothing_and_harms_no_other(encoder: MultimodalEncoder) -> None:
    items = prepared(*range(30))
    for turns in range(12):
        lost = asyncio.ensure_future(encoder.encode(items))
        other = asyncio.ensure_future(encoder.encode(items[:1]))
        for _ in range(turns):
            await asyncio.sleep(0)
        lost.cancel()
        (kept,) = await other
        remove_shared(kept.tensor)
        with pytest.raises(asyncio.CancelledError):
            await lost
    await _until(lambda: encoder.num_open == 0)
    forget(items)


@pytest.mark.usefixtures("nothing_left")
def test_callers_in_several_threads(encoder: MultimodalEncoder, oracle: LlavaForConditionalGeneration) -> None:
    def ask(seed: int) -> torch.Tensor:
        items = prepared(seed)
        (end,) = asyncio.run(encoder.encode(items))
        forget(items)
        return taken(end)

    with ThreadPoolExecutor(4) as threads:
        for seed, rows in enumerate(threads.map(ask, range(12))):
            torch.testing.assert_close(rows, whole_rows(oracle, seed), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("nothing_left")
def test_pictures_of_the_llm_api_end_as_handles(encoder: MultimodalEncoder, model_dir: Path) -> None:
    """Against transformers' own processor and model, called on the same pictures."""
    theirs = AutoImageProcessor.from_pretrained(model_dir, backend="pil")
    model = LlavaForConditionalGeneration.from_pretrained(model_dir).eval()
    noise = np.random.default_rng(1).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    pictures: list[Any] = [noise, Image.fromarray(noise[::-1].copy()), Image.new("L", (64, 20), 77)]
    inputs = {"prompt": "what is it", "prompt_token_ids": [5, 5, 5], "multi_modal_data": {"image": pictures}}
    output, again = encoder.generate([inputs, inputs], use_tqdm=False)
    assert output.finished and output.prompt_token_ids == [5, 5, 5] and output.prompt == "what is it"
    params = output.disaggregated_params
    handles = [parse_handle(json.loads(json.dumps(one))) for one in params.multimodal_embedding_handles]
    assert [one["tensor_size"] for one in params.multimodal_embedding_handles] == [(ROWS, HIDDEN)] * 3
    assert len({handle.key for handle in handles}) == 3
    assert again.disaggregated_params.multimodal_hashes == params.multimodal_hashes
    assert [struct.pack(">8i", *one) for one in params.multimodal_hashes] == [handle.key for handle in handles]
    reader = EmbeddingReader()
    for one, handle in zip(pictures, handles, strict=True):
        rgb = one.convert("RGB") if isinstance(one, Image.Image) else one
        pixels = theirs(images=[rgb], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            expected = model.get_image_features(pixels).pooler_output[0]
        taken_over = reader.read(handle, width=encoder.hidden, dtype=encoder.dtype)
        torch.testing.assert_close(open_shared(taken_over), expected, rtol=1e-5, atol=1e-5)
        remove_shared(taken_over)
    for unread in again.disaggregated_params.multimodal_embedding_handles:
        remove_shared(reader.read(parse_handle(unread), width=encoder.hidden, dtype=encoder.dtype))
    asyncio.run(_awaited(encoder, inputs, reader))
    for image, said in (
        ("a.png", "expected a Pillow image"),
        (noise.astype(np.float32), "expected uint8"),
        (noise[..., :2], "expected uint8"),
        (Image.new("F", (0, 4)), "expected one that PNG can hold"),
    ):
        with pytest.raises(RequestError, match=said):
            encoder.generate({"multi_modal_data": {"image": [image]}})


async def _awaited(encoder: MultimodalEncoder, inputs: Any, reader: EmbeddingReader) -> None:
    asked = encoder.generate_async(inputs | {"multi_modal_data": {"image": Image.new("RGB", (9, 9))}})
    output = await asked
    (handle,) = output.disaggregated_params.multimodal_embedding_handles
    remove_shared(reader.read(parse_handle(handle), width=encoder.hidden, dtype=encoder.dtype))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("what is it", "expected a dict with multi_modal_data"),
        ({"prompt": "what"}, "expected a dict with image"),
        ({"multi_modal_data": {"image": []}}, "has no image"),
        ({"multi_modal_data": {"image": [1], "video": [2]}}, "has video"),
        (
            {"multi_modal_data": {"image": [1]}, "mm_processor_kwargs": {"max_pixels": 3}},
            "the checkpoint's own options",
        ),
        ({"multi_modal_data": {"image": [1]}, "multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids"),
    ],
)
def test_inputs_of_another_form_are_refused(inputs: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        pictures_of(inputs)


async def test_limits_are_kept_and_what_is_open_at_shutdown_ends(model_dir: Path) -> None:
    encoder = MultimodalEncoder(model_dir, max_num_tokens=ROWS - 1, kv_cache_config={"max_tokens": 64})
    assert encoder.unsupported_fields == {"kv_cache_config.max_tokens": "an encoder keeps no tokens and samples none"}
    items = prepared(1)
    with pytest.raises(RequestError, match="makes 16 tokens; expected at most 15"):
        await encoder.encode(items)
    freeze(encoder.encoder_pid)
    asked = asyncio.ensure_future(encoder.encode(items))
    await _until(lambda: encoder.num_open == 1)
    encoder._client.shutdown(timeout_s=0.1)
    with pytest.raises(RuntimeError, match="shutting down"):
        await asyncio.wait_for(asked, 60)
    with pytest.raises(RuntimeError, match="shutting down"):
        await encoder.encode(items)
    forget(items)
    encoder.shutdown()
    assert not psutil.pid_exists(encoder.encoder_pid)


def test_the_encoder_ends_with_its_parent(model_dir: Path) -> None:
    script = (
        "import os, sys; from trtx.torch_engine.llmapi import MultimodalEncoder\n"
        "print(MultimodalEncoder(sys.argv[1]).encoder_pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(model_dir)], stdout=subprocess.PIPE, timeout=120)
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_what_cannot_be_loaded_is_said(model_dir: Path) -> None:
    with pytest.raises(UsageError, match="has no vision tower"):
        MultimodalEncoder("synthetic:tiny")
    with pytest.raises(ValueError, match="max_batch_sise"):
        MultimodalEncoder(model_dir, max_batch_sise=4)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        MultimodalEncoder(model_dir, tensor_parallel_size=2)


async def test_a_killed_encoder_fails_what_is_open_and_says_so(encoder: MultimodalEncoder, scratch: Path) -> None:
    """Last of this encoder."""
    assert encoder._check_health()
    freeze(encoder.encoder_pid)  # so that the items are open when it dies
    items = prepared(*range(5))
    open_ones = asyncio.ensure_future(encoder.encode_each(items))
    await _until(lambda: encoder.num_open == 5)
    os.kill(encoder.encoder_pid, signal.SIGKILL)
    ends = await asyncio.wait_for(open_ones, 60)
    assert all(type(end) is RuntimeError and "encoder process died" in str(end) for end in ends), ends
    assert "exit code -9" in str(ends[0])
    await _until(lambda: not encoder._check_health())
    with pytest.raises(RuntimeError, match="encoder process died"):
        await encoder.encode(items)
    forget(items)
    assert not list(scratch.glob("*.tensor"))


async def _until(holds: object) -> None:
    async with asyncio.timeout(60):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)
