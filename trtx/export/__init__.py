"""A planned topology as files that others run: Kubernetes, Slurm, nginx.

Owns what such files hold and why; one room or module a target. Does not plan (``topology`` does), start or submit
anything. Enter through a target's own ``export`` function, then :func:`write_files`.
Always holds: a file has no template left in it and no secret, says at its top how it is run, and a variable or flag of
the plan that nobody has decided about there is an error, never left out.
"""

from trtx.export.files import ExportedFile, as_one_text, write_files

__all__ = ["ExportedFile", "as_one_text", "write_files"]
