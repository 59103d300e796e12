"""Checks whether Python and the packages fit trtx and each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from trtx.doctor.check import Check, absent, failed, ok, warning
from trtx.doctor.facts import Facts, Software
from trtx.doctor.judge.requirements import Unmet, is_met, requirements, unmet
from trtx.engine import needs_gpu

# Row -> its packages. Problems of all other packages share one row.
_ROWS = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "ai-dynamo": ("ai-dynamo", "ai-dynamo-runtime"),
    "aiperf": ("aiperf",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
}
_LISTED = 4
_DYNAMO_EXTRA = "dynamo"  # of trtx; names the release of ai-dynamo
_UNUSED_BY_DYNAMO = frozenset({"aisimulate"})  # ai-dynamo 1.6.1 requires it for its planner alone


def judge_software(facts: Facts) -> Iterator[Check]:
    software = facts.software
    yield _engine(facts)
    yield _python(software)
    problems = [*unmet(software.packages, "trtx"), *unmet(software.packages, "trtx", _DYNAMO_EXTRA)]
    problems += unmet(software.packages, "ai-dynamo", unused=_UNUSED_BY_DYNAMO)
    problems += unmet(software.packages, "tensorrt-llm")  # not nixl's: it requires both CUDA wheels and needs one
    yield _trtx(software, problems)
    for name, members in _ROWS.items():
        own = [problem for problem in problems if problem.name in members]
        yield _refused(name, own) if own else _nixl(software) if name == "nixl" else _installed(software, name)
    yield _tensorrt_llm(facts)
    if facts.tensorrt_llm is not None and needs_gpu(facts.tensorrt_llm):
        yield _mpi(software)
    if facts.gpus.visible:
        yield _cuda_bindings(software)
        yield _extra(
            software, "cudnn", "nvidia-cudnn-frontend", "cudnn", "faster attention of long prompts on Hopper GPUs"
        )
    yield _extra(software, "modelopt", "nvidia-modelopt", "quantize", "trtx build --quant")
    yield _extra(software, "lm-eval", "lm-eval", "eval", "trtx eval, and eval in a sweep,")
    yield _video(software)
    rest = [p for p in problems if not any(p.name in members for members in _ROWS.values())]
    if rest:
        yield _refused("other packages", rest)


def _engine(facts: Facts) -> Check:
    count = len(facts.gpus.visible)
    where = "on the CPU: no GPU" if not count else f"on {count} GPU{'s' if count > 1 else ''}"
    if not count and facts.needs_gpu:
        return failed(
            "engine",
            "tensorrt-llm, and no GPU is visible",
            "an NVIDIA GPU",
            "--engine torch serves on the CPU; see the row driver for why there is no GPU",
        )
    asked = " (auto)" if facts.engine_asked == "auto" else ""
    return ok("engine", f"{facts.engine}{asked}, {where}")


def _python(software: Software) -> Check:
    wanted = software.requires_python
    if wanted is not None and not SpecifierSet(wanted).contains(software.python, prereleases=True):
        return failed(
            "python", software.python, wanted, f"make the environment with a Python {wanted}, such as 3.12, and install"
        )
    return ok("python", software.python, wanted or "")


def _trtx(software: Software, problems: Sequence[Unmet]) -> Check:
    if "trtx" not in software.packages:
        return warning(
            "trtx",
            "runs from its sources, so its requirements are unknown",
            "an installed package",
            "pip install -e . in its checkout",
        )
    own = sum(problem.by == "trtx" for problem in problems)
    count = sum(1 for _ in requirements(software.packages, "trtx"))
    return ok("trtx", f"{software.packages['trtx'].version}; {count - own} of its {count} requirements are met")


def _installed(software: Software, name: str) -> Check:
    package = software.packages.get(name)
    if package is None:
        return failed(name, "not installed", "installed", f"pip install {name}")
    if name == "torch":
        return ok(name, f"{package.version}, {f'CUDA {software.torch_cuda}' if software.torch_cuda else 'no CUDA'}")
    return ok(name, package.version)


def _refused(name: str, problems: Sequence[Unmet]) -> Check:
    """Returns the row of unmet requirements.

    It is a failure for requirements of trtx and Dynamo and for the torch that TensorRT-LLM was built against, else a
    warning.
    """
    must = [problem for problem in problems if problem.by != "tensorrt-llm" or problem.name == "torch"]
    listed = "; ".join(str(problem) for problem in problems[:_LISTED])
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    wanted = " ".join(f"'{problem.wanted}'" for problem in (must or problems))
    row = failed if must else warning
    no_deps = "--no-deps " if name == "ai-dynamo" else ""  # it requires aisimulate
    return row(name, listed + more, wanted.replace("'", ""), f"pip install {no_deps}{wanted}")


def _nixl(software: Software) -> Check:
    """Checks NIXL. ``import nixl`` loads the backend wheel of torch's CUDA release, or any if torch has no CUDA
    (NIXL 1.5.1)."""
    versions = {name: package.version for name, package in software.packages.items() if name in _ROWS["nixl"]}
    if "nixl" not in versions:
        return failed("nixl", "not installed", "installed", "pip install nixl")
    own = versions["nixl"]
    seen = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if any(version != own for version in versions.values()):
        return failed("nixl", seen, f"all {own}", f"pip install nixl-cu12=={own} nixl-cu13=={own}")
    if software.torch_cuda is not None:
        backend = f"nixl-cu{software.torch_cuda.split('.')[0]}"
        if backend not in versions:
            return failed("nixl", seen, f"{backend} for torch's CUDA", f"pip install {backend}=={own}")
        return ok("nixl", f"{own}, {backend} for torch's CUDA {software.torch_cuda}")
    if len(versions) == 1:
        return failed("nixl", f"{seen} without a backend", "nixl-cu12 or nixl-cu13", f"pip install nixl-cu13=={own}")
    return ok("nixl", f"{own}, for CPU memory")


def _tensorrt_llm(facts: Facts) -> Check:
    version, packages = facts.tensorrt_llm, facts.software.packages
    extra = [r for r in requirements(packages, "trtx", "tensorrt-llm") if canonicalize_name(r.name) == "tensorrt-llm"]
    wanted = str(extra[0].specifier) if extra else ""
    if version is None:
        if facts.engine == "tensorrt-llm":
            return failed(
                "tensorrt_llm", "not installed", wanted, "pip install 'trtx[tensorrt-llm]', or choose --engine torch"
            )
        return absent("tensorrt_llm", "not installed: the torch engine serves")
    if extra and not is_met(packages, extra[0]):
        return failed("tensorrt_llm", version, wanted, f"pip install 'tensorrt_llm{wanted}'")
    if not needs_gpu(version):
        return ok("tensorrt_llm", f"{version}: a stand-in, which computes without a GPU", wanted)
    built = [r for r in requirements(packages, "ai-dynamo", "trtllm") if canonicalize_name(r.name) == "tensorrt-llm"]
    if built and not is_met(packages, built[0]):
        dynamo = packages["ai-dynamo"].version
        return warning(
            "tensorrt_llm",
            version,
            f"{built[0].specifier}, which ai-dynamo {dynamo} is built against",
            f"pip install 'tensorrt_llm{built[0].specifier}' if a worker does not start",
        )
    return ok("tensorrt_llm", version, wanted)


def _mpi(software: Software) -> Check:
    """Checks MPI, with which TensorRT-LLM starts its ranks. Open MPI 5 with mpi4py 3 can't spawn them (ai-dynamo
    #15060)."""
    mpi4py = software.packages.get("mpi4py")
    if software.open_mpi is None:
        return warning(
            "MPI",
            "no mpirun of Open MPI on PATH",
            "Open MPI, which TensorRT-LLM's wheel loads",
            "apt-get install libopenmpi-dev openmpi-bin",
        )
    seen = f"Open MPI {software.open_mpi}, mpi4py {mpi4py.version if mpi4py else 'not installed'}"
    if mpi4py is not None and Version(software.open_mpi) >= Version("5") and Version(mpi4py.version) < Version("4"):
        return warning(
            "MPI",
            seen,
            "mpi4py 4 with Open MPI 5",
            "pip install 'mpi4py>=4', or start engines of several GPUs under trtllm-llmapi-launch",
        )
    return ok("MPI", seen)


def _extra(software: Software, row: str, name: str, extra: str, user: str) -> Check:
    """Checks a package of one of trtx's extras. ``user``: the feature that needs it."""
    package = software.packages.get(name)
    if package is None:
        return absent(row, f"not installed: {user} needs it (pip install 'trtx[{extra}]')")
    for requirement in requirements(software.packages, "trtx", extra):
        if canonicalize_name(requirement.name) == name and not is_met(software.packages, requirement):
            wanted = str(requirement.specifier)
            return warning(row, package.version, wanted, f"pip install '{name}{wanted}'")
    return ok(row, package.version)


def _cuda_bindings(software: Software) -> Check:
    """Checks the package with which the torch engine allocates memory that it can release or share."""
    package = software.packages.get("cuda-bindings")
    if package is None:
        needed = "not installed: sleep_config and --share-weights need it on a GPU (pip install cuda-bindings)"
        return absent("cuda-bindings", needed)
    return ok("cuda-bindings", package.version)


def _video(software: Software) -> Check:
    found = _extra(software, "av", "av", "video", "serving videos")
    if found.status == "ok" and software.gpl_codecs:
        return ok("av", f"{found.seen}; its wheel holds {' and '.join(software.gpl_codecs)}, under the GPL")
    return found
