"""A device over which UCX goes nowhere: an engine that is given one says so, by its name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # it imports torch in a process of its own

_MAKE = """
import torch
from trtx.torch_engine.handoff.nixl_agent import PoolAgent
PoolAgent(torch.zeros(4, 16), 64)
"""


def test_a_device_that_is_not_there_is_named_with_what_is_expected() -> None:
    environment = {**os.environ, "UCX_NET_DEVICES": "nowhere9", "UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _MAKE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    for words in (
        "UCX_NET_DEVICES=nowhere9",
        "NIXL_ERR_BACKEND",
        "is up and has an address",
        "device in the hosts file",
    ):
        assert words in said
