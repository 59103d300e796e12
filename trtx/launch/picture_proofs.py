"""Whether pictures really get through to each process that encodes them: in a topology of a model that sees.

A worker whose encoder fails serves text as ever, and a request whose encode worker fails is answered by another one's
work, so that no answer tells. What counts is that a worker itself has encoded a picture since it began.
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
from trtx.errors import UsageError
from trtx.launch.handoffs import CHAT, TO_PREFILL, TO_WORKER, ask_worker_ids
from trtx.launch.readiness import request
from trtx.topology import Plan, ProcessSpec

_SIDE = 32  # pixels
_TOKENS = 2
_TURNS = 20  # requests for each encoder: which one gets a picture follows from its content, as by chance
_ASKED_TIMEOUT_S = 2.0
_U32 = struct.Struct(">I").pack
_PASSED = rb'^trtx_media_pictures_total\{[^}]*stage="%s"[^}]*\} (\S+)$'
_TOO_LONG = "and the context holds"  # of the worker's sentence: with its max_seq_len no picture fits


class PictureProofs:
    """Of one plan, asked of one frontend: which of its encoders have encoded a picture since they began.

    ``unchecked``: why nothing was sent, or can be; empty where all is proved or there is nothing to prove.
    """

    def __init__(self, plan: Plan, url: str = "", model_path: Path | None = None) -> None:
        """``url``: of the frontend to ask, the plan's own without one; ``model_path``: of the model on this machine,
        likewise. Asks nothing yet."""
        self.encoders: tuple[ProcessSpec, ...] = ()
        self.unchecked = ""
        self._plan = plan
        self._url = url or plan.url
        if plan.engine not in ("torch", "tensorrt-llm"):  # no other takes images
            return
        try:
            if read_vision_config(model_path or plan.model_path) is not None:
                self.encoders, self.unchecked = _encoders(plan), _forbidden(plan)
        except UsageError as error:
            self.unchecked = str(error)

    @property
    def told(self) -> str:
        """For the end of a sentence, once nothing is missing; empty where there is nothing to tell."""
        if self.unchecked:
            return f"; pictures are not checked: {self.unchecked}"
        if not self.encoders:
            return ""
        return f", and a picture through {', '.join(worker.name for worker in self.encoders)}"

    def prove_missing(self, timeout_s: float) -> str | None:
        """Sends pictures until each encoder has encoded one. None, or a clause: the encoder and the cause.

        ``timeout_s``: of each request.
        """
        for turn in itertools.count():
            missing = [] if self.unchecked else [one for one in self.encoders if not self._has_encoded(one)]
            if not missing:
                return None
            target = missing[0]
            if turn == _TURNS * len(self.encoders):
                return f"no picture went through {target.name}, of {turn} that were answered; see its log"
            if (refused := self._send(target, timeout_s)) is None:
                continue
            if _TOO_LONG not in refused:
                return f"no picture went through {target.name}: {refused}"
            self.unchecked = refused
        return None

    def _send(self, target: ProcessSpec, timeout_s: float) -> str | None:
        """One picture that no cache has, to ``target`` as far as the router goes by that: by load alone, all might go
        to another. None where it was answered, else what it was refused with."""
        url = f"data:image/png;base64,{base64.b64encode(_png()).decode()}"
        body = {
            "model": self._plan.model,
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "max_tokens": _TOKENS,
            "temperature": 0.0,
        }
        try:
            headers, certificate = self._headers(target), self._plan.certificate
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
        """None for an encode worker: no router sends requests there."""
        header = {"agg": TO_WORKER, "prefill": TO_PREFILL}.get(target.role)
        worker_id = ask_worker_ids(self._url, self._plan.model).get(target.name) if header else None
        return {header: str(worker_id)} if header and worker_id is not None else {}

    def _has_encoded(self, worker: ProcessSpec) -> bool:
        """By its own count; False also where it can't be asked. An LLM of TensorRT-LLM has its tower inside: a worker
        counts what it put in, and its answer says that it got through."""
        stage = b"put" if self._plan.engine == "tensorrt-llm" and worker.role != "encode" else b"encode"
        url = f"http://{worker.address}:{worker.system_port}"
        try:
            _, body = request(url, "GET", "/metrics", timeout_s=_ASKED_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return False
        return any(float(count) > 0 for count in re.findall(_PASSED % stage, body, re.MULTILINE))


def _encoders(plan: Plan) -> tuple[ProcessSpec, ...]:
    """Those that encode what requests bring: encode workers, or else the workers that requests come to first."""
    by_role = {role: [one for one in plan.workers if one.role == role] for role in ("encode", "prefill", "agg")}
    return tuple(next((found for found in by_role.values() if found), []))


def _forbidden(plan: Plan) -> str:
    """Which limit the plan's workers refuse the picture with; empty: none."""
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
    """Of pixels drawn anew each time."""
    rows = b"".join(b"\0" + os.urandom(3 * _SIDE) for _ in range(_SIDE))
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    framed = (_U32(len(data)) + kind + data + _U32(zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
