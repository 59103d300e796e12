"""``opaque_state``: what an engine says about the blocks it exports, as versioned msgpack."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from trtx.torch_engine.batch import KvGeometry
from trtx.torch_engine.handoff.base import LayoutMismatch

FORMAT_VERSION = 1
POOL_LAYOUT = "block,layer,kv,token,head,dim"
"""Order of the pool's dimensions, outermost first. A block is one contiguous range that holds all layers."""


class ExportedKv(msgspec.Struct, frozen=True, kw_only=True):
    """Leased blocks of one request, and how to reach them."""

    version: int = FORMAT_VERSION
    transport: str
    agent_name: str  # unique to one life of one engine process
    agent_metadata: bytes  # how to connect to that agent; the transport's own form
    memory: str  # "DRAM" or "VRAM"
    device_id: int  # the exporter's own number for its device
    base_address: int  # of block 0 of the pool
    num_blocks: int  # of the whole pool
    layout: str = POOL_LAYOUT
    geometry: KvGeometry
    lease_id: int
    block_ids: tuple[int, ...]  # in token order
    num_tokens: int
    deadline_s: float  # Unix seconds


class _Version(msgspec.Struct):
    version: int


def encode(exported: ExportedKv) -> bytes:
    return msgspec.msgpack.encode(exported)


def decode(opaque_state: bytes) -> ExportedKv:
    """Reads the form alone. Raises LayoutMismatch for bytes that are no ``opaque_state`` of this version."""
    try:
        version = msgspec.msgpack.decode(opaque_state, type=_Version).version
        if version == FORMAT_VERSION:
            return msgspec.msgpack.decode(opaque_state, type=ExportedKv)
    except msgspec.MsgspecError as error:
        raise LayoutMismatch(
            f"opaque_state of {len(opaque_state)} bytes is not one that a trtx prefill engine wrote ({error}); "
            "run the same trtx version and the same engine on prefill and decode"
        ) from error
    raise LayoutMismatch(
        f"opaque_state has format version {version} on the prefill side, this decode engine reads version "
        f"{FORMAT_VERSION}; run the same trtx version on both"
    )


def check(exported: ExportedKv, *, transport: str, geometry: KvGeometry) -> None:
    """Raises LayoutMismatch unless every field of the prefill side's layout equals this engine's own."""
    pairs = [("transport", exported.transport, transport), ("layout", exported.layout, POOL_LAYOUT)]
    pairs += [(f.name, getattr(exported.geometry, f.name), getattr(geometry, f.name)) for f in fields(KvGeometry)]
    differing = [(name, theirs, ours) for name, theirs, ours in pairs if theirs != ours]
    if differing:
        raise LayoutMismatch(
            f"KV layout of prefill engine {exported.agent_name} does not fit this decode engine: "
            + "; ".join(f"{name} is {theirs!r} on prefill, {ours!r} on decode" for name, theirs, ours in differing)
            + "; give both roles the same model and the same kv_cache_config"
        )
