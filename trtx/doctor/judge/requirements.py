"""Finds unmet requirements of installed packages from their own metadata, without a second list of versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trtx.doctor.facts import Package


@dataclass(frozen=True, slots=True)
class Unmet:
    """A requirement of the package ``by`` that is not met. ``found``: the installed version; None: not installed."""

    by: str
    name: str  # normalized
    specifier: str  # such as <6,>=5.10; empty: any version
    found: str | None

    @property
    def wanted(self) -> str:
        """The requirement in pip's syntax."""
        return self.name + self.specifier

    def __str__(self) -> str:
        return f"{self.name} is {self.found or 'not installed'}, and {self.by} wants {self.specifier or 'it'}"


def requirements(packages: Mapping[str, Package], by: str, extra: str = "") -> Iterator[Requirement]:
    """Yields the requirements of ``by`` that apply here; with ``extra``, only those that the extra adds.

    Yields nothing if ``by`` is not installed.
    """
    for text in packages[by].requires if by in packages else ():
        requirement = Requirement(text)
        if _applies(requirement, extra) and not (extra and _applies(requirement, "")):
            yield requirement


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def unmet(
    packages: Mapping[str, Package], by: str, extra: str = "", unused: frozenset[str] = frozenset()
) -> Iterator[Unmet]:
    """Yields the requirements of an installed package that are not met; with ``extra``, only those that the extra adds.

    ``unused``: normalized names of packages that nothing here imports, which may be missing.
    """
    for requirement in requirements(packages, by, extra):
        name = canonicalize_name(requirement.name)
        if not is_met(packages, requirement) and not (name in unused and name not in packages):
            found = packages.get(canonicalize_name(requirement.name))
            yield Unmet(
                by, canonicalize_name(requirement.name), str(requirement.specifier), found.version if found else None
            )


def is_met(packages: Mapping[str, Package], requirement: Requirement) -> bool:
    """Returns whether a requirement is met. Pre-releases count, because most releases of TensorRT-LLM are."""
    found = packages.get(canonicalize_name(requirement.name))
    return found is not None and requirement.specifier.contains(found.version, prereleases=True)
