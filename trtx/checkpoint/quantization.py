"""Reads a checkpoint's quantization config: ModelOpt's file, or ``quantization_config`` in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import CONFIG, Fields, read_object, shown, shown_name
from trtx.checkpoint.exclusions import exclusion
from trtx.checkpoint.formats import AWQ_GROUP, FORMATS, FP8_BLOCK, LOADED, METHODS, Loading, TensorSpec
from trtx.checkpoint.fp8_configs import COMPRESSED, algorithm_of, check_fp8_config, excluded_field
from trtx.errors import UnsupportedModel, UsageError

MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT = "modelopt"
_INVERSE = "weight_scale_inv"
_IN_SMALL_LETTERS = "fp8_pb_wo"  # ModelOpt 0.47 writes all other names in capitals


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint.

    ``method``: the exporter, "modelopt" or another ``quant_method``. ``algorithm``: the name of TensorRT-LLM's
    QuantAlgo, or the method's own name if there is none; None: full precision. ``kv_cache_algorithm``: the algorithm of
    the KV cache if it was calibrated. ``excluded``: the names of modules in full precision, as patterns of ``method``
    (see :func:`trtx.checkpoint.exclusions.exclusion`). ``source``: the file, for error messages.
    """

    method: str
    algorithm: str | None
    kv_cache_algorithm: str | None
    excluded: tuple[str, ...]
    group_size: int
    source: str

    def covers(self, module: str) -> bool:
        """Returns whether the linear module with this Hugging Face name is quantized."""
        return self.algorithm is not None and not exclusion(self.method, self.excluded)(module)

    @property
    def loading(self) -> Loading:
        """How the torch engine loads the format. :func:`check_loadable` must have passed, with a quantized module."""
        return LOADED[str(self.algorithm)]

    def stored(self, rows: int, columns: int) -> dict[str, TensorSpec]:
        """Returns the stored tensors of a quantized linear module, by suffix. The algorithm must be in FORMATS."""
        tensors = FORMATS[str(self.algorithm)].layout(rows, columns, self.group_size)
        if self.method == COMPRESSED and _INVERSE in tensors:  # it has the same scales by another name
            tensors["weight_scale"] = tensors.pop(_INVERSE)
        return tensors


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
    source = f"quantization_config in {file}"
    method = Fields(stated, source).word("quant_method", "a name") if stated.get("quant_method") else "unnamed"
    excluded = excluded_field(method, stated) or next((name for name in names if stated.get(name)), names[0])
    return _parsed(stated, source, method, excluded=excluded)


def check_loadable(found: Quantization | None, directory: Path, config: Mapping[str, Any]) -> None:
    """Raises UsageError unless the torch engine loads the format.

    It loads ModelOpt's exports in the formats in LOADED, and the FP8 checkpoints of :mod:`trtx.checkpoint.fp8_configs`.
    """
    if found is None:
        return
    stated = config.get("quantization_config")
    if isinstance(stated, Mapping) and algorithm_of(found.method, stated):
        check_fp8_config(found.method, Fields(stated, found.source))
    elif found.method != _MODELOPT or found.algorithm not in (None, *LOADED):
        name = str(found.algorithm) if found.method == _MODELOPT else found.method
        raise UnsupportedModel(
            f"{found.source}: the torch engine does not load {shown_name(name)} weights; expected a ModelOpt export in "
            f"{', '.join(LOADED)}, or FP8 weights as Qwen and Red Hat publish them: quantize the original checkpoint "
            "with trtx build, or serve it with the engine tensorrt-llm"
        )
    elif found.algorithm is not None and FORMATS[found.algorithm].is_blocked and found.group_size != FP8_BLOCK:
        raise UnsupportedModel(
            f"{found.source}: group_size is {found.group_size}; expected {FP8_BLOCK}, the only size of blocks in "
            f"{found.algorithm} that the torch engine computes"
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
        name = fields.word("quant_algo", "the name of an algorithm")
        return name.upper() if name == _IN_SMALL_LETTERS else name
    if method == _MODELOPT:
        return None
    return algorithm_of(method, fields.values) or METHODS.get(method, method)


def _kv_cache(fields: Fields) -> str | None:
    """Returns the KV cache algorithm: ModelOpt's file names it, config.json has a scheme, in practice only float8."""
    scheme = fields.values.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
        return "FP8"
    if scheme:
        return shown_name(scheme) if isinstance(scheme, str) else shown(scheme)
    return fields.word("kv_cache_quant_algo", "the name of an algorithm") if fields.has("kv_cache_quant_algo") else None
