"""Exports a planned topology as files for Kubernetes, Slurm or nginx, and files with which others watch it.

Owns the content of these files, with one package or module for each target. Does not plan (``topology`` does), and
starts and submits nothing. Enter through a target's ``export`` function, then :func:`write_files`.
Invariants: a file contains no unfilled template and no secret, and explains at its top how to run it. A variable or
flag of the plan without an explicit rule for the target is an error; it is never silently dropped.
"""

from trtx.export.files import ExportedFile, as_one_text, write_files

__all__ = ["ExportedFile", "as_one_text", "write_files"]
