"""Base classes of logits processors, with TensorRT-LLM's names and signatures.

Both processes of an engine import this module: the caller's process pickles a processor, and the engine's process calls
it. Any callable with the same signature is a logits processor too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class LogitsProcessor(ABC):
    """Edits the logits of one request before each of its tokens is sampled: ``SamplingParams.logits_processor``.

    It runs in the engine's process, as a copy made by pickle: one copy for each choice of a request, so that it may
    keep state between its calls. It is called once for each sampled token, also after a preemption.
    """

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Edits ``logits`` [1, 1, vocab], in the model's dtype and on its device, in place.

        ``req_id``: unique for each choice of a request. ``token_ids``: one list with the tokens of the prompt and of
        the answer so far. ``stream_ptr`` and ``client_id`` are None, as in TensorRT-LLM's PyTorch backend: the engine's
        stream is the current one.
        """


class BatchedLogitsProcessor(ABC):
    """Edits the logits of all requests of a step that set ``apply_batched_logits_processor``; an argument of ``LLM``.

    It runs in the engine's process, as a copy made by pickle.
    """

    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[torch.Tensor],
        token_ids: list[list[list[int]]],
        stream_ptr: int | None,
        client_ids: list[int | None],
    ) -> None:
        """Edits each of ``logits`` in place. The lists are aligned; their entries are those of a LogitsProcessor.

        ``stream_ptr``: pointer of the CUDA stream on which the logits are computed; None on a CPU.
        """
