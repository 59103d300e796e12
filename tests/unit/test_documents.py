"""What README, CONTRIBUTING and docs/ say that a program can check: commands, links, paths, variables, make targets."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.exceptions import TyperException

from trtx.cli import app
from trtx.errors import TrtxError

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
FENCED = re.compile(r"^( *)```[a-z]*\n(?P<body>.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)(?P<after>.{0,30})", re.DOTALL)
LINK = re.compile(r"\[[^][]*\]\((?P<target>[^)\s]+)\)")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*trtx (?P<words>[a-z-].*)")
OF_THE_PAST = re.compile(r"\s*(?:at|of) commit [0-9a-f]{7,}")
ELSEWHERE = re.compile(r"<|…|/path|/models|tensorrt_llm/")


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks_of(text: str) -> Iterator[str]:
    """Lines of the code blocks, each continued line with what follows it."""
    for block in FENCED.finditer(text):
        yield from re.sub(r"\\\n\s*", " ", block["body"]).splitlines()


def spans_of(text: str) -> Iterator[str]:
    """Code spans on one line, without those that the page attributes to an older commit."""
    for span in SPAN.finditer(FENCED.sub("\n", text)):
        if not OF_THE_PAST.match(span["after"]):
            yield re.sub(r"\s+", " ", span["code"]).strip().replace("\\|", "|")


def split_verb(words: list[str]) -> tuple[str, list[str]]:
    verb = " ".join(words[:2]) if " ".join(words[:2]) in app.VERBS else words[0]
    return verb, words[len(verb.split()) :]


@cache
def command_of(verb: str):  # type: ignore[no-untyped-def]
    return app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]


@cache
def options_of(verb: str) -> frozenset[str]:
    names = [name for parameter in command_of(verb).params for name in (*parameter.opts, *parameter.secondary_opts)]
    return frozenset(names) | {"--help", "--help-all", "--version"}


def parsing_fault(line: str) -> str | None:
    """Why ``trtx`` does not take a command that a code block shows, or None. ``a|b`` is one of two values."""
    found = COMMAND.match(line.strip())
    if found is None:
        return None
    words = re.sub(r"(?<=\w)\|[\w|]+", "", re.split(r"\s{2,}| [|>&;#]", found["words"])[0])
    words = re.sub(r"[][]", "", words)
    if "…" in words or " / " in words:
        return naming_fault(f"trtx {words}")
    verb, rest = split_verb(shlex.split(words))
    if verb not in app.VERBS:
        return naming_fault(f"trtx {words}")
    if not rest:
        return None
    try:
        command_of(verb).make_context(verb, rest)
    except (TyperException, TrtxError) as error:
        return f"trtx {words}: {getattr(error, 'message', None) or error}"
    except typer.Exit:
        return None
    return None


def naming_fault(code: str) -> str | None:
    """Which verb or option that prose mentions does not exist, or None."""
    found = COMMAND.match(code)
    if found is None:
        return None
    words = re.split(r"[\s=|\[\]()]+", found["words"])
    verb, rest = split_verb(words)
    if verb.startswith("-"):
        return None
    if verb not in app.VERBS and not any(known.startswith(f"{verb} ") for known in app.VERBS):
        return f"{code}: there is no verb {verb}"
    verbs = [known for known in app.VERBS if known == verb or known.startswith(f"{verb} ")]
    wrong = [word for word in rest if word.startswith("--") and not any(word in options_of(known) for known in verbs)]
    return f"{code}: there is no option {wrong[0]}" if wrong else None


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCED.sub("\n", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_fault(document: Path, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    page = (document.parent / path).resolve() if path else document
    if not page.exists():
        return f"{target}: {path} does not exist"
    if anchor and page.suffix == ".md" and anchor not in anchors_of(page.read_text(encoding="utf-8")):
        return f"{target}: no heading has this anchor"
    return None


@cache
def sources() -> str:
    """All of the project's own code, where a name that a document mentions has to occur."""
    folders = ("trtx", "tests", "benchmarks", "tools", ".ci")
    suffixes = {".py", ".sh", ".j2", ""}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    files = [path for path in files if path.is_file() and path != Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


@cache
def repository_paths() -> frozenset[str]:
    """Each file and folder of the repository, with every shorter form of it that a page may use."""
    found = set()
    for folder in ("trtx", "tests", "benchmarks", "tools", "engine_configs", "sweeps", "docs", ".ci"):
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            parts = path.relative_to(ROOT).parts
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return frozenset(found)


def path_fault(code: str) -> str | None:
    """Names a source file that the repository lacks. Other files than ``.py`` may belong to a run or to a user."""
    if ELSEWHERE.search(code) or not re.fullmatch(
        r"[\w./-]+/[\w.-]+\.py|(?:trtx|tests|benchmarks|tools)/[\w./-]+", code
    ):
        return None
    return None if code.rstrip("/") in repository_paths() else f"{code}: the repository has no such file"


def variable_fault(code: str) -> str | None:
    for name in re.findall(r"\bTRTX_[A-Z_]+\b", code):
        if name not in sources():
            return f"{name}: nothing reads this variable"
    return None


def make_fault(code: str) -> str | None:
    found = re.match(r"make ([a-z][a-z-]*(?: [a-z][a-z-]*)*)", code.strip())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    missing = [target for target in found[1].split() if target not in targets] if found else []
    return f"{code}: the Makefile has no target {missing[0]}" if missing else None


def faults(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    spans = list(spans_of(text))
    found = [parsing_fault(line) for line in blocks_of(text)]
    found += [make_fault(line.split("#")[0]) for line in blocks_of(text)]
    found += [check(span) for span in spans for check in (naming_fault, path_fault, variable_fault, make_fault)]
    found += [link_fault(document, link["target"]) for link in LINK.finditer(FENCED.sub("\n", text))]
    return [fault for fault in found if fault is not None]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists_and_its_commands_parse(document: Path) -> None:
    found = faults(document)
    assert not found, f"{document.relative_to(ROOT)} says what does not hold:\n" + "\n".join(found)


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link["target"]).resolve() for link in LINK.finditer(index.read_text(encoding="utf-8"))}
    folders = ("", "guides", "reference", "upstream")
    pages = {path for folder in folders for path in (ROOT / "docs" / folder).glob("*.md") if path != index}
    missing = sorted(str(path.relative_to(ROOT)) for path in pages - linked)
    assert not missing, f"add a row for each of these pages to docs/index.md: {missing}"


