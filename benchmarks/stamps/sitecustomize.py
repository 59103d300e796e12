"""Stamps of one request in worker and engine, where ``TRTX_STAMPS`` names a folder. For ``first_token.py``.

Python imports this module at its start from a folder of PYTHONPATH. Once one of the modules in ``HOOKS`` is loaded,
those functions that see a request pass are wrapped. Each process appends lines of JSON to a file of its own: times are
of CLOCK_MONOTONIC, in nanoseconds, which all processes of a host share.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

now = time.monotonic_ns
_file: Any = None
_of_request: ContextVar[dict[str, Any] | None] = ContextVar("of_request", default=None)


def _write(row: dict[str, Any]) -> None:
    global _file
    if _file is None:
        _file = Path(os.environ["TRTX_STAMPS"], f"{os.getpid()}.jsonl").open("ab", buffering=0)  # noqa: SIM115
    _file.write(json.dumps(row).encode() + b"\n")


def _handler(module: ModuleType) -> None:
    generate = module.RequestHandler.generate

    async def stamped(chunks: Any, row: dict[str, Any]) -> Any:
        row["began"] = now()
        _of_request.set(row)
        is_first = True
        async for chunk in chunks:
            if is_first:
                row["yielded"] = now()
            yield chunk
            if is_first:
                row["taken"] = now()
                _write({"at": "worker", **row})
                is_first = False

    @wraps(generate)
    def wrapped(self: Any, request: Any, context: Any) -> Any:
        row = {"called": now(), "id": context.id(), "tokens": len(request.get("token_ids") or ())}
        return stamped(generate(self, request, context), row)

    module.RequestHandler.generate = wrapped


def _client(module: ModuleType) -> None:
    submit, take_step = module.EngineClient.submit, module.EngineClient._take_step
    open_rows: dict[int, dict[str, Any]] = {}

    def wrapped_submit(self: Any, choice: Any, message: Any) -> None:
        row = _of_request.get()
        if row is not None:
            row["sequence"], row["submitted"] = message.sequence_id, now()
            open_rows[message.sequence_id] = row
        submit(self, choice, message)
        if row is not None:
            row["sent"] = now()

    def wrapped_take(self: Any, report: Any) -> None:
        at = now()
        for update in report.updates:
            row = open_rows.pop(update.sequence_id, None)
            if row is not None:
                row["delivered"] = at
        take_step(self, report)

    module.EngineClient.submit, module.EngineClient._take_step = wrapped_submit, wrapped_take


def _core(module: ModuleType) -> None:
    from trtx.torch_engine.core.reports import ReportSender

    submit, step, put = module.EngineCore.submit, module.EngineCore.step, ReportSender.put
    open_rows: dict[int, dict[str, Any]] = {}
    steps = {"count": 0, "ns": 0}

    def wrapped_submit(self: Any, message: Any) -> None:
        row: dict[str, Any] = {"sequence": message.sequence_id, "came": now()}
        open_rows[message.sequence_id] = row
        submit(self, message)

    def wrapped_step(self: Any) -> Any:
        began = now()
        report = step(self)
        steps["count"] += 1
        steps["ns"] += now() - began
        return report

    def wrapped_put(self: Any, message: Any) -> None:
        at = now()
        for update in getattr(message, "updates", ()):
            row = open_rows.get(update.sequence_id)
            if row is not None and "reported" not in row:
                row["reported"] = at
            if row is not None and update.finish_reason is not None:
                del open_rows[update.sequence_id]
                _write({"at": "engine", **row, "ended": at, "steps": steps["count"], "steps_ns": steps["ns"]})
        put(self, message)

    module.EngineCore.submit, module.EngineCore.step = wrapped_submit, wrapped_step
    ReportSender.put = wrapped_put  # type: ignore[method-assign]


class ModelledStep:
    def __init__(self, done_s: float, found: list[Any]) -> None:
        self._done_s, self._found = done_s, found

    def results(self) -> list[Any]:
        time.sleep(max(0.0, self._done_s - time.perf_counter()))
        return self._found


class ModelledRunner:
    """As fast as ``TRTX_MODELLED`` says (milliseconds a step, microseconds a prompt token), and computes nothing."""

    def __init__(self, args: Any, words: str) -> None:
        from trtx.torch_engine.kv_layout import KvGeometry

        step_ms, token_us = words.split(",")
        self._step_s, self._token_s = float(step_ms) / 1e3, float(token_us) / 1e6
        self.geometry = KvGeometry.uniform(1, 1, 16, 32, "float32")
        self.num_blocks, self.vocab_size, self.needs_grids, self.paced_steps = 1 << 16, 1 << 20, False, None
        self.is_asynchronous, self.graph_misses = True, None
        self.max_position = args.max_seq_len or 1 << 14
        self._free_s = 0.0

    def launch(self, batch: Any) -> ModelledStep:
        from trtx.torch_engine.step import Sampled

        tokens = sum(len(sequence.new_token_ids) for sequence in batch.sequences if sequence.start == 0)
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s + tokens * self._token_s
        return ModelledStep(self._free_s, [Sampled(65 if one.samples else None) for one in batch.sequences])

    def device_memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def _runner(module: ModuleType) -> None:
    if words := os.environ.get("TRTX_MODELLED"):
        module.create_runner = lambda args: ModelledRunner(args, words)  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "trtx.worker.handler": _handler,
    "trtx.torch_engine.llmapi.client": _client,
    "trtx.torch_engine.core.engine_core": _core,
    "trtx.torch_engine.runner": _runner,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, hook: Callable[[ModuleType], None]) -> None:
        self._inner, self._hook = inner, hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._hook(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, HOOKS[name])
        return spec


def _note_collections() -> None:
    began = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = now()
        else:
            _write({"at": "gc", "generation": info["generation"], "began": began, "ns": now() - began})

    gc.callbacks.append(note)


if "TRTX_STAMPS" in os.environ:
    _note_collections()
    sys.meta_path.insert(0, _Finder())
