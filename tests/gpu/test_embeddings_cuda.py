"""Embeddings between two processes on GPUs, by CUDA IPC: two GPUs where there are two, else one that both use.

The cases are those of the CPU, and one that only GPUs have.
"""

from __future__ import annotations

import json

import pytest
import torch
from device_peer import Encoder
from test_embedding_device import *  # noqa: F403  # fixtures and cases
from test_embedding_device import ROWS, Start, arrives, taken

from trtx.torch_engine.runner.embeddings import EmbeddingLoader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


def test_a_read_waits_for_no_step_under_way(encoder: Encoder, loader: EmbeddingLoader) -> None:
    assert arrives(loader, taken(encoder.offer(1, 1)), 1)  # the first one opens the encoder's memory
    shared = taken(encoder.offer(2, ROWS))
    torch.cuda._sleep(4_000_000_000)  # cycles: 2 s
    loaded = loader.load(shared)
    assert not torch.cuda.current_stream().query(), "the step ended before the read"
    torch.cuda.synchronize()
    assert loaded.rows == ROWS and loaded.tensor.is_cuda


def test_memory_that_the_allocator_maps_page_by_page_is_offered_only_if_it_can_be_read(
    start: Start, loader: EmbeddingLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena that no other process can open says so when it is made, and its embeddings go through files.

    Not every machine maps memory page by page if asked to: an H200 in a virtual machine did not.
    """
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    encoder = start()
    try:
        shared = taken(encoder.offer(1, ROWS))
    except (json.JSONDecodeError, BrokenPipeError):
        assert encoder.process.wait(120) != 0
    else:
        assert arrives(loader, shared, 1)
