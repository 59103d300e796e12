"""The endpoint that trtx gives aiperf, as a plugin: aiperf's own for chat, where only a whole answer is a success.

Owns ``plugins.yaml``, which aiperf finds through the entry point ``aiperf.plugins`` of the installed trtx, and the
classes that it names. Does not send, time or judge: aiperf does the first two, ``bench/answers.py`` the last.
Enter through ``--endpoint-type`` :data:`ENDPOINT_TYPE`; ``chat`` is imported by aiperf's processes alone.
Always holds: an aiperf that does not know the endpoint refuses the command line, so no answer goes unjudged.
"""

ENDPOINT_TYPE = "trtx_chat"
ENTRY_POINT_GROUP = "aiperf.plugins"
ENTRY_POINT = "trtx"
API_KEY_VARIABLE = "TRTX_BENCH_API_KEY"  # how bench hands the endpoint a key, which aiperf itself never has

__all__ = ["API_KEY_VARIABLE", "ENDPOINT_TYPE", "ENTRY_POINT", "ENTRY_POINT_GROUP"]
