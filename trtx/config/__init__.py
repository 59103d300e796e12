"""Where text from outside becomes a checked value: engine configs, overrides, topology specs.

Owns the schema of TensorRT-LLM's arguments (``llm_args.json``, facts per version), the rules that published configs
follow (``rules``), and how files are read. Does not decide placement (``topology``) and starts nothing (``launch``).
Enter through :func:`load_engine_config`, :func:`check_engine_configs` and :class:`TopologySpec`.
Always holds: an unknown name never passes silently, and every resolved value can say where it came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.config.check import check_engine_configs, resolve_engine_config
    from trtx.config.engine_config import ResolvedEngineConfig, load_engine_config
    from trtx.config.families import built_files, config_family, recipe_files, recipe_names
    from trtx.config.findings import Finding, refuse_errors
    from trtx.config.rules import ModelFacts
    from trtx.config.topology import Mode, Role, RouterMode, TopologySpec

_HOMES = {
    "Finding": "findings", "Mode": "topology", "ModelFacts": "rules", "ResolvedEngineConfig": "engine_config",
    "Role": "topology", "RouterMode": "topology", "TopologySpec": "topology", "built_files": "families",
    "check_engine_configs": "check", "config_family": "families", "load_engine_config": "engine_config",
    "recipe_files": "families", "recipe_names": "families", "refuse_errors": "findings",
    "resolve_engine_config": "check",
}  # fmt: skip
__all__ = [
    "Finding", "Mode", "ModelFacts", "ResolvedEngineConfig", "Role", "RouterMode", "TopologySpec", "built_files",
    "check_engine_configs", "config_family", "load_engine_config", "recipe_files", "recipe_names", "refuse_errors",
    "resolve_engine_config",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: an engine's process takes its limits from here, and no pydantic, which
    would cost each start 0.1 s of CPU."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
