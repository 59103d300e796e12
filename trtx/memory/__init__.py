"""Plans the GPU memory of a worker before it starts: weights, reserves, KV pool, and whether all of it fits.

Owns the arithmetic, the sizes of models (from ``config.json`` and safetensors headers: ``shapes``; KV bytes of a token
on one GPU: ``rank_shares``) and the table of known GPUs.
Does not probe GPUs (``launch`` does) and starts no process. The formulas of the torch engine are in
``torch_engine``; the engine's runner sizes its own pool with the same functions.
Enter through :func:`plan_memory`. Invariant: a returned plan fits; otherwise UsageError is raised with the numbers.
"""

from trtx.memory.encoder import EncoderShare, MediaMemory, encoder_share
from trtx.memory.gpus import MemoryDevice, device_named
from trtx.memory.host import HostMemory, host_memory
from trtx.memory.plan import ENCODER_TOKENS, MemoryPlan, plan_memory
from trtx.memory.shapes import UnknownShapeError
from trtx.memory.units import size_text

__all__ = [
    "ENCODER_TOKENS",
    "EncoderShare",
    "HostMemory",
    "MediaMemory",
    "MemoryDevice",
    "MemoryPlan",
    "UnknownShapeError",
    "device_named",
    "encoder_share",
    "host_memory",
    "plan_memory",
    "size_text",
]
