"""One request inside a worker: parsing, validation, planning per role, and conversion of results to chunks."""
