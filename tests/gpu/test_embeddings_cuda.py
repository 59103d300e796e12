"""Embeddings between two processes on GPUs, by CUDA IPC: two GPUs where there are two, else one that both use.

The cases are those of the CPU, and one that only GPUs have.
"""

from __future__ import annotations

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


def test_memory_that_the_allocator_maps_page_by_page_is_not_offered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embeddings go through files: an arena says so when it is made."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert start().process.wait(120) != 0