def test_decisions_are_numbered_in_turn() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(path.name[:3]) for path in pages] == list(range(1, len(pages) + 1))


REFERENCE = load_script(ROOT / "tools" / "reference.py")


@pytest.mark.parametrize("page", sorted(REFERENCE.marked_pages()), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == REFERENCE.filled(text), f"{page.relative_to(ROOT)} is out of date: run `{REFERENCE.COMMAND}`"


def test_every_table_has_a_page() -> None:
    shown = {name for page in REFERENCE.marked_pages() for name in REFERENCE.names_in(page)}
    assert shown == REFERENCE.TABLES.keys(), f"tools/reference.py and docs/ differ in {shown ^ REFERENCE.TABLES.keys()}"


def test_no_line_is_longer_than_an_editor_shows() -> None:
    long = [
        f"{document.relative_to(ROOT)}:{number}"
        for document in DOCUMENTS
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 200 and not line.lstrip().startswith("|")
    ]
    assert not long, f"these lines have more than 200 characters: {long}"


def test_the_architecture_is_short() -> None:
    words = len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    assert words <= 2500, (
        f"docs/architecture.md has {words} words, at most 2,500 are wanted: move details to other pages"
    )


def test_the_page_about_dynamo_names_every_module_that_depends_on_its_release() -> None:
    page = ROOT / "docs" / "upstream" / "dynamo.md"
    named = page.read_text(encoding="utf-8")
    modules = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "trtx").rglob("*.py"))
        if re.search(r"(?<!trtx:)1\.(4\.2|6\.1)", path.read_text(encoding="utf-8"))  # but for tags of trtx's own images
    ]
    missing = [module for module in modules if f"`{module}`" not in named]
    assert not missing, f"say in {page.relative_to(ROOT)} what these modules work around or rely on: {missing}"
