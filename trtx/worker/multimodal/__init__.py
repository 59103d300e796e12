"""Images and videos inside a worker: loading, encoding (here or on an encode worker), and the embedding cache."""
