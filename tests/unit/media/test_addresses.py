"""Which addresses a worker may be made to connect to, however they are written."""

from __future__ import annotations

import pytest
from media_server import OPEN

from trtx.media import MediaError, MediaLimits
from trtx.media.addresses import is_allowed
from trtx.media.fetch import fetch

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001::1", "64:ff9b::101:101", "::ffff:1.1.1.1"]
OWN = ["127.0.0.1", "127.255.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd12::1"]
OWN_INSIDE = ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"]
NEVER = [
    *("0.0.0.0", "0.1.2.3", "169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.0.8"),
    *("192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1"),
    *("240.0.0.1", "255.255.255.255", "::", "::7f00:1", "::127.0.0.1", "::8.8.8.8", "fe80::1", "fec0::1"),
    *("ff02::1", "ff0e::1", "fd00:ec2::254", "64:ff9b:1::1", "64:ff9b:1::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "2002:101:101::1", "2001::1", "2001:0:7f00:1::", "2001:2::1", "2001:10::1", "2001:db8::1"),
    *("3fff::1", "5f00::1", "100::1", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "fe80::1%lo", "4000::1"),
    *("", "no address", "1.1.1.1.1", "127.1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_what_is_public_may_be_connected_to(address: str) -> None:
    assert is_allowed(address, allow_private=False)
    assert is_allowed(address, allow_private=True)


@pytest.mark.parametrize("address", OWN + OWN_INSIDE)
def test_ones_own_networks_are_for_operators_to_open(address: str) -> None:
    assert not is_allowed(address, allow_private=False)
    assert is_allowed(address, allow_private=True)


@pytest.mark.parametrize("address", NEVER)
def test_metadata_tunnels_and_what_is_nobodys_are_never_opened(address: str) -> None:
    assert not is_allowed(address, allow_private=False)
    assert not is_allowed(address, allow_private=True)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "localhost.", "LOCALHOST", "127.1", "127.0.1", "2130706433", "0x7f000001"),
        *("0x7f.1", "0177.0.0.1", "017700000001", "0", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        *("[64:ff9b::7f00:1]", "169.254.169.254", "[fe80::1]", "[::]", "%31%32%37.0.0.1", "127。0。0。1", "①②⑦.0.0.1"),
    ],
)
async def test_a_host_in_any_spelling_is_judged_by_where_it_leads(host: str) -> None:
    """By the system's own resolver, as it is in service."""
    with pytest.raises(MediaError) as refused:
        await fetch(f"https://{host}:1/x.png", MediaLimits())
    assert refused.value.status in (400, 403), str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_the_spellings_of_loopback_lead_there_where_that_is_allowed(host: str) -> None:
    """Or the refusals above would be of names that nothing resolves."""
    with pytest.raises(MediaError) as failed:
        await fetch(f"http://{host}:1/x.png", OPEN)  # port 1: nobody listens
    assert failed.value.status == 424, str(failed.value)
