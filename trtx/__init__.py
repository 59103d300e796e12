"""Takes a model checkpoint to a measured, served topology on GPUs.

``from trtx import LLM, SamplingParams`` gives the embedded engine without a server (docs/python.md). The engine is
imported on the first access to one of its names, so that ``trtx --help`` loads no torch.
"""

from typing import TYPE_CHECKING, Any

from trtx.names import PUBLIC, public

if TYPE_CHECKING:
    from trtx.torch_engine.llmapi import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    return public(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
