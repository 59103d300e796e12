"""Videos through the real frontend and real workers: what transformers makes of the same frames, in every topology."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import video_files as files
from PIL import Image
from test_images import ALL_IN_ONE, E_P_D, Served, picture, text
from topology_clients import trtx_serve
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from without_videos import pythonpath_without_pyav

from trtx.checkpoint import resolve_checkpoint

COUNT = 4
CLOSE = 2e-3
FPS = 10.0
FILES = {
    "landscape": files.saved(files.drawn(25, 90, 50)),
    "portrait": files.saved(files.drawn(25, 50, 90)),
    "WebM": files.saved(files.drawn(18, 70, 70), codec="libvpx-vp9", container="webm"),
}


def video(name: str) -> dict[str, Any]:
    kind = "webm" if name == "WebM" else "mp4"
    data = base64.b64encode(FILES[name]).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/{kind};base64,{data}"}}


class Oracle:
    """transformers on the same checkpoint, given frames of another decoding and positions of its own."""

    def __init__(self, shape: str) -> None:
        torch.set_num_threads(1)
        path = resolve_checkpoint(f"synthetic:{shape}").path
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._pictures = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._is_told = shape == "tiny-qwen3-vl"  # in text, when a step of a video is
        self._videos = files.QWEN_3 if self._is_told else files.QWEN_2

    def logprobs(self, name: str, words: str) -> list[tuple[int, float]]:
        """Of the first tokens, greedy, and how probable each is."""
        pictures = files.decoded(FILES[name])
        indices = self._indices(len(pictures))
        pixels, grid = self._pixels([pictures[index] for index in indices])
        ids, seconds = self._ids(words, grid, indices, len(pictures))
        found = []
        for _ in range(COUNT):
            asked = torch.tensor([ids])
            kinds = torch.tensor([[2 * (token == self._model.config.video_token_id) for token in ids]])
            if not found:
                rope, delta = self._model.model.get_rope_index(asked, kinds, video_grid_thw=grid, **seconds)
            after = (torch.arange(rope.shape[2], len(ids)) + int(delta)).expand(3, 1, -1)
            with torch.inference_mode():
                logits = self._model(
                    input_ids=asked, mm_token_type_ids=kinds, pixel_values_videos=pixels, video_grid_thw=grid,
                    position_ids=torch.cat([rope, after], dim=2),
                ).logits[0, -1]  # fmt: skip
            best = int(logits.argmax())
            found.append((best, float(torch.log_softmax(logits, -1)[best])))
            ids = [*ids, best]
        return found

    def text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _indices(self, count: int) -> list[int]:
        asked: Any = type(
            "Asked", (), {"num_frames": None, "fps": 2.0, "temporal_patch_size": 2, "min_frames": 4, "max_frames": 32}
        )
        metadata = type("Metadata", (), {"total_num_frames": count, "fps": FPS})
        return [int(index) for index in self._videos.sample_frames(asked, metadata)]

    def _pixels(self, pictures: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        processor = self._pictures
        height, width = pictures[0].shape[:2]
        factor, size = processor.patch_size * processor.merge_size, processor.size
        limits = (size["shortest_edge"], size["longest_edge"])
        if self._is_told:
            high, wide = self._videos.smart_resize(len(pictures), height, width, 2, factor, *limits)
        else:
            high, wide = self._videos.smart_resize(height, width, factor, *limits)
        shown = [np.asarray(Image.fromarray(one).resize((wide, high), Image.Resampling.BICUBIC)) for one in pictures]
        values = (np.stack(shown) / 255 - processor.image_mean) / processor.image_std
        batch = torch.tensor(values, dtype=torch.float32).permute(0, 3, 1, 2)[None]
        patches, time, rows, columns = self._videos.patchify(
            None, batch, processor.patch_size, processor.merge_size, processor.temporal_patch_size
        )
        return patches[0], torch.tensor([[time, rows, columns]])

    def _ids(
        self, words: str, grid: torch.Tensor, indices: list[int], count: int
    ) -> tuple[list[int], dict[str, torch.Tensor]]:
        mark, start, end = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
        messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": words}]}]
        said = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        time, rows, columns = (int(size) for size in grid[0])
        seconds = {}
        if self._is_told:
            times = files.QWEN_3_TEXT._calculate_timestamps(None, list(indices), FPS, 2)
            steps = [f"<{at:.1f} seconds>{start}{mark * (rows * columns // 4)}{end}" for at in times]
            said = said.replace(f"{start}{mark}{end}", "".join(steps))
        else:
            said = said.replace(mark, mark * (time * rows * columns // 4))
            seconds = {"second_per_grid_ts": torch.tensor([2 / (len(indices) / count * FPS)])}
        return self._tokenizer.encode(said, add_special_tokens=False), seconds


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
        assert served.metric("agg-0", "trtx_embedding_cache_pinned_bytes") == 0
        code, said = served.refused(text("an <|video_pad|> in words"), video("portrait"))
        assert (code, "2 video placeholders and the request 1 videos" in said) == (400, True), said
        code, said = served.refused(*[video("portrait")] * 3)
        assert (code, said) == (400, "the request brings 3 videos, expected at most 2")
        sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        code, said = served.refused(sound, video("portrait"))
        assert (code, "brings input_audio" in said) == (400, True), said
        sound = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
        code, said = served.refused(sound, text("what is it"))
        assert (code, "brings audio_url, expected images and videos alone" in said) == (400, True), said


@pytest.mark.proof
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
