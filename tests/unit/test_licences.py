"""docs/licences.md lists each package that trtx brings along, with its licence as the installed package states it.

``make goldens`` writes the list anew. Fails on a licence that is not known, and on a copyleft one, or a bundled library
under one, without a decision in the table "Decisions" of that page.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = "trtx"
START, END = "<!-- packages: written by make goldens -->\n", "<!-- end of packages -->\n"

# What packages write in place of an SPDX expression.
SPDX = {
    "apache": "Apache-2.0", "apache 2": "Apache-2.0", "apache-2": "Apache-2.0", "apache license 2": "Apache-2.0",
    "apache license version 2": "Apache-2.0", "apache license": "Apache-2.0", "apache software license": "Apache-2.0",
    "apache license, version 2": "Apache-2.0", "apache 2 license": "Apache-2.0",
    "mit": "MIT", "mit license": "MIT", "the mit license (mit)": "MIT", "bsd": "BSD", "bsd license": "BSD",
    "bsd 3-clause license": "BSD-3-Clause", "bsd 3-clause": "BSD-3-Clause", "3-clause bsd license": "BSD-3-Clause",
    "isc": "ISC", "isc license (iscl)": "ISC", "isc license": "ISC", "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0", "zero-clause bsd (0bsd)": "0BSD", "gplv2": "GPL-2.0-only",
    "gnu general public license v2 (gplv2)": "GPL-2.0-only", "gnu gplv3+": "GPL-3.0-or-later",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v2 or later (lgplv2+)": "LGPL-2.0-or-later",
    "mozilla public license 2 (mpl 2)": "MPL-2.0",
}  # fmt: skip
_EXPRESSION = re.compile(
    r"[A-Za-z0-9.+-]*\d[A-Za-z0-9.+-]*|MIT(-0|-CMU)?|ISC|BSD|Zlib|CNRI-Python|LLVM-exception|OR|AND|WITH|\(|\)"
)
COPYLEFT = re.compile(r"GPL|MPL|EPL|CDDL|EUPL|CECILL|OSL|SSPL|CC-BY-SA")
# Libraries under a copyleft licence that wheels are known to bundle, by the beginning of the file's name.
BUNDLED = {
    "libx264": "GPL-2.0-or-later", "libx265": "GPL-2.0-or-later", "libavcodec": "LGPL-3.0-or-later",
    "libavformat": "LGPL-3.0-or-later", "libswscale": "LGPL-3.0-or-later", "libmp3lame": "LGPL-2.0-or-later",
    "libgnutls": "LGPL-2.1-or-later", "libnettle": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "libgmp": "LGPL-3.0-or-later OR GPL-2.0-or-later", "libunistring": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "libasound": "LGPL-2.1-or-later", "libsndfile": "LGPL-2.1-or-later", "libzmq": "MPL-2.0",
    "libgomp": "GPL-3.0-or-later WITH GCC-exception-3.1", "libgfortran": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "libquadmath": "LGPL-2.1-or-later", "libQt5": "LGPL-3.0-only", "libheif": "LGPL-3.0-or-later",
    "libde265": "LGPL-3.0-or-later", "libfribidi": "LGPL-2.1-or-later", "libraqm": "MIT",
}  # fmt: skip


@dataclass(frozen=True)
class Locked:
    name: str
    licence: str  # an SPDX expression; "": not known
    bundled: tuple[str, ...]  # libraries of BUNDLED in its wheel
    comes_with: tuple[str, ...]  # trtx, or its extras

    @property
    def needs_a_decision(self) -> bool:
        return not self.licence or bool(COPYLEFT.search(self.licence)) or bool(self.bundled)

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.licence or 'not stated'} | {', '.join(self.comes_with)} |"


def spdx(text: str) -> str:
    """As SPDX writes it; "" for a text whose first line says no licence by a known name."""
    text = text.strip().partition("\n")[0]
    short = re.sub(r"(?<=\d)\.0\b", "", text.strip().lower())
    if short in SPDX:
        return SPDX[short]
    words = text.replace("(", " ( ").replace(")", " ) ").split()
    return text.strip() if words and all(_EXPRESSION.fullmatch(word) for word in words) else ""


def licence_of(distribution: metadata.Distribution) -> str:
    """Its expression, else its field, else its classifiers."""
    about = distribution.metadata
    stated = [*about.get_all("License-Expression", []), *about.get_all("License", [])]
    if found := next(filter(None, map(spdx, stated)), ""):
        return found
    classifiers = [one.split(" :: ")[-1] for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    return " OR ".join(dict.fromkeys(filter(None, map(spdx, classifiers))))


def bundled_in(distribution: metadata.Distribution) -> tuple[str, ...]:
    names = {file.name for file in distribution.files or () if ".so" in file.name}
    return tuple(sorted(one for one in BUNDLED if any(re.match(rf"{one}\b|{one}[-_.]", name) for name in names)))


def locked() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of all packages that these bring, as installed ones say what they need."""
    todo, done = [Requirement(one) for one in requirements], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            try:
                needed = metadata.requires(name) or ()
            except metadata.PackageNotFoundError:
                continue
            todo += [
                one for one in map(Requirement, needed) if one.marker is None or one.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in done}


