"""docs/engine-configs.md tells the recipes and rules as they are: its tables are what these functions write."""

from __future__ import annotations

from trtx.config import recipe_files, recipe_names
from trtx.config.families import CONFIG_ROOT, read_header
from trtx.config.rules import RULES, PairRule, Rule

DOCUMENT = CONFIG_ROOT.parent / "docs" / "engine-configs.md"


def recipe_row(name: str) -> str:
    """GPUs are of one worker, in the order of its roles."""
    headers = {role: read_header(path.read_text(), name) for role, path in recipe_files(name).items()}
    workers = ", ".join(f"{role} {header.gpus}" for role, header in headers.items() if header)
    kinds = {role: " ".join(header.gpu) for role, header in headers.items() if header}
    gpus = kinds["agg"] if len(set(kinds.values())) == 1 else f"{kinds['agg']}; disaggregated {kinds['prefill']}"
    models = dict.fromkeys(header.model for header in headers.values() if header)
    versions = dict.fromkeys(header.tensorrt_llm for header in headers.values() if header)
    return f"| {name} | {', '.join(models)} | {workers} | {gpus} | {', '.join(versions)} |"


def rule_row(rule: Rule) -> str:
    roles = "; ".join(" + ".join(pair) for pair in rule.pairs) if isinstance(rule, PairRule) else ", ".join(rule.roles)
    engines = "every" if rule.every_engine else "tensorrt-llm"
    return f"| {rule.id} | {rule.severity} | {roles} | {engines} | {rule.reason} | {rule.evidence} |"


def table_after(heading: str) -> list[str]:
    """The rows below the head of the first table of a section."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_the_table_of_recipes_is_that_of_the_folders() -> None:
    assert table_after("Recipes") == [recipe_row(name) for name in recipe_names()]


def test_the_table_of_rules_is_that_of_the_records() -> None:
    rows, written = [rule_row(rule) for rule in RULES], table_after("Rules")
    lacking, stale = "\n".join(row for row in rows if row not in written), [row for row in written if row not in rows]
    assert written == rows, f"put into the table of rules, in the order of RULES:\n{lacking}\nand strike {stale}"
