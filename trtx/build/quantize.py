"""Quantizes a model with ModelOpt and exports it in the form that TensorRT-LLM loads. Runs in the build's child."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtx.build.calibration import MAX_TOKENS, Entry
from trtx.build.formats import FORMATS
from trtx.build.progress import Tell
from trtx.checkpoint.weight_index import weight_files
from trtx.errors import UsageError
from trtx.garbage import nothing_of_it_is_garbage

if TYPE_CHECKING:
    from torch import Tensor


MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections with the same input, which TensorRT-LLM and the embedded engine merge into one matmul."""


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """A quantization job.

    ``source``, ``output``: directories. ``device``: the torch device. ``dtype``: the model's dtype, such as bfloat16.
    """

    source: str
    output: str
    form: str
    kv_dtype: str
    device: str
    dtype: str
    entries: tuple[Entry, ...]


def quantize(job: QuantizeJob, tell: Tell) -> None:
    """Writes the quantized weights to ``job.output`` in Hugging Face form, as TensorRT-LLM loads them."""
    import torch

    if job.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"this PyTorch ({torch.__version__}) has no CUDA for the GPU here; install a CUDA build of it")
    from trtx.checkpoint.model_config import read_model_config

    read_model_config(Path(job.source))  # refuses an unsupported model before the long import
    with nothing_of_it_is_garbage():
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
        recipe["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])  # later entries take precedence
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
    if job.form == "fp8":
        _share_weight_scales(model)
    _give_zeros_a_scale(model)
    tell("exporting", 0, 0)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=job.output)
    check_numbers(Path(job.output))


def _share_weight_scales(model: Any) -> None:
    """Gives the same FP8 weight scale to projections that engines merge into one matmul.

    ModelOpt's export (0.47) leaves each projection its own scale. TensorRT-LLM's loader (``FP8QDQLinearMethod`` in its
    ``_torch/modules/linear.py``) then rescales the rounded weights to the largest scale and rounds a second time. With
    a shared scale they are rounded once.
    """
    for module in model.modules():
        for names in MERGED:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            quantizers = [part.weight_quantizer for part in parts if hasattr(part, "weight_quantizer")]
            if len(quantizers) == len(names) and all(quantizer.amax is not None for quantizer in quantizers):
                largest = max(float(quantizer.amax) for quantizer in quantizers)
                for quantizer in quantizers:
                    quantizer.amax = largest


def _give_zeros_a_scale(model: Any) -> None:
    """Gives a nonzero scale to tensors in which every value is zero.

    The output projections of layers that block expansion inserted are an example; keys can be zero as well. ModelOpt
    (0.47) gives such a tensor a scale of 0 in FP8 and NVFP4. A division by the scale then gives NaN, in the export or
    when the engine writes its KV cache. With any other scale, zero stays zero.
    """
    for module in model.modules():
        amax = getattr(module, "amax", None) if hasattr(module, "num_bits") else None
        if amax is not None and amax.numel() == 1 and not amax.any():
            module.amax = amax.new_ones(amax.shape)


def check_numbers(export: Path) -> None:
    """Raises UsageError if a tensor of an export has a value that is not finite, or is a scale of 0."""
    import torch
    from safetensors import safe_open

    for path in weight_files(export):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open handle is not a mapping)
                value = file.get_tensor(name)
                if not value.is_floating_point():
                    continue
                # torch does not implement isfinite for all of its 8-bit floats.
                wide = value.to(torch.float32) if value.element_size() == 1 else value
                if not torch.isfinite(wide).all():
                    fault = "values that are not finite numbers"
                elif name.endswith(("scale", "scale_2")) and value.numel() == 1 and not wide.any():
                    fault = "a scale of 0"
                else:
                    continue
                raise UsageError(
                    f"the quantized model has {fault} in {name}; look at this tensor of the source and at the "
                    "calibration text, or choose another --quant"
                )


def _load(job: QuantizeJob) -> Any:
    """Returns the transformers model on its device, with exactly the weights that the embedded engine serves."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from trtx.checkpoint.experts import stack_place
    from trtx.checkpoint.model_config import read_model_config
    from trtx.torch_engine.runner.weights import named_tensors

    config = read_model_config(Path(job.source))
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    with no_init_weights(), device:
        # ModelOpt 0.47 observes experts only in transformers' loop over them.
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(job.source), dtype=dtype, experts_implementation="eager"
        )
    model.tie_weights()
    empty: dict[str, Tensor] = dict(model.named_parameters())  # includes a tied head only once, as the embedding
    experts, hidden = config.experts, config.hidden_size
    filled: set[str] = set()
    with torch.no_grad():
        for name, value in named_tensors(Path(job.source), device=device, dtype=dtype):
            place = None if experts is None else stack_place(experts, hidden, name)
            if place is None:
                empty[name].copy_(value)
            else:  # transformers 5 has one parameter for all experts of a layer
                empty[place.stack][place.index].copy_(value)
            filled.add(name if place is None else place.stack)
    assert filled == empty.keys(), f"no values for {sorted(empty.keys() - filled)[:3]}"
    return model.eval()


def _encode(tokenizer: Any, entry: Entry) -> list[int]:
    """Returns at most ``MAX_TOKENS`` token ids of one entry. Rendered conversations already have special tokens."""
    is_rendered = not isinstance(entry, str) and tokenizer.chat_template is not None
    ids: list[int] = tokenizer(render(tokenizer, entry), add_special_tokens=not is_rendered).input_ids
    return ids[:MAX_TOKENS]


def render(tokenizer: Any, entry: Entry) -> str:
    """Returns a text unchanged, and a conversation rendered by the model's chat template, if it has one."""
    if isinstance(entry, str):
        return entry
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in entry)
    try:
        return str(tokenizer.apply_chat_template(entry, tokenize=False))
    except Exception as error:  # a template may raise any error, not only jinja2's
        raise UsageError(f"the model's chat template refuses the calibration text {entry!r:.80}: {error}") from error
