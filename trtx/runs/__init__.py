"""The documents of a run directory: their forms and versions, for every room that writes or reads one."""
