"""What runs in a pool's processes alone: pictures, a model's image processor and files of embeddings become arrays.

It neither fetches nor judges who may send what (``trtx/media`` does, in the worker). Enter by ``process``. Whatever a
file holds, the worst that happens is the end of this process, which takes one file with it.
"""
