"""Names and fields of 1.2's llmapi/llm_utils.py, llmapi/llm_args.py and builder.py that a build passes."""

from dataclasses import dataclass
from enum import StrEnum, auto


class QuantAlgo(StrEnum):
    FP8 = auto()
    NVFP4 = auto()
    W4A16_AWQ = auto()
    W8A8_SQ_PER_CHANNEL = auto()


@dataclass(kw_only=True)
class QuantConfig:
    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: QuantAlgo | None = None


@dataclass(kw_only=True)
class CalibConfig:
    calib_dataset: str = "cnn_dailymail"
    calib_batches: int = 512
    calib_max_seq_length: int = 512


@dataclass(kw_only=True)
class BuildConfig:
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
