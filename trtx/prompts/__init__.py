"""Prompts as transformers makes them: chat templates rendered by its Jinja, text encoded with the tokens that it adds.

``files`` reads what a checkpoint says about prompts, ``same`` proves from it that Dynamo's frontend makes the same, and
``maker`` makes them where it does not.
The room parses no HTTP: ``trtx.frontend`` puts the token ids into requests.
transformers is imported by ``maker`` alone, and only once a prompt maker is created.
"""
