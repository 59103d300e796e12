"""docs/hosts.md has a row for every field of a hosts file, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import BaseModel

from trtx.config.hosts import FIRST_PORT, HostSpec, HostsSpec

DOCUMENT = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `((?:hosts\[\]\.)?[a-z_]+)` \| ([^|]+) \|", DOCUMENT, re.MULTILINE))
# Of a default that is None, what it leads to.
LEADS_TO = {
    "name": "random", "etcd_auth": "none", "nats_auth": "none", "hosts[].device": "–",
    "hosts[].frontends": "1 on the first host, else 0", "hosts[].roles": "placed by trtx",
}  # fmt: skip


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Each with its default as the document has it."""
    return {
        f"{prefix}{name}": LEADS_TO.get(f"{prefix}{name}", "–" if field.is_required() else str(field.default))
        for name, field in model.model_fields.items()
    }


def test_every_field_has_its_row_and_its_default() -> None:
    assert fields(HostsSpec) | fields(HostSpec, "hosts[].") == ROWS
    assert ROWS["hosts[].first_port"] == str(FIRST_PORT)


def test_the_example_of_the_document_is_a_hosts_file() -> None:
    (text,) = re.findall(r"^```yaml\n(.+?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    spec = HostsSpec.model_validate(yaml.safe_load(text))
    assert spec.has_roles and [spec.frontends_of(host) for host in spec.hosts] == [1, 1]
