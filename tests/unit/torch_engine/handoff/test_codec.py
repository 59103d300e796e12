from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.torch_engine.handoff import LayoutMismatch, codec
from trtx.torch_engine.kv_layout import KvGeometry, layer_groups

GEOMETRY = KvGeometry.uniform(num_layers=36, num_kv_heads=8, head_dim=128, tokens_per_block=32, dtype="bfloat16")


def exported(**changes: Any) -> codec.ExportedKv:
    values: dict[str, Any] = {
        "engine": "trtx-prefill",
        "direct": codec.DirectOffer(host="boot", address="trtx-kv-1", memory="cuda", handle=b"\x01" * 64, offset=512),
        "nixl": codec.NixlOffer(
            agent_name="agent", agent_metadata=b"\x00\xff", memory="DRAM", device_id=0, base_address=0x7FFF_0000_0000
        ),
        "num_blocks": 100,
        "geometry": GEOMETRY,
        "lease_id": 5,
        "block_ids": b"\3\0\0\0\1\0\0\0\2\0\0\0",
        "num_tokens": 70,
        "deadline_s": 1.5,
    }
    return codec.ExportedKv(**(values | changes))


@settings(deadline=None)
@given(
    lease_id=st.integers(0, 2**63 - 1),
    block_ids=st.binary(max_size=200),
    handle=st.none() | st.binary(max_size=64),
    metadata=st.none() | st.binary(max_size=500),
    deadline_s=st.floats(allow_nan=False),
    base_address=st.integers(0, 2**64 - 1),
)
def test_what_is_encoded_is_decoded(
    lease_id: int,
    block_ids: bytes,
    handle: bytes | None,
    metadata: bytes | None,
    deadline_s: float,
    base_address: int,
) -> None:
    whole = exported(lease_id=lease_id, block_ids=block_ids, deadline_s=deadline_s)
    replace_ = msgspec.structs.replace
    value = replace_(
        whole,
        direct=None if handle is None else replace_(whole.direct, handle=handle),
        nixl=None if metadata is None else replace_(whole.nixl, agent_metadata=metadata, base_address=base_address),
    )
    assert codec.decode(codec.encode(value)) == value


def test_equal_layouts_pass() -> None:
    codec.check(exported(), GEOMETRY)


@pytest.mark.parametrize("name", [f.name for f in fields(KvGeometry)])
def test_every_field_of_the_geometry_is_compared_and_both_sides_are_named(name: str) -> None:
    other: dict[str, Any] = {"groups": KvGeometry.uniform(35, 8, 128, 32, "float32").groups, "dtype": "float32"}
    ours = replace(GEOMETRY, **{name: other.get(name, 7)})
    with pytest.raises(LayoutMismatch) as caught:
        codec.check(exported(), ours)
    assert "trtx-prefill" in str(caught.value)
    said = [getattr(side, name) if name != "groups" else list(map(str, side.groups)) for side in (GEOMETRY, ours)]
    assert f"{name} is {said[0]!r} on prefill, {said[1]!r} on decode" in str(caught.value)


def test_another_pool_layout_is_refused() -> None:
    theirs = "block,layer,kv,token,head,dim"  # of format version 1
    with pytest.raises(LayoutMismatch, match=f"layout is {theirs!r} on prefill, '.*' on decode"):
        codec.check(exported(layout=theirs), GEOMETRY)


def test_all_differences_are_named_at_once() -> None:
    ours = replace(GEOMETRY, tokens_per_block=64, dtype="float16")
    with pytest.raises(LayoutMismatch, match="tokens_per_block is 32 .*; dtype is 'bfloat16'"):
        codec.check(exported(), ours)


def test_another_window_is_refused_in_words() -> None:
    ours = KvGeometry(layer_groups([None, 4096] * 18, 8, 128), 32, "bfloat16")
    theirs = KvGeometry(layer_groups([None, 1024] * 18, 8, 128), 32, "bfloat16")
    assert codec.decode(codec.encode(exported(geometry=theirs))).geometry == theirs
    with pytest.raises(LayoutMismatch) as caught:
        codec.check(exported(geometry=theirs), ours)
    full = "attention of layers 0, 2, … 34 to all positions, 8 KV heads of 128"
    assert f"groups is ['{full}', 'attention of layers 1, 3, … 35 to a window of 1024, 8 KV" in str(caught.value)
    assert "1, 3, … 35 to a window of 4096, 8 KV heads of 128'] on decode; give both roles" in str(caught.value)


def test_groups_that_no_pool_holds_are_no_state_of_ours() -> None:
    known = msgspec.msgpack.decode(codec.encode(exported()))
    known["geometry"]["groups"][0]["layers"] = [0, 0]
    with pytest.raises(LayoutMismatch, match="expected every layer of the model in one of them"):
        codec.decode(msgspec.msgpack.encode(known))


def test_another_format_version_is_refused_even_if_its_fields_are_unknown() -> None:
    later = msgspec.msgpack.encode({"version": 99, "something": "new"})
    with pytest.raises(LayoutMismatch, match="version 99 on the prefill side, this decode engine reads version 3"):
        codec.decode(later)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_of_another_origin_are_refused_with_a_sentence(noise: bytes) -> None:
    with pytest.raises(LayoutMismatch, match="opaque_state"):
        codec.decode(noise)


@settings(deadline=None)
@given(st.data())
def test_a_truncated_opaque_state_is_refused(data: st.DataObject) -> None:
    whole = codec.encode(exported())
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(LayoutMismatch):
        codec.decode(whole[:cut])
