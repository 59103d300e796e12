"""trtx's endpoint plugin for aiperf: aiperf's chat endpoint, but only a complete answer counts as a success.

This package owns ``plugins.yaml``, which aiperf finds through the entry point ``aiperf.plugins`` of the installed trtx,
and the classes named in it. aiperf sends and times the requests; ``bench/answers.py`` checks the answers. Select it
with ``--endpoint-type`` :data:`ENDPOINT_TYPE`. Only aiperf's processes import ``chat``. Invariant: an aiperf that
doesn't know this endpoint refuses the command line, so every answer is checked.
"""

ENDPOINT_TYPE = "trtx_chat"
ENTRY_POINT_GROUP = "aiperf.plugins"
ENTRY_POINT = "trtx"
# Passes an API key from bench to the endpoint; aiperf itself never gets the key.
API_KEY_VARIABLE = "TRTX_BENCH_API_KEY"
# Makes aiperf 0.13.0 keep the body of each request until its record is written. By default it drops the bodies, because
# with the server's token counts it reads none of them.
KEPT_BODIES = {"AIPERF_RECORD_STRIP_PAYLOAD_BYTES": "false"}

__all__ = ["API_KEY_VARIABLE", "ENDPOINT_TYPE", "ENTRY_POINT", "ENTRY_POINT_GROUP", "KEPT_BODIES"]
