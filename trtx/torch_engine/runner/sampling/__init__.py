"""How a row of logits becomes a token: one definition in integers, which torch and the Triton kernels compute alike."""
