"""Owns the tensor side of the embedded engine: weights, KV pool, forward pass, sampling, CUDA graphs.

Decides nothing: which sequences run, which blocks they have and when they stop is the scheduler's.
Enter through :func:`create_runner`; what it returns is a :class:`trtx.torch_engine.step.ModelRunner`.
It always holds that a step writes KV only into blocks that its sequences list, and that a sequence's tokens do not
depend on what else is in the batch beyond the rounding of its logits.
"""

from trtx.torch_engine.runner.args import RunnerArgs
from trtx.torch_engine.runner.create import create_runner
from trtx.torch_engine.runner.runner import TorchRunner

__all__ = ["RunnerArgs", "TorchRunner", "create_runner"]
