"""A NIXL agent that costs nothing while it is idle, and listens nowhere but on loopback. Slow to import: 3 s."""

from __future__ import annotations

import logging
import os
from typing import Any

PROGRESS_WAKEUP_US = 10_000
"""The longest that NIXL's progress thread sleeps when UCX signals nothing. It wakes at once for messages; this bounds
the rare transport that does not signal. An idle agent costs 0.7 % of a core with it, 3 % with 1,000."""


def create_agent(name: str) -> Any:
    """An agent with the UCX backend on loopback, no listener of NIXL's own, and a progress thread that sleeps."""
    # UCX listens on every interface otherwise. A topology that spans hosts sets the variable itself.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    import nixl

    # At import NIXL 1.5.1 gives its logger a handler on stdout, at level INFO.
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)

    # NIXL 1.5.1's Python config sets the progress thread's delay to 0, with which the thread never sleeps and costs a
    # core for as long as the agent lives. The binding underneath takes a delay; go back to nixl_agent_config alone
    # when that does too.
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = nixl._bindings.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.pthrDelay = PROGRESS_WAKEUP_US
    agent.agent = nixl._bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


def nixl_errors() -> tuple[type[Exception], ...]:
    """Every error that NIXL raises. 1.5.1 gives them no base of their own."""
    import nixl

    errors = vars(nixl._bindings).values()
    return tuple(e for e in errors if isinstance(e, type) and issubclass(e, Exception))
