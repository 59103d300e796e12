"""Engine configs as ``trtx serve`` resolves them, one role at a time."""

from __future__ import annotations

from pathlib import Path

from trtx.config import ResolvedEngineConfig, Role, check_engine_configs, load_engine_config, refuse_errors


def resolve(
    role: Role = "agg", *overrides: str, family: str = "none", path: Path | None = None, engine: str = "torch"
) -> ResolvedEngineConfig:
    """Raises UsageError, which lists every error."""
    config = load_engine_config(role, family=family, path=path, overrides=overrides, engine=engine)
    refuse_errors(check_engine_configs({role: config}, engine=engine))
    return config
