"""The run directory: where it is, what it is called, and the two files that say what was run."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from trtx.bench.files import write_text
from trtx.errors import UsageError
from trtx.experiment.spec import ExperimentSpec

LOCK_FILE = "run.lock.yaml"
PLAN_FILE = "plan.json"
ENVIRONMENT_FILE = "env.json"
SCHEMA_VERSION = 1


def create(parent: Path, spec: ExperimentSpec, started_at: datetime) -> Path:
    """Makes ``<parent>/<utc>-<name>-<hash8>``, which did not exist; the hash is of what was asked. Or UsageError."""
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode()).hexdigest()[:8]
    base = f"{started_at.astimezone(UTC):%Y%m%dT%H%M%SZ}-{spec.name}-{digest}"
    attempt = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / (base if attempt == 1 else f"{base}-{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                attempt += 1
            else:
                return path.absolute()
    except OSError as error:
        raise UsageError(
            f"no run directory can be made in {str(parent)!r} ({error.strerror}); "
            "expected a directory that you can write to; name another with -o"
        ) from error


def write_lock(run_dir: Path, spec: ExperimentSpec) -> None:
    """``run.lock.yaml``: the spec after defaults, and the loads that it led to."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **spec.to_json()}
    write_text(run_dir / LOCK_FILE, yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
