"""Writes the tables of docs/ that follow from records in the code. Run it as ``make reference``.

A page shows a table between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. :data:`TABLES` maps each name to
the function that returns the table's lines. Everything outside the markers is written by hand.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)
COMMAND = "make reference"
LEAST_SHARED = 5  # options of a group that a verb shares with trtx serve, for a reference in place of a table

Lines = Iterable[str]


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A Markdown table."""
    heads = tuple(heads)
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield re.sub(r" +(?=\|)", " ", f"| {' | '.join(map(_escaped, row))} |")


def _escaped(value: object) -> str:
    """One line of a table's cell: pipes escaped, and < too outside of code spans, where it would begin a tag."""
    parts = re.sub(r"\s+", " ", str(value)).replace("|", "\\|").strip().split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def options(verbs: Iterable[str]) -> Iterator[str]:
    """The usage, arguments and options of each verb, in the groups of its ``--help``.

    A group that a verb shares with ``trtx serve`` is listed on the page of ``trtx serve`` only.
    """
    from trtx.cli.app import VERBS, Verbs

    def command(verb: str) -> Any:
        return Verbs().get_command(None, verb)

    served = _panels(command("serve"))
    for verb in verbs:
        yield from (f"## trtx {verb}", "", VERBS[verb][1], "")
        for panel, rows in _panels(command(verb)).items():
            shared = [row for row in served.get(panel, ()) if verb != "serve" and row in rows]
            is_short = len(shared) < LEAST_SHARED
            yield from (f"**{panel}**", "")
            if not is_short:
                others = [row[0].partition(" ")[0] for row in served[panel] if row not in shared]
                but = f", except {', '.join(others)}" if others else ""
                text = f"All options of [`trtx serve`](serve.md) in this group{but}."
                yield from (*textwrap.wrap(text, 180, break_on_hyphens=False), "")
            own = [row for row in rows if is_short or row not in shared]
            yield from (*table(("Option", "Effect"), own), "") if own else ()
        if epilog := command(verb).epilog:
            yield from (*textwrap.wrap(epilog, 118), "")


def _panels(command: Any) -> dict[str, list[tuple[str, str]]]:
    panels: dict[str, list[tuple[str, str]]] = {}
    for option in command.params:
        if not option.hidden:
            panels.setdefault(option.rich_help_panel or "General", []).append(_option(option))
    return panels


def _option(option: Any) -> tuple[str, str]:
    names = [*option.opts, *option.secondary_opts]
    if not names[0].startswith("-"):
        return f"`{option.metavar or names[0].upper()}`", option.help or ""
    shown = ", ".join(f"`{name}`" for name in names)
    if option.metavar and not getattr(option, "is_flag", False):
        shown += f" {' or '.join(f'`{value}`' for value in option.metavar.split('|'))}"
    return shown, option.help or ""


def metrics() -> Iterator[str]:
    from trtx.bench import metrics as _records  # noqa: F401 -- registers every metric
    from trtx.bench.metric_types import PerDevice, all_figures

    def row(record: Any) -> Iterator[str]:
        base = record.key("gpu")
        keys = list(record.flat(None, base))
        ends = ", ".join(f"`{key.removeprefix(base)}`" for key in keys)
        yield record.title.format(device="GPU")
        yield f"`{base}`" + (f" with {ends}" if len(keys) > 1 else "" if keys else " (only in `cell.json`)")
        yield record.unit.format(device="GPU")
        yield (record.of if isinstance(record, PerDevice) else record).window.__name__
        yield record.meaning

    yield from table(("Metric", "Key", "Unit", "Window", "Definition"), map(row, all_figures()))


def served_metrics() -> Iterator[str]:
    from trtx.worker.served_families import FAMILIES, trtllm_families

    return _served(family for name, family in FAMILIES.items() if name not in trtllm_families.FAMILIES)


def trtllm_metrics() -> Iterator[str]:
    from trtx.worker.served_families.trtllm_families import FAMILIES

    return _served(FAMILIES.values())


