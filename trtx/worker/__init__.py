"""One worker process: Dynamo's ``LLMEngine`` contract outside, the LLM API of ``trtx.engine`` inside.

Owns what lies between the two: requests, roles, chunks, drain, metrics, KV events, the status file.
Does not schedule, compute or move KV (the engine does), and does not route, tokenize or speak HTTP (Dynamo does).
Enter with ``python -m trtx.worker``.
Every stream ends with exactly one terminal chunk or one error, and one request's fault never takes the worker out.
"""
