"""``build``: from what was asked for to a directory that serves, and a proof of it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from trtx.build import contents
from trtx.build.calibration import MAX_TOKENS, Calibration, built_in, read_calibration
from trtx.build.child import DiskFullError, run_child
from trtx.build.formats import FORMATS, NO_FORMAT, check_gpu, check_model
from trtx.build.manifest import SCHEMA_VERSION, Manifest, code_hash, key_of, read_manifest, tool_versions
from trtx.build.progress import Clock, Listener, Progress
from trtx.build.proof import Proof, prove
from trtx.build.quantize import Job
from trtx.build.source import Source, read_source
from trtx.build.store import Partial, check_space, is_disk_full, no_space, partial_directory
from trtx.build.tensorrt import EngineJob, check_backend
from trtx.config import (
    ModelFacts,
    ResolvedEngineConfig,
    Role,
    check_engine_configs,
    config_family,
    load_engine_config,
    refuse_errors,
)
from trtx.engine import installed_version
from trtx.errors import LaunchError, UsageError
from trtx.memory import Device


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What was asked for. ``here``: the GPU to quantize and prove on; ``target``: the one to serve on; None: a CPU."""

    model: str
    form: str  # a key of FORMATS, or NO_FORMAT
    output: Path  # parent of the build
    backend: Literal["pytorch", "tensorrt"] = "pytorch"
    kv_dtype: str = "auto"
    calibration: Path | None = None  # None: the built-in set
    calibration_size: int = 128
    roles: tuple[Role, ...] = ("agg", "prefill", "decode")
    engine_configs: Mapping[Role, Path] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    trtllm_version: str | None = None  # to check the engine configs for; None: the one installed, or what they name
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
    if request.backend == "tensorrt":
        check_backend(installed_version(), gpu=request.here, source=source, roles=request.roles)
    if request.form == NO_FORMAT:
        return None
    form = FORMATS[request.form]
    if request.target is not None:
        check_gpu(form, request.target)
    check_model(form, source.config, name=source.name)
    if request.backend == "pytorch" and importlib.util.find_spec("modelopt") is None:
        raise UsageError(
            f"--quant {form.name} needs NVIDIA ModelOpt, which is not installed; "
            "run pip install 'trtx[quantize]', or choose --quant none"
        )
    if request.calibration is None:
        return built_in(request.calibration_size)
    return read_calibration(request.calibration, request.calibration_size)


def _engine_configs(request: BuildRequest, source: Source) -> dict[Role, ResolvedEngineConfig]:
    """Loaded, overlaid and checked against the rules. For a GPU, TensorRT-LLM will read them."""
    kv = () if request.kv_dtype == "auto" else (f"kv_cache_config.dtype={request.kv_dtype}",)
    facts = source.checkpoint
    engine = "torch" if request.target is None else "tensorrt-llm"
    configs = {
        role: load_engine_config(
            role,
            family=config_family(facts.architecture, on_gpu=request.target is not None),
            path=request.engine_configs.get(role),
            overrides=(*kv, *request.overrides),
            engine=engine,
        )
        for role in request.roles
    }
    findings = check_engine_configs(
        configs,
        engine=engine,
        version=request.trtllm_version or installed_version(),
        model=ModelFacts(facts.architecture, facts.context_length),
        gpus=() if request.target is None else (request.target.name,),
    )
    refuse_errors(findings)
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
        "backend": request.backend,
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
        # An engine of the TensorRT backend runs on the kind of GPU that it was built on alone.
        "device": _device(request) if request.backend == "pytorch" or request.here is None else request.here.name,
        "versions": tool_versions(),
        "code_sha256": code_hash("quantize", "contents", "tensorrt"),
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
    clock = Clock(on_progress)
    built_for = request.target.name if request.target else "CPU"
    check_space(request.output, contents.bytes_needed(source, request.form))
    proof = None
    if request.backend == "tensorrt":
        _build_engine(partial, request, source, calibration, next(iter(configs.values())), clock)
    elif calibration is None:
        contents.take_over(source, partial.path)
    else:
        _quantize(partial, request, source, calibration, clock)
    contents.write_engine_configs(configs.values(), partial.path, built_for=built_for)
    if request.backend == "pytorch":
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
    job = Job(
        source=str(source.path),
        output=str(partial.path),
        form=request.form,
        kv_dtype=request.kv_dtype,
        device=_device(request),
        dtype=source.checkpoint.dtype,
        entries=calibration.entries,
    )
    _run("quantize", job, partial, on_progress)
    contents.complete_export(source, partial.path)


def _build_engine(
    partial: Partial,
    request: BuildRequest,
    source: Source,
    calibration: Calibration | None,
    config: ResolvedEngineConfig,
    on_progress: Listener,
) -> None:
    job = EngineJob(
        source=str(source.path),
        output=str(partial.path),
        form=request.form,
        kv_dtype=request.kv_dtype,
        values=config.values,
        entries=calibration.entries if calibration else (),
    )
    _run("tensorrt", job, partial, on_progress)
    contents.complete_engine(source, partial.path)


def _run(kind: str, job: Job | EngineJob, partial: Partial, on_progress: Listener) -> None:
    """In a child. Its log ends up in the build, or beside it where the child crashed."""
    log = partial.target.with_name(f"{partial.target.name}.log")
    on_progress(Progress("starting"))
    try:
        run_child(kind, job, log=log, lock_fd=partial.lock_fd, on_progress=on_progress)
        log.rename(partial.path / "build.log")
    except LaunchError:
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        raise


def _device(request: BuildRequest) -> str:
    return "cpu" if request.here is None else "cuda"


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
