"""The documents of a run directory: forms and versions, shared by all packages that read or write them."""
