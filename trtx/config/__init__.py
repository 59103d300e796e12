"""Where text from outside becomes a checked value: engine configs, overrides, topology specs.

Owns the schema of TensorRT-LLM's arguments (``llm_args.json``, facts per version) and the rules for reading files.
Does not decide placement (``topology``) and starts nothing (``launch``).
Enter through :func:`resolve_engine_config` and :class:`TopologySpec`.
Always holds: an unknown name never passes silently, and every resolved value can say where it came from.
"""

from trtx.config.engine_config import ResolvedEngineConfig, check_pair, config_family, resolve_engine_config
from trtx.config.topology import Mode, Role, RouterMode, TopologySpec

__all__ = [
    "Mode",
    "ResolvedEngineConfig",
    "Role",
    "RouterMode",
    "TopologySpec",
    "check_pair",
    "config_family",
    "resolve_engine_config",
]
