"""A stand-in for TensorRT-LLM 1.3.0rc22 on ``trtx.torch_engine``: real tokens, and nothing that the real one lacks.

Its module tree is not in files: ``_facts.plant`` makes it from ``llm_api.json``. Implementations lie in ``_impl``,
switches for tests in ``_standin``. docs/trtllm-coverage.md says what it models, what it only shapes, what it lacks.
"""

from tensorrt_llm import _facts, _standin
from tensorrt_llm import version as version

__version__ = f"{_standin.VERSION}+cpu"
_facts.plant()
