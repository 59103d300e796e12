"""``trtx bench``: its spec, schedule, run, resumption and verdict."""
