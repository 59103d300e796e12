"""``synthetic:tiny-vl-trained`` sees, measured on pictures that it was never trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from picture_tasks import held_out, turn
from pictures import draw
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration
from vl_scores import score_pictures

from trtx.checkpoint import resolve_checkpoint

pytestmark = pytest.mark.slow
# Of 40 pictures a task: TRAINING.md beside the weights has the shares of 200.
LEAST = {
    "colour": 39, "background": 40, "shape": 39, "place": 39, "side": 38, "count": 37, "digit": 38, "format": 40,
    "which-colour": 39, "which-digit": 38,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    path = resolve_checkpoint("synthetic:tiny-vl-trained").path
    model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path)


@pytest.mark.proof
def test_held_out_pictures_are_named(trained: tuple[Any, Any, Any]) -> None:
    for score in score_pictures(*trained, count=40, tasks=tuple(LEAST)):
        assert score.right >= LEAST[score.task], score


def test_a_chat_about_pictures_ends_by_itself(trained: tuple[Any, Any, Any]) -> None:
    model = trained[0]
    processor = AutoProcessor.from_pretrained(resolve_checkpoint("synthetic:tiny-vl-trained").path)
    for sample in held_out("which-colour", 3):
        parts = [{"type": "image"} for _ in sample.scenes] + [{"type": "text", "text": sample.question.text}]
        said = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        assert said == turn(sample.question, len(sample.scenes))[0]
        inputs = processor(text=said, images=[draw(scene) for scene in sample.scenes], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(output).endswith("<|im_end|>")
        assert len(output) <= 3
