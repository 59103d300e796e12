"""The rules that hold for the engines of the house: what each of their errors means for a worker."""

from __future__ import annotations

import pytest

from trtx.engine import EngineKind, load
from trtx.engine.api import stated
from trtx.torch_engine.llmapi import DisaggregatedParams, RequestError, RequestFailed


@pytest.mark.parametrize("kind", ["torch", "paced"])
def test_whose_fault_an_error_is(kind: EngineKind) -> None:
    api = load(kind)
    assert api.kind == kind
    assert api.fault(RequestError("too long")) == "refused"
    assert api.fault(RequestFailed("the logits are not numbers")) == "failed"
    assert api.fault(ZeroDivisionError()) == "unexpected"
    assert (api.aborts_transfers, api.dies_of_stalls) == (True, False)
    # An engine that takes embeddings makes them too.
    assert (api.start_encoder is None, api.missing_media is None) == (
        (False, False) if kind == "torch" else (True, True)
    )


def test_fields_that_hold_nothing_are_as_if_they_were_not_there() -> None:
    assert stated(DisaggregatedParams()) == {}
    assert stated(DisaggregatedParams(request_type="context_only", ctx_request_id=0, opaque_state=b"")) == {
        "request_type": "context_only",
        "ctx_request_id": 0,
        "opaque_state": b"",
    }
