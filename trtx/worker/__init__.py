"""One worker process: implements Dynamo's ``LLMEngine`` contract on top of the LLM API of ``trtx.engine``.

Owns everything between the two: request parsing, roles, response chunks, draining, metrics, KV events, the status file.
Does not schedule, compute or transfer KV (the engine does), and does not route, tokenize or speak HTTP (Dynamo does).
Entry point: ``python -m trtx.worker``. Every stream ends with exactly one terminal chunk or one error, and a faulty
request never takes the worker down.
"""
