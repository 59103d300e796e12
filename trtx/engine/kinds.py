"""The engines that a worker can run."""

from __future__ import annotations

from typing import Literal, get_args

EngineKind = Literal["torch", "tensorrt-llm", "paced"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)
MODEL_ENGINES = ("torch", "tensorrt-llm")
"""The engines that run the model: they may use a GPU, have KV, take images and return log-probabilities.

``paced`` and ``simulated`` (Dynamo's mocker, no worker of trtx) compute nothing.
"""
