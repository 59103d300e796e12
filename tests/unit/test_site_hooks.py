"""Where the code on a page of the site may break."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools/site_hooks.py")
assert _SPEC is not None and _SPEC.loader is not None
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<code>a --dry-run</code> --b", '<code>a <span class="whole">--dry-run</span></code> --b'),
        ("<table><td><code>--dry-run</code></table>", '<code><span class="whole">--dry</span>-run</code>'),
        ("<table><td><code>a/b_c</code></table>", "<code>a/<wbr>b_<wbr>c</code>"),
        ("<pre><code>a\n └─ b --c</code></pre>", '<pre><code class="aligned">a\n └─ b --c</code></pre>'),
        ("<pre><code>a   b\nc   d\ne   f</code></pre>", '<code class="aligned">a   b'),
        ("<pre><code>a   b\nc   d\ne f</code></pre>", "<code>a   b"),
        ('<code><a id="x-1--y"></a>b_c-d -- e</code>', '<code><a id="x-1--y"></a>b_c-d -- e</code>'),
    ],
)
def test_options_stay_whole_and_names_in_tables_break_between_words(html: str, expected: str) -> None:
    found = hooks.on_page_content(html, page=None)
    assert expected in found
    assert re.sub("<span[^>]*>|</span>|<wbr>|(?<=<code) class=.aligned.", "", found) == html


def test_the_site_has_the_hooks_and_their_style() -> None:
    assert "hooks: [tools/site_hooks.py]" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert ".whole { white-space: nowrap; }" in (ROOT / "docs/site.css").read_text(encoding="utf-8")
