"""Performs a build: from a request to a directory that can be served, with its proof."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trtx.build import contents
from trtx.build.calibration import Calibration
from trtx.build.child import DiskFullError, run_child
from trtx.build.formats import NO_FORMAT
from trtx.build.manifest import SCHEMA_VERSION, Manifest, read_manifest
from trtx.build.plan import BuildPlan, BuildRequest, plan_build
from trtx.build.progress import BuildProgress, Clock, Listener
from trtx.build.proof import Proof, judge, prove
from trtx.build.quantize import QuantizeJob
from trtx.build.store import Partial, check_space, is_disk_full, no_space, partial_directory
from trtx.build.tensorrt import EngineJob
from trtx.checkpoint import read_model_config
from trtx.errors import LaunchError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build. ``is_new``: False if it already existed. ``left_out``: see :attr:`BuildPlan.left_out`."""

    directory: Path
    manifest: Manifest
    is_new: bool
    left_out: tuple[str, ...]


def build(request: BuildRequest, *, on_progress: Listener) -> Build:
    """Makes the build, or returns the finished build of the same inputs.

    Raises UsageError for a request that can't be built and for a full disk, and LaunchError if the quantizer or the
    engine of the proof crashes. No error leaves an incomplete build behind. If the build exceeds ``max_ppl_increase``,
    no error is raised, and ``manifest.gate`` records it.
    """
    plan = plan_build(request)
    with partial_directory(plan.target, on_wait=lambda: on_progress(BuildProgress("waiting"))) as partial:
        if partial is not None:
            with _naming_a_full_disk(plan):
                _make(plan, partial, on_progress)
                partial.publish()
    manifest = read_manifest(plan.target)
    gate = judge(manifest.proof, request.max_ppl_increase)
    if gate is not None and gate != manifest.gate:
        manifest = replace(manifest, gate=gate)
        manifest.write(plan.target)
    return Build(plan.target, manifest, is_new=partial is not None, left_out=plan.left_out)


def _make(plan: BuildPlan, partial: Partial, on_progress: Listener) -> None:
    """Fills ``partial`` with all files of the build, including proof and manifest."""
    clock, source, directory = Clock(on_progress), plan.source, partial.path
    check_space(plan.request.output, contents.bytes_needed(source, plan.request.form))
    if plan.request.backend == "tensorrt":
        _build_engine(plan, partial, clock)
    elif plan.calibration is None:
        contents.take_over(source, directory)
    else:
        _quantize(plan, plan.calibration, partial, clock)
    contents.write_engine_configs(plan.configs.values(), directory, built_for=plan.built_for)
    proof, unproved = _prove(plan, partial, clock)
    Manifest(
        schema_version=SCHEMA_VERSION,
        name=plan.target.name,
        key=plan.key,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        inputs=plan.inputs,
        source={"name": source.name, "revision": source.revision},
        built_on=plan.built_on,
        built_for=plan.built_for,
        weight_bytes={"source": source.checkpoint.weight_bytes, "result": contents.weight_bytes(source, directory)},
        seconds=clock.seconds,
        proof=proof,
        unproved=unproved,
        gate=judge(proof, plan.request.max_ppl_increase),
    ).write(directory)


def _quantize(plan: BuildPlan, calibration: Calibration, partial: Partial, on_progress: Listener) -> None:
    job = QuantizeJob(
        source=str(plan.source.path),
        output=str(partial.path),
        form=plan.request.form,
        kv_dtype=plan.request.kv_dtype,
        device=plan.request.device,
        dtype=plan.source.checkpoint.dtype,
        entries=calibration.entries,
    )
    _run("quantize", job, partial, on_progress)
    contents.complete_export(plan.source, partial.path)


def _build_engine(plan: BuildPlan, partial: Partial, on_progress: Listener) -> None:
    (config,) = plan.configs.values()
    job = EngineJob(
        source=str(plan.source.path),
        output=str(partial.path),
        form=plan.request.form,
        kv_dtype=plan.request.kv_dtype,
        values=config.values,
        entries=plan.calibration.entries if plan.calibration else (),
    )
    _run("tensorrt", job, partial, on_progress)
    contents.complete_engine(plan.source, partial.path)


def _run(kind: str, job: QuantizeJob | EngineJob, partial: Partial, on_progress: Listener) -> None:
    """Runs a job in a child process. Its log moves into the build; after a crash it stays next to the build."""
    log = partial.target.with_name(f"{partial.target.name}.log")
    on_progress(BuildProgress("starting"))
    try:
        run_child(kind, job, log=log, lock_fd=partial.lock_fd, on_progress=on_progress)
        log.rename(partial.path / "build.log")
    except LaunchError:
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise


def _prove(plan: BuildPlan, partial: Partial, on_progress: Listener) -> tuple[Proof | None, str | None]:
    """Returns the proof, or the reason why there is none.

    Unquantized weights need no proof if the embedded engine can't run the model but finds no error in it. Raises
    UsageError for an inconsistent checkpoint.
    """
    if plan.request.backend == "tensorrt":
        return None, "the embedded engine runs no engines of the TensorRT backend"
    try:
        read_model_config(plan.source.path)  # errors of the engine's process always arrive as UsageError
        proof = prove(
            plan.source.path,
            partial.path,
            kv_dtype=plan.request.kv_dtype,
            on_step=lambda done, total: on_progress(BuildProgress("proving", done, total)),
        )
    except UnsupportedModel as error:
        if plan.request.form != NO_FORMAT:
            raise
        return None, str(error)
    return proof, None


@contextlib.contextmanager
def _naming_a_full_disk(plan: BuildPlan) -> Iterator[None]:
    try:
        yield
    except (OSError, DiskFullError) as error:
        if isinstance(error, DiskFullError) or is_disk_full(error):
            raise no_space(plan.request.output, contents.bytes_needed(plan.source, plan.request.form)) from error
        raise
