"""The host tier of the KV cache: evicted blocks are kept in host memory, and brought back when a prompt needs them."""

from trtx.torch_engine.core.host_tier.loads import HostLoad
from trtx.torch_engine.core.host_tier.tier import HostTier

__all__ = ["HostLoad", "HostTier"]
