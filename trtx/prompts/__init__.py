"""Prompts exactly as transformers makes them: rendered by its Jinja, and encoded with the tokens that it adds.

``files`` reads a checkpoint's chat template and tokenizer config. ``same`` proves from them that Dynamo's frontend
makes the same prompts, and ``rendering`` makes the prompts if that can't be proved.
This room parses no HTTP: ``trtx.frontend`` puts the token ids into requests.
Only ``rendering`` imports transformers, when a prompt maker is created.
"""
