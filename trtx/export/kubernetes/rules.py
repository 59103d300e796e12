"""What Kubernetes itself takes: quantities, names of labels and of resources, images, addresses in a pod.

By its API's own rules (``k8s.io/apimachinery`` ``validation`` and ``resource``, ``distribution/reference``): what the
API server or the kubelet would refuse is refused before anything is written.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from urllib.parse import urlsplit

_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_POWERS = {"k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_PART}(\.{_PART})*")
_NAME = re.compile(r"[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
_REPOSITORY = re.compile(
    r"(?:[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?)*(:[0-9]{1,5})?/)?"
    r"(?P<path>[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*)"
)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NATS = re.compile(r"nats://(?P<host>[A-Za-z0-9.-]+)(:(?P<port>[0-9]{1,5}))?")
_NATIVE = {"cpu", "memory", "ephemeral-storage"}


def amount(quantity: str) -> Decimal | None:
    """Of a quantity such as ``4``, ``500m`` (cores) or ``16Gi`` (bytes), in its unit; None: it is none, or negative."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        return None
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix == "m":
        return number / 1000
    return number * Decimal(1024 if suffix.endswith("i") else 1000) ** _POWERS.get(suffix[:1], 0)


def is_subdomain(text: str) -> bool:
    """A DNS subdomain: the name of an object."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_qualified_name(text: str) -> bool:
    """Of a label or a resource: a name of at most 63 characters, where it has one behind a prefix and a slash."""
    prefix, slash, name = text.rpartition("/")
    return len(name) <= 63 and _NAME.fullmatch(name) is not None and (not slash or is_subdomain(prefix))


def is_label_value(text: str) -> bool:
    return text == "" or (len(text) <= 63 and _NAME.fullmatch(text) is not None)


def is_resource(name: str) -> bool:
    """One that a container may ask for: Kubernetes' own, or one of a domain (an extended resource)."""
    if name.startswith("hugepages-"):
        return bool(amount(name.removeprefix("hugepages-")))
    is_extended = "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")
    return name in _NATIVE or (is_extended and is_qualified_name(name))


def is_whole(name: str) -> bool:
    """A resource that is counted: extended ones are, those of Kubernetes are measured."""
    return "/" in name


def is_image(text: str) -> bool:
    """A reference that a container runtime can read: a repository in lower case, with a tag, a digest, both or none."""
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        return False
    head, slash, last = rest.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        return False
    name = f"{head}{slash}{last}"
    first = name.partition("/")[0]
    if first != first.lower() and not ("/" in name and any(mark in first for mark in ".:")):
        return False  # no registry: a name in upper case
    return _REPOSITORY.fullmatch(name) is not None and len(name) <= 255


def is_nats(url: str) -> bool:
    """``nats://HOST``, with a port or without: a name, or an IPv4 address in full."""
    found = _NATS.fullmatch(url)
    if found is None or not 0 < int(found["port"] or 4222) < 1 << 16:
        return False
    host = found["host"]
    if not host.rpartition(".")[2].isdecimal():
        return is_subdomain(host.lower())
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def is_own_address(url: str) -> bool:
    """Whether ``url`` leads from a pod to that pod itself, or nowhere: loopback, or no address of a machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
