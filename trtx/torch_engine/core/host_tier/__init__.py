"""The host tier of the KV cache: evicted blocks are kept in host memory, and brought back when a prompt needs them."""

from trtx.torch_engine.core.host_tier.copies import BlockCopies, Copy
from trtx.torch_engine.core.host_tier.loads import Load
from trtx.torch_engine.core.host_tier.tier import HostTier

__all__ = ["BlockCopies", "Copy", "HostTier", "Load"]
