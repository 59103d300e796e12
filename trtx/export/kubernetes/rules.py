"""The syntax rules of Kubernetes: quantities, names of labels and resources, images, addresses in a pod.

They follow Kubernetes' own code (``k8s.io/apimachinery`` ``validation`` and ``resource``, ``distribution/reference``),
so that values which the API server or the kubelet would refuse are refused before any file is written.
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
_NATS = re.compile(r"(nats|tls)://(?P<host>[A-Za-z0-9.-]+)(:(?P<port>[0-9]{1,5}))?")
_NATIVE = {"cpu", "memory", "ephemeral-storage"}


def amount(quantity: str) -> Decimal | None:
    """Parses a quantity such as ``4``, ``500m`` (cores) or ``16Gi`` (bytes); None if it is invalid or negative."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        return None
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix == "m":
        return number / 1000
    return number * Decimal(1024 if suffix.endswith("i") else 1000) ** _POWERS.get(suffix[:1], 0)


def is_subdomain(text: str) -> bool:
    """Returns whether ``text`` is a DNS subdomain, the syntax of an object's name."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_qualified_name(text: str) -> bool:
    """Returns whether ``text`` is a valid name of a label or resource: at most 63 characters, with an optional
    ``prefix/``."""
    prefix, slash, name = text.rpartition("/")
    return len(name) <= 63 and _NAME.fullmatch(name) is not None and (not slash or is_subdomain(prefix))


def is_label_value(text: str) -> bool:
    return text == "" or (len(text) <= 63 and _NAME.fullmatch(text) is not None)


def is_resource(name: str) -> bool:
    """Returns whether a container may request the resource: Kubernetes' own, or an extended resource of a domain."""
    if name.startswith("hugepages-"):
        return bool(amount(name.removeprefix("hugepages-")))
    is_extended = "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")
    return name in _NATIVE or (is_extended and is_qualified_name(name))


def is_whole(name: str) -> bool:
    """Returns whether a resource only takes whole numbers, as extended resources do."""
    return "/" in name


def is_image(text: str) -> bool:
    """Returns whether ``text`` is a valid image reference: a lower-case repository, optionally with tag and digest."""
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
        return False  # the first part is not a registry, but a name in upper case
    return _REPOSITORY.fullmatch(name) is not None and len(name) <= 255


def is_nats(url: str) -> bool:
    """Returns whether ``url`` is ``nats://`` or ``tls://HOST[:PORT]`` with a host name or a complete IPv4 address."""
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
    """Returns whether ``url`` would connect a pod to itself: a loopback or unspecified address."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
