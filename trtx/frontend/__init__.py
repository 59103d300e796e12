"""Dynamo's OpenAI frontend, with what it lacks for this topology.

Owns the HTTP listener's socket options, the event plane's local ZMQ broker, a route that lists workers, and the door.
The door puts transformers' token ids into requests if Dynamo may make a model's prompts differently, drops tool calls
that were cut from answers, and says how to wake a model that sleeps.
``trtx.prompts`` makes the prompts. ``dynamo.frontend`` does everything else, in this process, with its own flags.
Enter with ``python -m trtx.frontend``.
It listens only on the addresses in its command line: the broker on loopback, HTTP on ``--http-host``.
"""
