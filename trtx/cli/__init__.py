"""The command line: parses, calls, prints, exits.

Owns every word that reaches a terminal and every exit code.
Does no work: the verbs call ``experiment``, ``launch`` and ``report``.
Enter through :func:`trtx.cli.app.main`.
Always holds: ``trtx --help`` imports no torch, no dynamo and no pandas.
"""