@cache
def packages() -> tuple[Locked, ...]:
    groups = {BASE: PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    brought = {group: closure(requirements) for group, requirements in groups.items()}
    found = []
    for name in sorted(locked()):
        distribution = metadata.distribution(name)
        by = tuple(group for group, names in brought.items() if name in names)
        by = (BASE,) if BASE in by else by
        found.append(Locked(name, licence_of(distribution), bundled_in(distribution), by))
    return tuple(found)


def table_under(heading: str) -> dict[str, list[str]]:
    """Rows of the page's table under a heading, by their first column."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.slow
def test_the_page_lists_each_locked_package_with_its_licence() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    kept, _, after = rest.partition(END)
    rows = "\n".join(["| Package | Licence | Comes with |", "|---|---|---|", *(one.row for one in packages())]) + "\n"
    if os.environ.get("TRTX_WRITE_GOLDEN") and kept != rows:
        PAGE.write_text(before + START + rows + END + after, encoding="utf-8")
        pytest.fail(f"{PAGE} was written; look at it (git diff), then run the tests without TRTX_WRITE_GOLDEN")
    assert kept == rows, f"the packages of {PAGE.name} are not those of requirements.lock; make goldens writes them"


def test_every_dependency_that_is_declared_is_listed() -> None:
    listed = locked() | table_under("Not in the lock").keys()
    declared = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    assert not {canonicalize_name(Requirement(one).name) for one in declared} - listed


def test_a_licence_that_is_copyleft_or_unknown_has_a_decision() -> None:
    decided = table_under("Decisions")
    undecided = {one.name: one.licence or "not stated" for one in packages() if one.needs_a_decision}
    lacking = {name: licence for name, licence in undecided.items() if name not in decided}
    assert not lacking, f"decide about each in the table Decisions of {PAGE.name}, or drop the package: {lacking}"
    stale = decided.keys() - undecided.keys()
    assert not stale, f"{PAGE.name} decides about packages that need no decision any more: {sorted(stale)}"


def test_each_decision_names_the_licence_and_the_bundled_libraries_that_it_is_about() -> None:
    for one in packages():
        if one.needs_a_decision:
            what, why = table_under("Decisions")[one.name]
            told = [*({one.licence} if COPYLEFT.search(one.licence) else ()), *(BUNDLED[name] for name in one.bundled)]
            assert all(licence in what for licence in told), f"{one.name}: {what!r} lacks one of {told}"
            assert all(name in what for name in one.bundled), f"{one.name}: {what!r} lacks one of {one.bundled}"
            assert why, one.name


def test_what_is_under_the_gpl_comes_with_extras_that_nothing_else_brings() -> None:
    gpl = re.compile(r"(?<!L)GPL-[23]\.0-(only|or-later)(?! WITH GCC-exception)")
    found = {
        extra
        for one in packages()
        for licence in (one.licence, *map(BUNDLED.__getitem__, one.bundled))
        if gpl.search(licence)
        for extra in one.comes_with
    }
    assert found == {"video", "longbench"}, "a package under the GPL gets an extra of its own, which the page names"


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ("Apache License, Version 2.0", "Apache-2.0"),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", "MPL-2.0 AND (Apache-2.0 OR MIT)"),
        ("GPLv2", "GPL-2.0-only"),
        ("UNKNOWN", ""),
        ("LICENCE.txt", ""),
        ("Proprietary", ""),
        ("Copyright (c) 2015, the authors", ""),
    ],
)
def test_a_text_that_names_no_known_licence_is_unknown(stated: str, meant: str) -> None:
    assert spdx(stated) == meant
