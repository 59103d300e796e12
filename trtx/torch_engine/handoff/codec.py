"""``opaque_state``: an engine's description of the blocks that it exports, as versioned msgpack."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from trtx.torch_engine.handoff.base import LayoutMismatch
from trtx.torch_engine.handoff.head_share import HeadCopy
from trtx.torch_engine.kv_layout import KvGeometry

FORMAT_VERSION = 3
POOL_LAYOUT = "block,head,layer,kv,token,dim"
"""Order of the pool's dimensions, outermost first.

A block is one contiguous range with all layers of a KV cache group.
"""


class DirectOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How a process on the same host copies from the exporter's memory."""

    host: str  # boot id of the exporter's kernel
    address: str  # abstract Unix socket of the exporter, without its leading zero byte
    memory: str  # "cuda" or "process"
    handle: bytes  # cuda: the driver's IPC handle; process: empty, because pid and address suffice
    offset: int  # of block 0; cuda: within the handle's allocation; process: its address


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How NIXL reaches the exporter, from any host."""

    agent_name: str  # unique to one incarnation of one agent
    agent_metadata: bytes  # how to connect to that agent, in NIXL's format
    memory: str  # "DRAM" or "VRAM"
    device_id: int  # the exporter's device index
    base_address: int  # of block 0


class ExportedKv(msgspec.Struct, frozen=True, kw_only=True):
    """The leased blocks of one request, and how to reach them."""

    version: int = FORMAT_VERSION
    engine: str  # unique to one incarnation of one engine's transport
    direct: DirectOffer | None = None
    nixl: NixlOffer | None = None
    num_blocks: int  # of the whole pool
    layout: str = POOL_LAYOUT
    geometry: KvGeometry
    kv_heads: int = 0  # of the model, if the exporter has several ranks, which split them; 0: those of the geometry
    peers: tuple[DirectOffer, ...] = ()  # of ranks 1, 2, …; the offers above are those of rank 0
    # What one rank of a reader copies from the rank that ``direct`` leads to. A part's end releases no lease.
    part: HeadCopy | None = None
    lease_id: int
    # int32, little-endian: the block ids of each KV cache group, one group after the other, in token order. They begin
    # with the first block that a decode reads (``kv_layout.first_block``) and end with the last token's block. As a
    # msgpack array, 1,024 ids would take 40 us to decode.
    block_ids: bytes
    num_tokens: int
    deadline_s: float  # Unix seconds


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Version)
_decoder = msgspec.msgpack.Decoder(ExportedKv)


def layout_of(geometry: KvGeometry) -> bytes:
    """Encoded block layout of a pool; blocks can be copied between pools with equal layouts."""
    return _encoder.encode((POOL_LAYOUT, geometry))


def encode(exported: ExportedKv) -> bytes:
    return _encoder.encode(exported)


def decode(opaque_state: bytes) -> ExportedKv:
    """Decodes ``opaque_state`` without checking the decoded fields.

    Raises LayoutMismatch for bytes of another format or version.
    """
    try:
        version = _version_decoder.decode(opaque_state).version
        if version == FORMAT_VERSION:
            return _decoder.decode(opaque_state)
    except msgspec.MsgspecError as error:
        raise LayoutMismatch(
            f"opaque_state of {len(opaque_state)} bytes is not one that a trtx prefill engine wrote ({error}); "
            "run the same trtx version and the same engine on prefill and decode"
        ) from error
    raise LayoutMismatch(
        f"opaque_state has format version {version} on the prefill side, this decode engine reads version "
        f"{FORMAT_VERSION}; run the same trtx version on both"
    )


def check(exported: ExportedKv, geometry: KvGeometry) -> None:
    """Raises LayoutMismatch, which names the differing fields, unless both engines have the same KV layout.

    ``geometry``: layout of this engine's own blocks. If each rank holds a part of the heads, the number of heads in a
    block may differ.
    """
    if exported.part is not None:
        geometry = geometry.with_heads(exported.geometry.groups[0].num_kv_heads)
    check_layouts(exported, exported.geometry, geometry)


def check_layouts(exported: ExportedKv, theirs: KvGeometry, ours: KvGeometry) -> None:
    """As :func:`check`, for the geometries of the whole model."""
    if theirs == ours and exported.layout == POOL_LAYOUT:
        return
    pairs: list[tuple[str, object, object]] = [("layout", exported.layout, POOL_LAYOUT)]
    pairs += [(f.name, _shown(theirs, f.name), _shown(ours, f.name)) for f in fields(KvGeometry)]
    differing = [(name, one, other) for name, one, other in pairs if one != other]
    raise LayoutMismatch(
        f"KV layout of prefill engine {exported.engine} does not fit this decode engine: "
        + "; ".join(f"{name} is {one!r} on prefill, {other!r} on decode" for name, one, other in differing)
        + "; give both roles the same model and the same kv_cache_config"
    )


def _shown(geometry: KvGeometry, name: str) -> object:
    return list(map(str, geometry.groups)) if name == "groups" else getattr(geometry, name)
