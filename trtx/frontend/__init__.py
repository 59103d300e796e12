"""Dynamo's OpenAI frontend, and the parts that a topology needs in addition.

Owns the HTTP listener's socket options, the event plane's local ZMQ broker, a route that lists workers, and an HTTP
proxy in front of Dynamo's port (``http_proxy.py``). The proxy is used if one of its tasks is needed: it puts token ids
into requests whose prompts Dynamo may render differently from transformers, drops tool calls that ``max_tokens`` cut,
bounds queue and duration of requests, and explains the 503 of a model that sleeps. ``trtx.prompts`` makes the prompts.
``dynamo.frontend`` does everything else, in this process, with its own flags. Enter with ``python -m trtx.frontend``.
Invariant: it listens only on the addresses in its command line: the broker on loopback, HTTP on ``--http-host``.
"""
