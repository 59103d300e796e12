"""The child that quantizes: ``python -m trtx.build.quantize <fd>``, with a :class:`Job` as JSON on stdin.

ModelOpt takes 20 to 35 s to import and runs for minutes: in a process of its own it can be ended at any time, and its
crash is a sentence. It writes a line of JSON for each step of progress on ``fd``, and last what went wrong, if
anything did. The kernel ends it with its parent.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.build.calibration import MAX_TOKENS, Entry
from trtx.build.formats import FORMATS
from trtx.build.progress import Phase
from trtx.build.store import is_disk_full
from trtx.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
Tell = Callable[[Phase, int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """``source``, ``output``: directories. ``device``: torch's name of it. ``dtype``: the model's, such as bfloat16."""

    source: str
    output: str
    form: str
    kv_dtype: str
    device: str
    dtype: str
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = Job(**json.load(sys.stdin))
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as events:

        def tell(phase: Phase, done: int = 0, total: int = 0) -> None:
            events.write(json.dumps({"phase": phase, "done": done, "total": total}) + "\n")

        try:
            quantize(job, tell)
        except Exception as error:
            traceback.print_exc()
            kind = "disk-full" if is_disk_full(error) else "usage" if isinstance(error, UsageError) else "crash"
            text = str(error) if kind == "usage" else f"{type(error).__name__}: {error}"
            events.write(json.dumps({"error": kind, "text": text}) + "\n")
            sys.exit(1)


def quantize(job: Job, tell: Tell) -> None:
    """Writes the quantized weights in Hugging Face form, as TensorRT-LLM loads them, to ``job.output``."""
    import torch

    if job.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"this PyTorch ({torch.__version__}) has no CUDA for the GPU here; install a CUDA build of it")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoTokenizer

    tell("loading", 0, 0)
    model = _load(job)
    tokenizer = AutoTokenizer.from_pretrained(job.source)
    rows = [ids for entry in job.entries if len(ids := _encode(tokenizer, entry))]
    form = FORMATS[job.form]
    recipe = copy.deepcopy(getattr(mtq, form.recipe))
    if job.kv_dtype == "fp8":
        recipe["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])  # later entries win
    total = form.passes * len(rows)
    done = 0

    def calibrate(calibrated: Any) -> None:
        nonlocal done
        for ids in rows:
            calibrated(input_ids=torch.tensor([ids], device=job.device), use_cache=False)
            done += 1
            tell("calibrating", done, max(total, done))

    tell("calibrating", 0, total)
    with torch.no_grad():
        model = mtq.quantize(model, recipe, calibrate)
    tell("exporting", 0, 0)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=job.output)


def _load(job: Job) -> Any:
    """The transformers model on its device, with the very weights that the embedded engine serves."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from trtx.torch_engine.runner.weights import named_tensors

    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.source), dtype=dtype)
    model.tie_weights()
    empty: dict[str, Tensor] = dict(model.named_parameters())  # a tied head is there once, as the embedding
    with torch.no_grad():
        for name, value in named_tensors(Path(job.source), device=device, dtype=dtype):
            empty.pop(name).copy_(value)
    assert not empty, f"no values for {sorted(empty)[:3]}"
    return model.eval()


def _encode(tokenizer: Any, entry: Entry) -> list[int]:
    """Token ids of one text, at most ``MAX_TOKENS``."""
    if isinstance(entry, str):
        ids: list[int] = tokenizer(entry).input_ids
    elif tokenizer.chat_template is None:
        ids = tokenizer("\n".join(message["content"] for message in entry)).input_ids
    else:
        try:
            text = tokenizer.apply_chat_template(entry, tokenize=False)
        except Exception as error:  # whatever a template raises: jinja2's own errors are not all of them
            raise UsageError(
                f"the model's chat template refuses the calibration text {entry!r:.80}: {error}"
            ) from error
        ids = tokenizer(text, add_special_tokens=False).input_ids
    return ids[:MAX_TOKENS]


if __name__ == "__main__":
    main()
