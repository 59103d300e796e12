"""Dynamo's OpenAI frontend with what this topology needs put right around it.

Owns the HTTP listener's socket options and the event plane's local ZMQ broker.
Does not parse, tokenize or route a request: ``dynamo.frontend`` does, in this process, with its own flags.
Enter with ``python -m trtx.frontend``.
Nothing listens beyond the addresses that the command line names: the broker on loopback only, HTTP on ``--http-host``.
"""
