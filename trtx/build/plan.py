"""Plans a build: checks the request and identifies all inputs before anything is written."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtx.build.calibration import MAX_TOKENS, Calibration, built_in, read_calibration
from trtx.build.formats import FORMATS, NO_FORMAT, check_gpu, check_model
from trtx.build.manifest import code_hash, key_of, tool_versions
from trtx.build.source import Source, read_source
from trtx.build.tensorrt import check_backend
from trtx.checkpoint import read_model_config
from trtx.config import (
    ModelFacts,
    ResolvedEngineConfig,
    Role,
    check_engine_configs,
    config_family,
    load_engine_config,
    refuse_errors,
)
from trtx.config.left_out import left_out_messages, without_left_out
from trtx.engine import installed_version
from trtx.errors import UnsupportedModel, UsageError
from trtx.memory import MemoryDevice


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A requested build.

    ``here``: the GPU that quantizes and proves. ``target``: the GPU that will serve. None: a CPU.
    """

    model: str
    form: str  # a key of FORMATS, or NO_FORMAT
    output: Path  # the parent of the build's directory
    backend: Literal["pytorch", "tensorrt"] = "pytorch"
    kv_dtype: str = "auto"
    calibration: Path | None = None  # None: the built-in set
    calibration_size: int = 128
    roles: tuple[Role, ...] = ("agg", "prefill", "decode")
    engine_configs: Mapping[Role, Path] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    trtllm_version: str | None = None  # for the check of the engine configs; None: installed, or as they state
    max_ppl_increase: float | None = None
    here: MemoryDevice | None = None
    target: MemoryDevice | None = None

    @property
    def device(self) -> str:
        """The torch device that quantizes the model."""
        return "cpu" if self.here is None else "cuda"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A request with all its inputs resolved.

    ``calibration``: None if the build needs no calibration. ``inputs``: everything that determines the build's bytes,
    as stored in the manifest.
    """

    request: BuildRequest
    source: Source
    calibration: Calibration | None
    configs: Mapping[Role, ResolvedEngineConfig]
    inputs: dict[str, Any]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Messages about the config fields that the build's engine does not act on.

        The build's configs contain these fields nevertheless, for engines that do.
        """
        engine, on_gpu = _engine_of(self.request), self.request.target is not None
        fields = [one for config in self.configs.values() for one in without_left_out(config, engine, on_gpu=on_gpu)[1]]
        return left_out_messages(fields, engine)

    @property
    def key(self) -> str:
        return key_of(self.inputs)

    @property
    def target(self) -> Path:
        """The build's directory."""
        model = self.source.checkpoint.served_model_name.replace("/", "--")
        return self.request.output / f"{model}-{self.request.form}-{self.key[:8]}"

    @property
    def built_on(self) -> str:
        return "CPU" if self.request.here is None else self.request.here.name

    @property
    def built_for(self) -> str:
        return "CPU" if self.request.target is None else self.request.target.name


def plan_build(request: BuildRequest) -> BuildPlan:
    """Finds and hashes the model, reads the calibration text and resolves the engine configs; writes nothing.

    Raises UsageError for a request that can't be built.
    """
    source = read_source(request.model, on_gpu=request.here is not None)
    calibration = _check(request, source)
    configs = _engine_configs(request, source)
    return BuildPlan(request, source, calibration, configs, _inputs(request, source, calibration, configs))


def _check(request: BuildRequest, source: Source) -> Calibration | None:
    """Refuses a request that can't be built; returns the calibration text, or None if none is needed."""
    if request.backend == "tensorrt":
        check_backend(installed_version(), gpu=request.here, source=source, roles=request.roles)
    if request.form == NO_FORMAT:
        return None
    form = FORMATS[request.form]
    if request.target is not None:
        check_gpu(form, request.target)
    if request.backend == "pytorch" and not source.config.get("quantization_config"):
        try:  # the embedded engine calibrates and proves, so a model that it refuses can't be built
            config = read_model_config(source.path)
        except UnsupportedModel as error:  # its message advises about serving; add advice about building
            raise UnsupportedModel(
                f"{error}; trtx build quantizes and proves with the torch engine alone, so build with --quant "
                f"{NO_FORMAT} and serve that with trtx serve --engine tensorrt-llm"
            ) from error
        if config.experts is not None and form.algorithm not in config.experts.formats:
            loaded = [name for name, other in FORMATS.items() if other.algorithm in config.experts.formats]
            raise UnsupportedModel(
                f"{source.name} is a mixture of experts, and the torch engine loads no experts in {form.algorithm}; "
                f"choose --quant {' or '.join([*loaded, NO_FORMAT])}"
            )
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
    """Loads the engine configs, applies the overrides and checks the rules. On a GPU, TensorRT-LLM will use them."""
    kv = () if request.kv_dtype == "auto" else (f"kv_cache_config.dtype={request.kv_dtype}",)
    facts = source.checkpoint
    engine = _engine_of(request)
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


def _engine_of(request: BuildRequest) -> str:
    return "torch" if request.target is None else "tensorrt-llm"


def _inputs(
    request: BuildRequest,
    source: Source,
    calibration: Calibration | None,
    configs: Mapping[Role, ResolvedEngineConfig],
) -> dict[str, Any]:
    """Returns everything that determines the bytes of a build."""
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
        # An engine of the TensorRT backend runs only on the GPU type that it was built on.
        "device": request.device if request.backend == "pytorch" or request.here is None else request.here.name,
        "versions": tool_versions(),
        "code_sha256": code_hash("quantize", "contents", "tensorrt"),
        "engine_configs": {role: config.values for role, config in configs.items()},
    }