def queue_metrics() -> Iterator[str]:
    from trtx.frontend.queue_metrics import QUEUE_FAMILIES

    return _served(QUEUE_FAMILIES.values())


def upstream_metrics() -> Iterator[str]:
    from trtx.worker.upstream_families import UPSTREAM

    return _served(UPSTREAM.values())


def _served(families: Iterable[Any]) -> Iterator[str]:
    from trtx.engine.served_family import ROLES

    def row(family: Any) -> Iterator[str]:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        by = "every worker" if family.by == ROLES else ", ".join(family.by).replace(", ".join(ROLES), "every worker")
        yield from (f"`{family.name}`", family.kind, family.unit, labels)
        yield f"{by}, {family.when}" if family.when else by
        yield family.meaning

    yield from table(("Family", "Kind", "Unit", "Labels", "Served by", "Meaning"), map(row, families))


def checks() -> Iterator[str]:
    import trtx.bench.judge.validity  # noqa: F401 -- registers every check
    from trtx.bench.judge.checks import all_checks

    rows = ((one.name, one.suspect or "–", one.invalid or "–", one.why) for one in all_checks())
    yield from table(("Check", "SUSPECT", "INVALID", "Reason"), rows)


def causes() -> Iterator[str]:
    from trtx.bench.judge.causes import all_causes

    rows = ((one.name, one.sentence, one.needs, one.threshold, one.bound, one.advice) for one in all_causes())
    yield from table(("Cause", "What happens", "Evidence needed", "Threshold", "Bound", "What to try"), rows)


def stages() -> Iterator[str]:
    from trtx.bench.stages import STAGES

    yield from table(("Stage", "Covers"), STAGES.items())


