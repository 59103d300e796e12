"""Checks, for multimodal models, that images reach each process that encodes them.

A worker with a failed encoder still serves text, and if an encode worker fails, another one encodes the image, so no
answer shows the failure. So an encoder counts as proved only if its own metrics show an image since its start.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import os
import re
import struct
import zlib
from pathlib import Path

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import MediaLimits
from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError
from trtx.launch.handoffs import CHAT, TO_PREFILL, TO_WORKER, ask_worker_ids
from trtx.launch.readiness import own_headers, request
from trtx.topology import Plan, ProcessSpec

_SIDE = 32  # pixels
_TOKENS = 2
_TURNS = 20  # requests per encoder: the image's content selects the encoder, in effect at random
_ASKED_TIMEOUT_S = 2.0
_U32 = struct.Struct(">I").pack
_PASSED = rb'^trtx_media_pictures_total\{[^}]*stage="%s"[^}]*\} (\S+)$'
_TOO_LONG = "and the context holds"  # part of the worker's message if its max_seq_len is too small for any image


class ImageProofs:
    """The encoders of one plan that have encoded an image since their start, as tested through one frontend.

    ``unchecked``: why no image was or can be sent; empty if everything is proved or nothing has to be.
    """

    def __init__(self, plan: Plan, url: str = "", model_path: Path | None = None) -> None:
        """Sends no request yet. ``url``: the frontend to use; default: the plan's first.

        ``model_path``: the model on this machine; default: the plan's path.
        """
        self.encoders: tuple[ProcessSpec, ...] = ()
        self.unchecked = ""
        self._plan = plan
        self._url = url or plan.url
        if plan.engine not in MODEL_ENGINES:
            return
        try:
            if read_vision_config(model_path or plan.model_path) is not None:
                self.encoders, self.unchecked = _encoders(plan), _forbidden(plan)
        except UsageError as error:
            self.unchecked = str(error)

    @property
    def summary(self) -> str:
        """The proved encoders, as the end of a sentence, once none is missing; "" if there is nothing to report."""
        if self.unchecked:
            return f"; images are not checked: {self.unchecked}"
        if not self.encoders:
            return ""
        return f", and an image through {', '.join(worker.name for worker in self.encoders)}"

    def prove_missing(self, timeout_s: float) -> str | None:
        """Sends images until each encoder has encoded one. Returns None, or a clause with the encoder and the cause.

        ``timeout_s``: per request.
        """
        for turn in itertools.count():
            missing = [] if self.unchecked else [one for one in self.encoders if not self._has_encoded(one)]
            if not missing:
                return None
            target = missing[0]
            if turn == _TURNS * len(self.encoders):
                return f"none of {turn} answered images went through {target.name}; see its log"
            if (refused := self._send(target, timeout_s)) is None:
                continue
            if _TOO_LONG not in refused:
                return f"no image went through {target.name}: {refused}"
            self.unchecked = refused
        return None

    def _send(self, target: ProcessSpec, timeout_s: float) -> str | None:
        """Sends one new random image, with headers that select ``target``. Returns None, or the error.

        Without the headers, a router that balances by load could send all images to another worker.
        """
        url = f"data:image/png;base64,{base64.b64encode(_png()).decode()}"
        body = {
            "model": self._plan.model,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "max_tokens": _TOKENS,
            "temperature": 0.0,
        }
        try:
            headers = own_headers(self._plan.namespace) | self._headers(target)
            certificate = self._plan.certificate
            code, answer = request(
                self._url, "POST", CHAT, body, headers=headers, timeout_s=timeout_s, certificate=certificate
            )
            if code == 200:
                return None
            return f"HTTP {code}: {json.loads(answer)['message']}"
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError):
            return f"HTTP {code}: {answer.decode(errors='replace')[:300] or 'empty body'}"

    def _headers(self, target: ProcessSpec) -> dict[str, str]:
        """The routing header for ``target``; empty for an encode worker, to which no router sends requests."""
        header = {"agg": TO_WORKER, "prefill": TO_PREFILL}.get(target.role)
        if header is None:
            return {}
        worker_id = ask_worker_ids(self._url, self._plan.model, self._plan.certificate).get(target.name)
        return {} if worker_id is None else {header: str(worker_id)}

    def _has_encoded(self, worker: ProcessSpec) -> bool:
        """Whether the worker's metrics show an encoded image; False also if they can't be read.

        TensorRT-LLM's LLM contains its tower, so there the worker counts the images that it put in, and the answer
        shows that they were encoded.
        """
        stage = b"put" if self._plan.engine == "tensorrt-llm" and worker.role != "encode" else b"encode"
        url = f"http://{worker.address}:{worker.system_port}"
        try:
            _, body = request(url, "GET", "/metrics", timeout_s=_ASKED_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return False
        return any(float(count) > 0 for count in re.findall(_PASSED % stage, body, re.MULTILINE))


def _encoders(plan: Plan) -> tuple[ProcessSpec, ...]:
    """The workers that encode images: encode workers, or without any, the workers that receive the requests first."""
    by_role = {role: [one for one in plan.workers if one.role == role] for role in ("encode", "prefill", "agg")}
    return tuple(next((found for found in by_role.values() if found), []))


def _forbidden(plan: Plan) -> str:
    """The limit in the plan with which workers would refuse the test image, or ""."""
    for worker in plan.workers:
        for flag, value in itertools.pairwise(worker.argv):
            if flag != "--media":
                continue
            limits = MediaLimits.model_validate_json(value)
            for name, needed in (("max_images", 1), ("max_image_pixels", _SIDE**2), ("max_media_bytes", len(_png()))):
                if getattr(limits, name) < needed:
                    return f"{name} is {getattr(limits, name)}"
    return ""


def _png() -> bytes:
    """A PNG with random pixels."""
    rows = b"".join(b"\0" + os.urandom(3 * _SIDE) for _ in range(_SIDE))
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (_U32(len(data)) + kind + data + _U32(zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
