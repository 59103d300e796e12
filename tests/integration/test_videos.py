"""Videos through the real frontend and real workers: what transformers makes of the same frames, in every topology."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import video_files as files
from rope_index import rope_index
from test_images import ALL_IN_ONE, E_P_D, Served, picture, text
from topology_clients import trtx_serve
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.video_utils import VideoMetadata
from without_videos import pythonpath_without_pyav

from trtx.checkpoint import resolve_checkpoint

pytestmark = pytest.mark.proof

COUNT = 4
CLOSE = 2e-3
FILES = {  # and the rate of its frames
    "landscape": (files.saved(files.drawn(25, 90, 50)), 10.0),
    "portrait": (files.saved(files.drawn(25, 50, 90)), 10.0),
    "WebM": (files.saved(files.drawn(18, 70, 70), codec="libvpx-vp9", container="webm"), 10.0),
    # Of Qwen2.5-VL its time takes 25 positions, and its width 15.
    "longer than wide": (files.saved(files.drawn(8, 90, 50), rate=Fraction(1, 2)), 0.5),
}


def video(name: str) -> dict[str, Any]:
    kind = "webm" if name == "WebM" else "mp4"
    data = base64.b64encode(FILES[name][0]).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/{kind};base64,{data}"}}


class Oracle:
    """transformers on the same checkpoint: its functions for videos, its processors and its ``generate()``, given
    frames of another decoding."""

    def __init__(self, shape: str) -> None:
        path = resolve_checkpoint(f"synthetic:{shape}").path
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._pictures = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._is_told = shape == "tiny-qwen3-vl"  # in text, when a step of a video is

    def logprobs(self, name: str, words: str) -> list[tuple[int, float]]:
        """Of the first tokens, greedy, and how probable each is."""
        file, fps = FILES[name]
        pixels, grid, metadata = files.prepared(
            self._pictures, files.decoded(file), fps, is_third=self._is_told, size=self._pictures.size, most=32
        )
        ids = self._ids(words, grid, metadata)
        asked = torch.tensor([ids])
        more: dict[str, Any] = {"pixel_values_videos": pixels, "video_grid_thw": grid}
        if not self._is_told:
            more["second_per_grid_ts"] = torch.tensor([2 / metadata.sampled_fps])
            places = rope_index(
                self._model, ids, video_grid_thw=grid, second_per_grid_ts=more["second_per_grid_ts"]
            )[:, None]  # fmt: skip
            more["position_ids"] = torch.cat([torch.arange(len(ids)).expand(1, 1, -1), places])
        found = self._model.generate(
            input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=COUNT, do_sample=False,
            mm_token_type_ids=2 * (asked == self._model.config.video_token_id), eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True, **more,
        )  # fmt: skip
        tokens = found.sequences[0, len(ids) :].tolist()
        return [
            (token, float(torch.log_softmax(logits[0], -1)[token]))
            for token, logits in zip(tokens, found.logits, strict=True)
        ]

    def text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _ids(self, words: str, grid: torch.Tensor, metadata: VideoMetadata) -> list[int]:
        mark, start, end = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
        messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": words}]}]
        said = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        theirs: Any = Qwen3VLProcessor if self._is_told else Qwen2_5_VLProcessor
        own = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
            video_token=mark, vision_start_token=start, vision_end_token=end,
            _calculate_timestamps=lambda *given: theirs._calculate_timestamps(None, *given),
        )  # fmt: skip
        shown = theirs.replace_video_token(own, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        # In place of the template's marks too, as transformers 4.57 does: see docs/multimodal.md.
        said = said.replace(f"{start}{mark}{end}", shown if self._is_told else f"{start}{shown}{end}")
        return list(self._tokenizer.encode(said, add_special_tokens=False))


def check(served: Served, oracle: Oracle, name: str, words: str) -> None:
    messages = [{"role": "user", "content": [video(name), text(words)]}]
    answer = served.post(messages, max_tokens=COUNT, logprobs=True)
    assert answer.status_code == 200, answer.text
    told = answer.json()["choices"][0]["logprobs"]["content"]
    expected = oracle.logprobs(name, words)
    assert [one["token"] for one in told] == [oracle.text_of(token) for token, _ in expected], name
    for one, (_, logprob) in zip(told, expected, strict=True):
        assert one["logprob"] == pytest.approx(logprob, abs=CLOSE), name


def check_all(served: Served, oracle: Oracle) -> None:
    for name in FILES:
        for words in ("what is it", "what is it", "and now"):  # the second one cached, the third with its embedding
            check(served, oracle, name, words)


def test_an_answer_to_a_video_is_that_of_transformers_cached_or_not() -> None:
    command = trtx_serve("--engine", "torch", "--model", "synthetic:tiny-qwen2.5-vl", "--decode-processes", "1")
    with command as started:
        served = Served(started.wait_ready(150))
        encoded = served.metric("agg-0", "trtx_media_pictures", stage="encode")  # the launcher's own, before Ready
        check_all(served, Oracle("tiny-qwen2.5-vl"))
        assert served.metric("agg-0", "trtx_media_pictures", stage="encode") == encoded + len(FILES)
        served.wait_idle()  # and no image is held
        code, said = served.refused(text("an <|video_pad|> in words"), video("portrait"))
        assert (code, "2 video placeholders and the request 1 videos" in said) == (400, True), said
        code, said = served.refused(*[video("portrait")] * 3)
        assert (code, said) == (400, "the request brings 3 videos, expected at most 2")
        sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        code, said = served.refused(sound, video("portrait"))
        assert (code, "contains input_audio" in said) == (400, True), said
        sound = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
        code, said = served.refused(sound, text("what is it"))
        assert (code, "brings audio_url, expected images and videos alone" in said) == (400, True), said


@pytest.mark.parametrize("shape", ["tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_every_topology_answers_as_transformers_does(shape: str) -> None:
    oracle = Oracle(shape)
    mixed = [{"role": "user", "content": [picture("red"), video("portrait"), text("and"), picture("blue", (20, 90))]}]
    answers = set()
    for options in (ALL_IN_ONE, ("--encode", "1"), E_P_D):
        with ExitStack() as stack:
            started = stack.enter_context(trtx_serve("--model", f"synthetic:{shape}", *options))
            served = Served(started.wait_ready(150))
            worker = "encode-0" if "--encode" in options else "agg-0"
            encoded = served.metric(worker, "trtx_media_pictures", stage="encode")  # the launcher's own, before Ready
            check_all(served, oracle)
            answers |= {served.ask(mixed), served.ask(mixed)}
            assert served.metric(worker, "trtx_media_pictures", stage="encode") == encoded + len(FILES) + 2
            if options == E_P_D:
                assert served.metric("decode-0", "trtx_embedding_cache_lookups") == 0
    assert len(answers) == 1


def test_without_pyav_a_video_is_refused_in_one_sentence_and_images_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", pythonpath_without_pyav(tmp_path))
    with trtx_serve("--engine", "torch", "--model", "synthetic:tiny-qwen2.5-vl", "--decode-processes", "1") as started:
        served = Served(started.wait_ready(150))
        said = " ".join(started.output.read_text().split())
        assert "warning: requests with videos are refused: videos are decoded by PyAV" in said
        code, said = served.refused(text("what is it"), video("portrait"))
        assert (code, said) == (
            400,
            "the request brings a video, and videos are decoded by PyAV, which is not installed here; install it with "
            "pip install 'trtx[video]', or send frames as images",
        )
        assert served.ask([{"role": "user", "content": [picture("red"), text("what is it")]}])
