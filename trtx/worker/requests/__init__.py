"""One request inside a worker: parsed, validated, planned, and its results turned into chunks."""
