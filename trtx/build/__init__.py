"""Makes a checkpoint ready to serve: quantizes it with ModelOpt, and adds engine configs, a manifest and a proof.

Owns the formats, the calibration text, the child process that quantizes, the atomic creation of the build directory,
and the proof, which compares the build with its source. Does not serve, and prints nothing.
Enter through :func:`build`. Invariants: a returned directory is complete, its name contains a hash of everything that
determines its bytes, and it loads wherever a Hugging Face checkpoint does.
"""

from trtx.build.builder import Build, build
from trtx.build.formats import FORMATS, NO_FORMAT
from trtx.build.manifest import Manifest, read_manifest
from trtx.build.plan import BuildRequest
from trtx.build.progress import BuildProgress
from trtx.build.proof import Proof

__all__ = [
    "FORMATS",
    "NO_FORMAT",
    "Build",
    "BuildProgress",
    "BuildRequest",
    "Manifest",
    "Proof",
    "build",
    "read_manifest",
]
