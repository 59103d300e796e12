"""Judges sweep points: validity checks, SLO objectives, and the gate against a baseline.

The validity checks are records in ``record_checks.py`` (from aiperf's records alone) and ``server_checks.py`` (from the
launcher, the GPUs and the machine); ``checks.py`` has their type.
"""
