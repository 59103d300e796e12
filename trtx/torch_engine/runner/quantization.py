"""Which quantization a checkpoint says it has: ModelOpt's unified Hugging Face export, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtx.errors import UsageError

ALGORITHMS = ("FP8", "W4A16_AWQ", "NVFP4", "W8A8_SQ_PER_CHANNEL")
"""``quant_algo`` of ModelOpt 0.47, as ``trtx build --quant fp8|int4_awq|nvfp4|int8_sq`` writes them."""

_AWQ_GROUP = 128


@dataclass(frozen=True, slots=True)
class Quantization:
    """What ``hf_quant_config.json`` says; ``algorithm`` and ``kv_cache_algorithm`` are None where nothing is quantized.

    ``excluded``: module names in full precision, with shell wildcards. ``source``: the file, for errors.
    """

    algorithm: str | None
    kv_cache_algorithm: str | None
    excluded: tuple[str, ...]
    group_size: int
    source: str

    def covers(self, module: str) -> bool:
        """Whether the linear module of that Hugging Face name is quantized."""
        return self.algorithm is not None and not any(fnmatchcase(module, pattern) for pattern in self.excluded)


def read_quantization(model_dir: Path, config: Mapping[str, Any]) -> Quantization | None:
    """From ``hf_quant_config.json``, else from ``config`` (config.json's content); None: an unquantized checkpoint.

    Raises UsageError for every format but the four of :data:`ALGORITHMS`.
    """
    path = model_dir / "hf_quant_config.json"
    embedded = config.get("quantization_config")
    if path.is_file():
        try:
            found = json.loads(path.read_text())["quantization"]
            return _parsed(found, found.get("exclude_modules"), found.get("kv_cache_quant_algo"), str(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not ModelOpt's quantization config ({error!r}); export it again") from error
    if not embedded:
        return None
    source = f"quantization_config in {model_dir / 'config.json'}"
    if not isinstance(embedded, Mapping) or embedded.get("quant_method") != "modelopt":
        method = embedded.get("quant_method") if isinstance(embedded, Mapping) else embedded
        blocks = " with block scales" if isinstance(embedded, Mapping) and embedded.get("weight_block_size") else ""
        raise _refused(f"{method}{blocks}", source)
    scheme = embedded.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return _parsed(embedded, embedded.get("ignore"), "FP8" if is_fp8 else scheme, source)


def _parsed(found: Mapping[str, Any], excluded: list[str] | None, kv_cache: Any, source: str) -> Quantization:
    algorithm = found.get("quant_algo")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise _refused(str(algorithm), source)
    return Quantization(
        algorithm=algorithm,
        kv_cache_algorithm=str(kv_cache) if kv_cache else None,
        excluded=tuple(excluded or ()),
        group_size=int(found.get("group_size") or _AWQ_GROUP),
        source=source,
    )


def _refused(what: str, source: str) -> UsageError:
    return UsageError(
        f"{source}: the torch engine does not load {what} weights; expected a ModelOpt export in "
        f"{', '.join(ALGORITHMS)}: quantize the original checkpoint with trtx build, or use --engine tensorrt-llm"
    )
