"""The code of the pool's processes: turns images, videos and embedding files into arrays.

Does not fetch and does not decide what a client may send (``trtx/media`` does, in the worker). Entry point:
``process``. Whatever a file contains, the worst outcome is the end of this process, which fails only that file.
"""
