"""The command line: parses arguments, calls the other rooms, prints, and exits.

Owns all terminal output and all exit codes.
Does no work itself: the verbs call ``experiment``, ``launch`` and ``report``.
Enter through :func:`trtx.cli.app.main`.
Invariant: ``trtx --help`` imports neither torch nor dynamo nor pandas.
"""
