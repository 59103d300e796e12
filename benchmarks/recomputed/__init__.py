"""What a run says, computed a second time from aiperf's records; ``recompute_run.py`` beside it is the program.

Nothing of trtx is imported, so that a mistake there is not made here too.
"""
