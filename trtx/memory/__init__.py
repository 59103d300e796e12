"""What a worker needs of its GPU's memory, before anything starts: weights, reserves, KV pool, and whether it fits.

Owns the arithmetic, the facts of models (from ``config.json`` and safetensors headers) and the table of known GPUs.
Does not probe a machine (``launch`` does) and starts nothing. What the torch engine takes is in ``torch_engine``: its
runner sizes its own pool by the same functions.
Enter through :func:`plan_memory`. A plan that is returned fits; what can't fit raises UsageError with the numbers.
"""

from trtx.memory.encoder import EncoderShare, Media, encoder_share
from trtx.memory.gpus import Device, device_named
from trtx.memory.plan import ENCODER_TOKENS, MemoryPlan, plan_memory
from trtx.memory.shapes import UnknownShapeError
from trtx.memory.units import size_text

__all__ = [
    "ENCODER_TOKENS",
    "Device",
    "EncoderShare",
    "Media",
    "MemoryPlan",
    "UnknownShapeError",
    "device_named",
    "encoder_share",
    "plan_memory",
    "size_text",
]
