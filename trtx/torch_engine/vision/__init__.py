"""The encoder's process: a checkpoint's vision tower and projector, computed as in transformers, without the decoder.

It owns their weights, batches waiting images, and answers each of them. ``trtx.media`` decodes image files and runs
image processors; the caller keeps the embeddings. The entry point is ``python -m trtx.torch_engine.vision.process FD``,
which ``trtx.torch_engine.llmapi`` starts. An item that can't be encoded, or whose result is not finite, ends with its
own error and affects no other item.
"""