def doctor_rows() -> Iterator[str]:
    """Every row with a warning or a failure, as the described machines of the doctor's tests show it."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "doctor"))
    from doctor_machines import MACHINES, rows

    shown: dict[tuple[str, str], Any] = {}
    names: dict[str, None] = {}
    for facts in MACHINES.values():
        for name, row in rows(facts).items():
            general = re.sub(r"\b\d+\b", "n", name)
            names[general] = None
            if row.status in ("warning", "failed"):
                shown.setdefault((general, row.status), row)
    ordered = [(name, status) for name in names for status in ("failed", "warning") if (name, status) in shown]
    rows_of = ((f"`{key[0]}`", key[1], shown[key].seen, shown[key].expected, shown[key].fix) for key in ordered)
    yield from table(("Row", "Status", "Found, for example", "Expected", "Fix"), rows_of)
    quiet = [name for name in names if not any((name, status) in shown for status in ("failed", "warning"))]
    yield from ("", "These rows only inform: " + ", ".join(f"`{name}`" for name in quiet) + ".")


def config_fields() -> Iterator[str]:
    from trtx.config.engine_uses import acts_on
    from trtx.config.torch_fields import FIELDS, FieldRefusal, Honoured

    def by_torch(record: Any) -> str:
        if isinstance(record, Honoured):
            where = " (GPU only)" if record.needs_gpu else ""
            return f"honoured{where}{', also by its vision encoder' if record.by_encoder else ''}"
        if isinstance(record, FieldRefusal):
            return f"refused: {record.because}"
        return f"left out: {record.because}"

    def other(engine: str, path: str) -> str:
        return "honoured" if acts_on(engine, "agg", path, {}, on_gpu=True) else "left out"

    rows = (
        (f"`{path}`", by_torch(record), other("paced", path), other("simulated", path))
        for path, record in sorted(FIELDS.items())
    )
    yield from table(("Field", "`torch`", "`paced`", "`simulated`"), rows)


def recipes() -> Iterator[str]:
    from trtx.config import recipe_files, recipe_names
    from trtx.config.families import read_header

    def row(name: str) -> Iterator[str]:
        read = {role: read_header(path.read_text(), name) for role, path in recipe_files(name).items()}
        headers = {role: header for role, header in read.items() if header is not None}
        kinds = {role: " ".join(header.gpu) for role, header in headers.items()}
        yield name
        yield ", ".join(dict.fromkeys(header.model for header in headers.values()))
        yield ", ".join(f"{role} {header.gpus}" for role, header in headers.items())
        yield kinds["agg"] if len(set(kinds.values())) == 1 else f"{kinds['agg']}; disaggregated {kinds['prefill']}"
        yield ", ".join(dict.fromkeys(header.tensorrt_llm for header in headers.values()))

    yield from table(("Recipe", "Model", "GPUs of a worker", "GPU", "TensorRT-LLM"), map(row, recipe_names()))


def rules() -> Iterator[str]:
    from trtx.config.rules import RULES, PairRule

    def row(rule: Any) -> Iterator[str]:
        yield rule.id
        yield rule.severity
        pairs = [" + ".join(pair) for pair in rule.pairs] if isinstance(rule, PairRule) else []
        yield "; ".join(pairs) or ", ".join(rule.roles)
        yield "every" if rule.every_engine else "tensorrt-llm"
        yield rule.reason
        yield rule.evidence

    yield from table(("Rule", "Severity", "Roles", "Engine", "Reason", "Evidence"), map(row, RULES))


def load_fields() -> Iterator[str]:
    from trtx.bench.load import LoadSpec

    found = _options_by_name("bench")

    def row(name: str, field: Any) -> Iterator[str]:
        option = found.get(name)
        flag = next((record.flag for record in field.metadata if hasattr(record, "flag")), "")
        yield f"`{name}`"
        yield "–" if option is None else ", ".join(f"`{one}`" for one in option.opts)
        yield f"`{flag}`" if flag else "–"
        yield "" if option is None else option.help

    rows = (row(name, field) for name, field in LoadSpec.model_fields.items())
    yield from table(("Field", "Option", "aiperf's flag", "Effect"), rows)


def _options_by_name(verb: str) -> dict[str, Any]:
    from trtx.cli.app import Verbs

    command: Any = Verbs().get_command(None, verb)
    return {option.name: option for option in command.params}


def exit_codes() -> Iterator[str]:
    from trtx import errors
    from trtx.cli.exit_codes import READER_GONE

    def of(error: Any) -> tuple[int, str]:
        return error.exit_code, (error.__doc__ or "").partition("\n")[0].replace("``", "`")

    classes = (
        errors.GateError, errors.UsageError, errors.NoVerdictError, errors.LaunchError, errors.LoadGeneratorError,
    )  # fmt: skip
    rows = [(0, "Success. A gate passed, or nothing was judged."), *map(of, classes)]
    rows += [(errors.TrtxError.exit_code, "A bug of trtx. The traceback is on standard error; please report it.")]
    rows += [
        (128 + number, f"Interrupted by {name}.") for number, name in ((1, "SIGHUP"), (2, "SIGINT"), (15, "SIGTERM"))
    ]
    rows += [(READER_GONE, "The program that reads the output has exited, such as `head`.")]
    yield from table(("Code", "Meaning"), sorted(rows))


def formats() -> Iterator[str]:
    from trtx.checkpoint.formats import BUILT

    def row(name: str, form: Any) -> tuple[str, ...]:
        fits = "any" if form.block == 1 else f"multiples of {form.block}"
        return f"`{name}`", f"`{form.recipe}`", f"{8 * form.bytes_a_parameter:g}", fits, form.generation

    heads = ("`--quant`", "ModelOpt's recipe", "Bits per weight", "Dimensions", "GPUs")
    yield from table(heads, (row(name, form) for name, form in BUILT.items()))


def media_limits() -> Iterator[str]:
    from trtx.media import MediaLimits

    found = _options_by_name("serve")

    def row(name: str, default: object) -> tuple[str, str, str]:
        shown = {None: "none", False: "off"}.get(default, str(default))
        return f"`--{name.replace('_', '-')}`", shown, found[name].help

    rows = (row(name, field.default) for name, field in MediaLimits.model_fields.items())
    yield from table(("Option", "Default", "Effect"), rows)


def caller_variables() -> Iterator[str]:
    from trtx.launch.caller_variables import PASSED

    rows = ((f"`{row.name}`", row.readers, row.why, f"`{row.option}`" if row.option else "–") for row in PASSED)
    yield from table(("Variable", "Reaches", "What it sets", "Option that decides instead"), rows)


def plan_variables() -> Iterator[str]:
    from trtx.export.plan_variables import VARIABLES

    rows = ((f"`{name}`", row.pod or "–", row.job or "–", row.why) for name, row in VARIABLES.items())
    yield from table(("Variable", "In a pod", "In a Slurm job", "Why"), rows)


def trials() -> Iterator[str]:
    """How many trials a gate needs on each side, by the spread of the trials."""
    from trtx.bench.judge.regression import DEFAULT_METRICS, GateLimit, parse_metrics
    from trtx.stats.intervals import per_interval, trials_needed

    (latency,) = parse_metrics(["time_to_first_token:p50"])
    gates = {"1 cell, limit 2 %": (1, 2), "1 cell, 5 %": (1, 5), "1 cell, 10 %": (1, 10), "10 cells, 5 %": (10, 5)}

    def needed(spread: float, cells: int, percent: float) -> int | None:
        confidence = per_interval(0.95, cells * len(DEFAULT_METRICS))
        return trials_needed(spread / 100, GateLimit(percent).margin(latency), confidence)

    rows = ((f"{spread:g} %", *(needed(spread, *gate) for gate in gates.values())) for spread in (0.5, 1, 2, 5))
    yield from table(("Spread", *gates), rows)


def decisions() -> Iterator[str]:
    pages = ((path, _title(path).partition(". ")[2]) for path in sorted((DOCS / "decisions").glob("[0-9]*.md")))
    yield from table(("No.", "Decision"), ((path.name[:3], f"[{title}]({path.name})") for path, title in pages))


def contributing() -> Iterator[str]:
    pages = [path for path in (DOCS / "contributing").glob("*.md") if path.name != "README.md"]
    for path in sorted(pages, key=_title):
        yield f"- [{_title(path)}]({path.name})"


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


VERB_PAGES = ("serve", "build", "bench", "eval", "export", "compare", "baseline", "report", "explain", "doctor")


def _options_of(page: str) -> Callable[[], Lines]:
    def of_page() -> Lines:
        from trtx.cli.app import VERBS

        return options(verb for verb in VERBS if verb.split()[0] == page)

    return of_page


TABLES: dict[str, Callable[[], Lines]] = {
    **{f"options-{page}": _options_of(page) for page in VERB_PAGES},
    "metrics": metrics,
    "served-metrics": served_metrics,
    "queue-metrics": queue_metrics,
    "trtllm-metrics": trtllm_metrics,
    "upstream-metrics": upstream_metrics,
    "checks": checks,
    "causes": causes,
    "stages": stages,
    "doctor-rows": doctor_rows,
    "config-fields": config_fields,
    "recipes": recipes,
    "rules": rules,
    "load-fields": load_fields,
    "exit-codes": exit_codes,
    "formats": formats,
    "media-limits": media_limits,
    "caller-variables": caller_variables,
    "plan-variables": plan_variables,
    "trials": trials,
    "decisions": decisions,
    "contributing": contributing,
}
"""Table name -> the function that returns the table's lines."""


def filled(text: str) -> str:
    """``text`` with every marked table replaced by the current one. Raises KeyError for a name without a table."""

    def current(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found["name"]]()).strip()
        return f"{found['start']}{lines}\n{found['end']}"

    return MARKED.sub(current, text)


def names_in(page: Path) -> list[str]:
    """The names of the tables that a page shows."""
    return [found["name"] for found in MARKED.finditer(page.read_text(encoding="utf-8"))]


def marked_pages() -> list[Path]:
    """The pages that show a table."""
    return [path for path in sorted(DOCS.rglob("*.md")) if names_in(path)]


def main() -> None:
    for page in marked_pages():
        text = page.read_text(encoding="utf-8")
        if (current := filled(text)) != text:
            page.write_text(current, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
