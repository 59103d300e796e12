"""The encoder's process: a checkpoint's vision tower and projector, as transformers computes them, without its decoder.

Owns their weights, the batches of pictures that wait together, and an answer for each of them. It looks at no picture
file and runs no image processor (``trtx.media`` does), and keeps no embedding: that is its caller's. Enter through
``python -m trtx.torch_engine.vision.process FD``, which ``trtx.torch_engine.llmapi`` starts. It always holds that an
item that can't be encoded, or whose numbers are none, ends with an error of its own and harms no other.
"""
