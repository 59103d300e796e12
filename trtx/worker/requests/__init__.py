"""One request inside a worker: parsing, validation, planning per role, and conversion of results to chunks.

``fields.py`` has a row for each field of a request, honoured or refused. ``grammars.py`` makes the grammar of
``response_format``, ``guided_*`` and a forced tool call. ``roles.py`` plans, ``generation.py`` streams.
"""
