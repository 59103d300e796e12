"""A model with tensors of zeros, as block expansion makes them: the export has zeros there, and no NaN."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtx.build.quantize import check_numbers
from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.skipif("not __import__('importlib').util.find_spec('modelopt')")]
FORMS = (("fp8", "fp8"), ("nvfp4", "auto"))  # each with the KV cache's dtype
# In a process of its own: ModelOpt changes how transformers ties weights in every process that imports it. In one for
# all forms: the import is most of the time.
QUANTIZE = """
import sys
from trtx.build.quantize import QuantizeJob, quantize
source, out, *forms = sys.argv[1:]
for form, kv_dtype in zip(forms[::2], forms[1::2]):
    job = QuantizeJob(source, f"{out}/{form}", form, kv_dtype, "cpu", "bfloat16", ("a text to calibrate on",))
    quantize(job, lambda stage, done, total: None)
"""
ZEROS = ("self_attn.o_proj", "mlp.down_proj", "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj")


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = resolve_checkpoint("synthetic:tiny").path
    directory = tmp_path_factory.mktemp("expanded")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, value in tensors.items():
        if name.startswith("model.layers.0.") and name.endswith(tuple(f"{one}.weight" for one in ZEROS)):
            value.zero_()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def exported(expanded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an export of each form."""
    directory = tmp_path_factory.mktemp("exported")
    command = [
        sys.executable,
        "-c",
        QUANTIZE,
        str(expanded),
        str(directory),
        *(part for pair in FORMS for part in pair),
    ]
    subprocess.run(command, check=True, timeout=300)
    return directory


@pytest.mark.parametrize("form", [form for form, _ in FORMS])
def test_zeros_are_exported_as_zeros(exported: Path, form: str) -> None:
    found = load_file(exported / form / "model.safetensors")
    for name in (f"model.layers.0.{one}.weight" for one in ZEROS):
        stored = found[name]
        values = stored.view(torch.uint8) & (0x77 if form == "nvfp4" else 0x7F)  # without the signs
        assert not values.any(), name


def test_a_tensor_that_is_no_number_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b.weight": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"values that are not finite numbers in b\.weight"):
        check_numbers(tmp_path)
    save_file({"b.weight_scale": torch.tensor(0.0)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"a scale of 0 in b\.weight_scale"):
        check_numbers(tmp_path)
