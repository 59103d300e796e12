"""Parses and validates user input: engine configs, ``--set`` overrides, topology specs.

Owns the schema of TensorRT-LLM's arguments (``llm_args.json``, with facts for each version), the rules that published
configs follow (``rules``), and the reading of files. Does not decide placement (``topology``) and starts no process
(``launch``). Enter through :func:`load_engine_config`, :func:`check_engine_configs` and :class:`TopologySpec`.
Invariants: an unknown name is never silently accepted, and every resolved value records where it came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.config.check import check_engine_configs
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
}  # fmt: skip
__all__ = [
    "Finding", "Mode", "ModelFacts", "ResolvedEngineConfig", "Role", "RouterMode", "TopologySpec", "built_files",
    "check_engine_configs", "config_family", "load_engine_config", "recipe_files", "recipe_names", "refuse_errors",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a public name on first access.

    The engine process imports its limits from this package and needs no pydantic; importing pydantic would cost 0.1 s
    of CPU at every start.
    """
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
