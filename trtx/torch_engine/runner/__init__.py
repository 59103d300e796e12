"""The tensor side of the embedded engine: weights, KV pool, forward, sampling, CUDA graphs.

It makes no scheduling decisions: the scheduler chooses which sequences run, which blocks they get and when they stop.
Callers enter through :func:`create_runner`, which returns a :class:`trtx.torch_engine.step.ModelRunner`.

Two invariants always hold. A step writes KV only into blocks that its sequences list. The rest of the batch affects a
sequence's tokens only through the rounding of its logits.
"""

from trtx.torch_engine.runner.args import DraftArgs, RunnerArgs
from trtx.torch_engine.runner.create import create_runner
from trtx.torch_engine.runner.runner import TorchRunner

__all__ = ["DraftArgs", "RunnerArgs", "TorchRunner", "create_runner"]
