"""``build``: from what was asked for to a directory that serves, and a proof of it."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trtx.build import contents
from trtx.build.calibration import MAX_TOKENS, Calibration, built_in, read_calibration
from trtx.build.child import DiskFullError, run_child
from trtx.build.formats import FORMATS, NO_FORMAT, check_gpu, check_model
from trtx.build.manifest import SCHEMA_VERSION, Manifest, key_of, read_manifest, tool_versions
from trtx.build.progress import Listener, Progress
from trtx.build.proof import Proof, prove
from trtx.build.quantize import Job
from trtx.build.source import Source, read_source
from trtx.build.store import Partial, check_space, is_disk_full, no_space, partial_directory
from trtx.config import ResolvedEngineConfig, Role, check_pair, config_family, resolve_engine_config
from trtx.errors import LaunchError, UsageError
from trtx.memory import Device


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What was asked for. ``here``: the GPU to quantize and prove on; ``target``: the one to serve on; None: a CPU."""

    model: str
    form: str  # a key of FORMATS, or NO_FORMAT
    output: Path  # parent of the build
    kv_dtype: str = "auto"
    calibration: Path | None = None  # None: the built-in set
    calibration_size: int = 128
    roles: tuple[Role, ...] = ("agg", "prefill", "decode")
    engine_configs: Mapping[Role, Path] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    max_ppl_increase: float | None = None
    here: Device | None = None
    target: Device | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build. ``is_new``: made now, not found."""

    directory: Path
    manifest: Manifest
    is_new: bool


def build(request: BuildRequest, *, on_progress: Listener) -> Build:
    """Makes the build, or finds the finished one of the same inputs.

    Raises UsageError for what can't be built, and for a full disk; LaunchError where the quantizer or the engine of
    the proof crashed. Whatever is raised, no half build is left. A missed ``max_ppl_increase`` raises nothing:
    ``manifest.gate`` says it.
    """
    source = read_source(request.model, on_gpu=request.here is not None)
    calibration = _check(request, source)
    configs = _engine_configs(request, source)
    inputs = _inputs(request, source, calibration, configs)
    name = f"{source.checkpoint.served_model_name.replace('/', '--')}-{request.form}-{key_of(inputs)[:8]}"
    target = request.output / name
    with partial_directory(target, on_wait=lambda: on_progress(Progress("waiting"))) as partial:
        if partial is not None:
            with _naming_a_full_disk(request, source):
                _make(partial, request, source, calibration, configs, inputs, on_progress)
                partial.publish()
    manifest = read_manifest(target)
    gate = _gate(manifest.proof, request.max_ppl_increase)
    if gate is not None and gate != manifest.gate:
        manifest = replace(manifest, gate=gate)
        manifest.write(target)
    return Build(target, manifest, is_new=partial is not None)


def _check(request: BuildRequest, source: Source) -> Calibration | None:
    """Refuses what can't be built, before anything is made. The calibration text; None where nothing is calibrated."""
    if request.form == NO_FORMAT:
        return None
    form = FORMATS[request.form]
    if request.target is not None:
        check_gpu(form, request.target)
    check_model(form, source.config, name=source.name)
    if importlib.util.find_spec("modelopt") is None:
        raise UsageError(
            f"--quant {form.name} needs NVIDIA ModelOpt, which is not installed; "
            "run pip install 'trtx[quantize]', or choose --quant none"
        )
    if request.calibration is None:
        return built_in(request.calibration_size)
    return read_calibration(request.calibration, request.calibration_size)


def _engine_configs(request: BuildRequest, source: Source) -> dict[Role, ResolvedEngineConfig]:
    kv = () if request.kv_dtype == "auto" else (f"kv_cache_config.dtype={request.kv_dtype}",)
    family = config_family(source.checkpoint.architecture, on_gpu=request.target is not None)
    configs = {
        role: resolve_engine_config(
            role,
            family=family,
            path=request.engine_configs.get(role),
            overrides=(*kv, *request.overrides),
            engine="tensorrt-llm",
        )
        for role in request.roles
    }
    if "prefill" in configs and "decode" in configs:
        check_pair(configs["prefill"], configs["decode"])
    return configs


