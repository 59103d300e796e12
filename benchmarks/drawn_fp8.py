"""Makes an FP8 checkpoint whose weights are drawn when they are loaded, for the other benchmarks. Needs no network.

    python benchmarks/drawn_fp8.py --model synthetic:qwen3-8b --format FP8_BLOCK_SCALES /tmp/qwen3-8b-blocks
    python benchmarks/engine_decode.py --model /tmp/qwen3-8b-blocks

The directory has the files of the synthetic shape, and a quantization config as ModelOpt writes it. FP8_BLOCK_SCALES
is what Qwen's FP8 checkpoints have, FP8_PER_CHANNEL_PER_TOKEN what Red Hat's FP8-dynamic ones have, FP8 what
``trtx build --quant fp8`` writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.experts import EXPERT_FORMATS
from trtx.checkpoint.quantization import MODELOPT_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="is written; must not exist")
    parser.add_argument("--model", default="synthetic:qwen3-8b", help="a synthetic shape without stored weights")
    parser.add_argument("--format", choices=EXPERT_FORMATS, default="FP8_BLOCK_SCALES")
    options = parser.parse_args()
    source = Path(resolve_checkpoint(options.model, on_gpu=True).path)
    if any(source.glob("*.safetensors")):
        parser.error(f"{options.model} has stored weights; give a large shape, such as synthetic:qwen3-8b")
    shutil.copytree(source, options.directory)
    quantization = {"quant_algo": options.format, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "drawn_fp8.py"}, "quantization": quantization})
    (options.directory / MODELOPT_FILE).write_text(text)
    print(options.directory)


if __name__ == "__main__":
    main()
