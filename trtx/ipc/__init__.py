"""Data between the processes of a worker: tensors in shared files, and the encoder's messages."""