def _inputs(
    request: BuildRequest,
    source: Source,
    calibration: Calibration | None,
    configs: Mapping[Role, ResolvedEngineConfig],
) -> dict[str, Any]:
    """Everything that decides the bytes of a build."""
    return {
        "weights_sha256": source.weights_hash,
        "files_sha256": source.files_hash,
        "format": request.form,
        "kv_dtype": request.kv_dtype,
        "recipe": None if request.form == NO_FORMAT else FORMATS[request.form].recipe,
        "calibration": calibration
        and {
            "source": calibration.source,
            "entries": len(calibration.entries),
            "max_tokens": MAX_TOKENS,
            "sha256": calibration.digest,
        },
        "device": "cpu" if request.here is None else "cuda",
        "versions": tool_versions(),
        "engine_configs": {role: config.values for role, config in configs.items()},
    }


def _make(
    partial: Partial,
    request: BuildRequest,
    source: Source,
    calibration: Calibration | None,
    configs: Mapping[Role, ResolvedEngineConfig],
    inputs: dict[str, Any],
    on_progress: Listener,
) -> None:
    """Fills ``partial`` with everything, proof and manifest included."""
    clock = _Clock(on_progress)
    built_for = request.target.name if request.target else "CPU"
    check_space(partial.path, contents.bytes_needed(source, request.form))
    if calibration is None:
        contents.take_over(source, partial.path)
    else:
        _quantize(partial, request, source, calibration, clock)
        contents.complete_export(source, partial.path)
    contents.write_engine_configs(configs.values(), partial.path, built_for=built_for)
    proof = prove(
        source.path,
        partial.path,
        kv_dtype=request.kv_dtype,
        on_step=lambda done, total: clock(Progress("proving", done, total)),
    )
    Manifest(
        schema_version=SCHEMA_VERSION,
        name=partial.target.name,
        key=key_of(inputs),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        inputs=inputs,
        source={"name": source.name, "revision": source.revision},
        built_on=request.here.name if request.here else "CPU",
        built_for=built_for,
        weight_bytes={
            "source": source.checkpoint.weight_bytes,
            "result": contents.weight_bytes(source, partial.path),
        },
        seconds=clock.seconds,
        proof=proof,
        gate=_gate(proof, request.max_ppl_increase),
    ).write(partial.path)


def _quantize(
    partial: Partial, request: BuildRequest, source: Source, calibration: Calibration, on_progress: Listener
) -> None:
    """In a child. Its log ends up in the build, and beside it where the child crashed."""
    job = Job(
        source=str(source.path),
        output=str(partial.path),
        form=request.form,
        kv_dtype=request.kv_dtype,
        device="cpu" if request.here is None else "cuda",
        dtype=source.checkpoint.dtype,
        entries=calibration.entries,
    )
    log = partial.target.with_name(f"{partial.target.name}.log")
    on_progress(Progress("starting"))
    try:
        run_child("trtx.build.quantize", job.to_json(), log=log, lock_fd=partial.lock_fd, on_progress=on_progress)
        log.rename(partial.path / "build.log")
    except LaunchError:
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise


def _gate(proof: Proof | None, limit: float | None) -> dict[str, Any] | None:
    if limit is None or proof is None:
        return None
    return {"max_ppl_increase_pct": limit, "passed": proof.increase_pct <= limit}


@contextlib.contextmanager
def _naming_a_full_disk(request: BuildRequest, source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, DiskFullError) as error:
        if isinstance(error, DiskFullError) or is_disk_full(error):
            raise no_space(request.output, contents.bytes_needed(source, request.form)) from error
        raise


class _Clock:
    """Passes progress on, and adds up how long each phase took."""

    def __init__(self, on_progress: Listener) -> None:
        self._on_progress = on_progress
        self._totals: dict[str, float] = {}
        self._phase: str | None = None
        self._since = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self._close()
            self._phase = progress.phase
        self._on_progress(progress)

    @property
    def seconds(self) -> dict[str, float]:
        self._close()
        return {phase: round(total, 2) for phase, total in self._totals.items()}

    def _close(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._totals[self._phase] = self._totals.get(self._phase, 0.0) + now - self._since
        self._since = now
