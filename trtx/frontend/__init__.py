"""Dynamo's OpenAI frontend with what this topology needs put right around it.

Owns the HTTP listener's socket options, the event plane's local ZMQ broker, and the door that puts transformers' token
ids into requests of models whose prompts Dynamo may make otherwise (``trtx.prompts`` makes them).
All else that becomes of a request is ``dynamo.frontend``'s, in this process, with its own flags.
Enter with ``python -m trtx.frontend``.
Nothing listens beyond the addresses that the command line names: the broker on loopback only, HTTP on ``--http-host``.
"""
