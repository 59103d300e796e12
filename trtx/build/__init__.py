"""Makes a checkpoint ready to serve: quantized by ModelOpt, with engine configs, a manifest, and a proof of it.

Owns formats, calibration text, the child that quantizes, the directory that is whole or not there, and the proof
against the source. Does not serve, and prints nothing.
Enter through :func:`build`. A directory that it returns is complete, named by the hash of everything that decided its
bytes, and loads wherever a Hugging Face checkpoint does.
"""

from trtx.build.builder import Build, build
from trtx.build.formats import FORMATS, NO_FORMAT
from trtx.build.manifest import Manifest, read_manifest
from trtx.build.plan import BuildRequest
from trtx.build.progress import Progress
from trtx.build.proof import Proof

__all__ = [
    "FORMATS",
    "NO_FORMAT",
    "Build",
    "BuildRequest",
    "Manifest",
    "Progress",
    "Proof",
    "build",
    "read_manifest",
]
