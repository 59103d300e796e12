"""Data between the processes of a worker: tensors in shared files, leases, and the encoder's messages."""
