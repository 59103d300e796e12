"""Reads a checkpoint's quantization config: ModelOpt's file, or ``quantization_config`` in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import CONFIG, Fields, read_object, shown, shown_name
from trtx.checkpoint.formats import AWQ_GROUP, FORMATS, LOADED, METHODS, Loading, TensorSpec
from trtx.errors import UnsupportedModel, UsageError

MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT = "modelopt"
_FP8_BLOCKS = "FP8_BLOCK_SCALES"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint.

    ``method``: the exporter, "modelopt" or another ``quant_method``. ``algorithm``: the name of TensorRT-LLM's
    QuantAlgo, or the method's own name if there is none; None: full precision. ``kv_cache_algorithm``: the algorithm of
    the KV cache if it was calibrated. ``excluded``: the names of modules in full precision, with shell wildcards.
    ``source``: the file, for error messages.
    """

    method: str
    algorithm: str | None
    kv_cache_algorithm: str | None
    excluded: tuple[str, ...]
    group_size: int
    source: str

    def covers(self, module: str) -> bool:
        """Returns whether the linear module with this Hugging Face name is quantized."""
        return self.algorithm is not None and not any(fnmatchcase(module, pattern) for pattern in self.excluded)

    @property
    def loading(self) -> Loading:
        """How the torch engine loads the format. :func:`check_loadable` must have passed, with a quantized module."""
        return LOADED[str(self.algorithm)]

    def stored(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Returns the stored tensors of a quantized linear module, by suffix. The algorithm must be in FORMATS."""
        return FORMATS[str(self.algorithm)].layout(rows, columns, self.group_size)


def read_quantization(directory: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Reads the quantization from ``hf_quant_config.json``, else from ``config`` (the content of config.json).

    Returns None for an unquantized checkpoint. Formats of any name are accepted; raises UsageError for a config that
    can't be parsed.
    """
    own = read_modelopt_file(directory)
    if own is not None:
        return _parsed(own, str(directory / MODELOPT_FILE), _MODELOPT, excluded="exclude_modules")
    return embedded_quantization(directory, config)


def read_modelopt_file(directory: Path) -> dict[str, Any] | None:
    """Returns the ``quantization`` object of ``hf_quant_config.json``, or None if there is no such file."""
    path = directory / MODELOPT_FILE
    if not path.exists():
        return None
    found = read_object(path, "what ModelOpt exports").get("quantization")
    if not isinstance(found, dict):
        raise UsageError(
            f"{path} is no ModelOpt quantization config: quantization is {shown(found)}; export the checkpoint again"
        )
    return found


def embedded_quantization(directory: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization that config.json itself states, regardless of ``hf_quant_config.json``."""
    stated = config.get("quantization_config")
    if stated is None or stated == {}:
        return None
    file = str(directory / CONFIG)
    if not isinstance(stated, Mapping):
        Fields(config, file).refuse("quantization_config", "an object with quant_method")
    names = ("ignore", "modules_to_not_convert", "exclude_modules")
    excluded = next((name for name in names if stated.get(name)), names[0])
    source = f"quantization_config in {file}"
    method = Fields(stated, source).word("quant_method", "a name") if stated.get("quant_method") else "unnamed"
    return _parsed(stated, source, method, excluded=excluded)


def check_loadable(found: Quantization | None, directory: Path, config: Mapping[str, Any]) -> None:
    """Raises UsageError unless the torch engine loads the format: only ModelOpt exports of formats in LOADED."""
    if found is None:
        return
    known = (None, *LOADED)
    if found.method != _MODELOPT or found.algorithm not in known:
        name = str(found.algorithm) if found.method == _MODELOPT else found.method
        what = shown_name(name) + (" with block scales" if found.algorithm == _FP8_BLOCKS else "")
        raise UnsupportedModel(
            f"{found.source}: the torch engine does not load {what} weights; expected a ModelOpt export in "
            f"{', '.join(LOADED)}: quantize the original checkpoint with trtx build, or serve it with the engine "
            "tensorrt-llm"
        )
    beside = embedded_quantization(directory, config)
    if beside is not None and beside.algorithm != found.algorithm:
        raise UsageError(
            f"{found.source} says {shown(found.algorithm)} and {beside.source} says {shown(beside.algorithm)}; "
            "expected the same in both: export the checkpoint again"
        )


def _parsed(stated: Mapping[str, Any], source: str, method: str, *, excluded: str) -> Quantization:
    fields = Fields(stated, source)
    modules = stated.get(excluded) or []
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        fields.refuse(excluded, "a list of module names")
    return Quantization(
        method=method,
        algorithm=_algorithm(fields, method),
        kv_cache_algorithm=_kv_cache(fields),
        excluded=tuple(modules),
        # Only ModelOpt's group_size is used; other methods differ: for GPTQ, -1 means a whole row.
        group_size=fields.count("group_size", most=1 << 20)
        if method == _MODELOPT and fields.has("group_size")
        else AWQ_GROUP,
        source=source,
    )


def _algorithm(fields: Fields, method: str) -> str | None:
    if fields.has("quant_algo"):
        return fields.word("quant_algo", "the name of an algorithm")
    if method == _MODELOPT:
        return None
    if method == "fp8" and fields.has("weight_block_size"):
        return _FP8_BLOCKS
    return METHODS.get(method, method)


def _kv_cache(fields: Fields) -> str | None:
    """Returns the KV cache algorithm: ModelOpt's file names it, config.json has a scheme, in practice only float8."""
    scheme = fields.values.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "FP8"
    if scheme:
        return shown_name(scheme) if isinstance(scheme, str) else shown(scheme)
    return fields.word("kv_cache_quant_algo", "the name of an algorithm") if fields.has("kv_cache_quant_algo") else None
