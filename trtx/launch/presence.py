"""This host's share of a topology in etcd: publishes the plan, renews the share's key, and removes lost hosts.

Dynamo's own leases determine how long a process may be without etcd, and are long for that reason
(:data:`PROCESS_LEASE_S`). So that a lost host leaves the routing sooner, each share renews a key of its own, and the
other shares revoke everything registered at the address of a host without a share.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from trtx.errors import LaunchError, UsageError
from trtx.launch.discovery import open_etcd
from trtx.launch.events import Event
from trtx.launch.published import Published, name_of, remedy_added
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.published_plan import (
    add_share,
    publish_plan,
    read_hosts,
    read_standing,
    remove_share,
    restore_plan,
    withdraw_plan,
)
from trtx.planes.registry import RegistryUnknown
from trtx.topology import Plan

logger = logging.getLogger(__name__)

PROCESS_LEASE_S = 600
"""Lease of a Dynamo process, in a topology over hosts.

Dynamo 1.4.2 measures a lease from the last response to its own renewal, which it sends when half of the remaining time
has passed. After a reconnection, etcd renews the lease for its whole time, but the client library consumes that
response (etcd-client 0.17.0, LeaseClient::keep_alive), so Dynamo's countdown continues. Outages therefore add up until
a renewal falls between them, and the process exits although its lease is valid
(lib/runtime/src/transports/etcd/lease.rs). Outages may add up to half of this value. It can be short again once a
reconnection counts as a renewal.
"""
LOST_AFTER_S = 10.0
"""How long a host must be seen without a share before it is removed.

A share whose lease ended because etcd lost its data or was unreachable returns within one of its turns.
"""
_TURN_S = 2.0
_TRIES = 20
_AGAIN_AFTER_S = 0.5
_CLOSES_WITHIN_S = 5.0


class SharePresence:
    """One share's entry in etcd. A thread renews it from :meth:`take` to :meth:`close`."""

    def __init__(self, plan: Plan, published: Published, host: str) -> None:
        """``plan``: of all hosts, including this ``host``. Sends no request yet.

        Raises UsageError if the files of etcd's credentials can't be read.
        """
        assert plan.etcd is not None
        self._plan, self._published, self._host = plan, published, host
        self._name = name_of(plan)
        self._ttl_s = plan.etcd.host_lease_ttl_s or plan.etcd.lease_ttl_s
        self._client = open_etcd(plan.etcd)
        self._registry = EtcdRegistry(self._client, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s)
        self._lease = 0
        self._lost_since: dict[str, float] = {}  # address -> time since when it has no share
        self._problem = ""  # the last reported reason why it could not be registered again
        self._on_event: Callable[[Event], None] = lambda event: None
        self._on_lease: Callable[[int], None] = lambda lease: None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def take(self) -> None:
        """Publishes the plan, or joins the running shares of the same plan.

        No other share of this host may run (:func:`trtx.launch.take_place`). Raises UsageError if another plan with
        that name is being served, LaunchError if etcd fails.
        """
        if self._register():  # no share runs, so registrations at other addresses are stale
            own = self._address(self._host)
            try:
                for address, leases in self._registry.leases().items():
                    if address != own:
                        self._revoke(leases)
            except RegistryUnknown as error:
                raise LaunchError(str(error)) from error
        self._thread.start()

    def tell(self, on_event: Callable[[Event], None], on_lease: Callable[[int], None]) -> None:
        """Sets the listeners for events and for the share's lease, which must end with the share.

        ``on_lease`` is called now, with the current lease, and later for each new lease. All later calls of both
        listeners come from the share's thread.
        """
        self._on_event, self._on_lease = on_event, on_lease
        on_lease(self._lease)

    def close(self) -> None:
        """Ends the share's entry; with the last share, the plan is removed.

        If etcd does not answer, the lease expires by itself.
        """
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSES_WITHIN_S)
        with contextlib.suppress(LaunchError, UsageError):
            self._client.revoke(self._lease)
            withdraw_plan(self._client, self._name)
        self._client.close()

    def _register(self) -> bool:
        """Adds the share. Returns True if no share was running. Raises UsageError, LaunchError."""
        client, name, own = self._client, self._name, self._published.to_bytes()
        remove_share(client, name, self._host)  # left by a share that was killed on this host
        lease = client.grant(self._ttl_s)
        try:
            for _ in range(_TRIES):
                there = read_standing(client, name)
                if there.plan is not None and self._is_own(there.plan, is_served=bool(there.hosts)):
                    if add_share(client, name, self._host, lease, plan=there.plan):
                        self._holds(lease)
                        return not there.hosts
                elif not there.hosts:
                    if publish_plan(client, name, own, self._host, lease, instead_of=there.plan):
                        self._holds(lease)
                        return True
                elif there.plan is not None:
                    raise UsageError(
                        f"topology {name!r} is already served with another plan; stop it, or give this one another "
                        "name in the hosts file"
                    )
                else:
                    self._end.wait(_AGAIN_AFTER_S)  # the running shares publish their plan again
            raise LaunchError(f"the record of topology {name!r} in etcd kept changing; start this share again")
        except BaseException:
            with contextlib.suppress(LaunchError):
                client.revoke(lease)
            raise

    def _holds(self, lease: int) -> None:
        self._lease = lease
        self._on_lease(lease)

    def _is_own(self, found: bytes, *, is_served: bool) -> bool:
        """Whether the published plan ``found`` is this one.

        Raises UsageError if it is unreadable and a share serves it.
        """
        plan = self._plan
        assert plan.etcd is not None and plan.nats is not None
        try:
            there = Published.from_bytes(
                found, self._name, etcd_files=plan.etcd.credentials, nats_files=plan.nats.credentials
            )
        except UsageError:
            if is_served:
                raise
            return False
        return there.is_same_as(self._published)

    def _run(self) -> None:
        while not self._end.wait(min(_TURN_S, self._ttl_s / 4)):
            try:
                self._turn()
            except (LaunchError, OSError):  # unknown does not mean gone; the next turn asks again
                self._lost_since.clear()

    def _turn(self) -> None:
        is_held = self._client.keep_alive(self._lease)
        is_published, hosts = read_hosts(self._client, self._name)
        if not is_held or self._host not in hosts:
            self._lost_since.clear()
            self._register_again()
            return  # others may be returning too, or the plan there is another one
        if not is_published:
            restore_plan(self._client, self._name, self._published.to_bytes())
        self._take_out({self._address(host) for host in hosts | {self._host}})

    def _register_again(self) -> None:
        """Registers the share again after etcd lost its data or was unreachable for longer than the lease."""
        try:
            self._register()
        except UsageError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._emit(f"{error}: it replaced this plan while etcd had lost it")
        else:
            self._problem = ""
            self._emit(
                f"etcd had lost the share of {self._host}, which is registered again: etcd lost its data, was "
                f"unreachable for longer than {self._ttl_s:g} s (lease_ttl_s), or something deleted the share"
            )

    def _take_out(self, present: set[str]) -> None:
        """Revokes registrations at addresses that have not been in ``present`` for LOST_AFTER_S."""
        registered, now = self._registry.leases(), time.monotonic()
        self._lost_since = {
            address: self._lost_since.get(address, now) for address in registered if address not in present
        }
        for address, since in self._lost_since.items():
            if now - since >= LOST_AFTER_S and (count := self._revoke(registered[address])):
                name = next((host.name for host in self._plan.hosts if host.address == address), "a host")
                processes = "process is" if count == 1 else f"{count} processes are"
                self._emit(
                    f"{name} ({address}) is gone: its share was not renewed, and its {processes} out of the routing"
                )

    def _emit(self, message: str) -> None:
        try:
            self._on_event(Event("lost", message))
        except Exception:  # a failing listener must not end the share
            logger.exception("an event could not be reported: %s", message)

    def _revoke(self, leases: set[int]) -> int:
        return sum(self._client.revoke(lease) for lease in leases if lease)

    def _address(self, host: str) -> str:
        return next((one.address for one in self._plan.hosts if one.name == host), "")


@contextlib.contextmanager
def publishing(plan: Plan, published: Published, host: str) -> Iterator[SharePresence]:
    """Publishes the inputs of ``plan`` and this share until the end of the block. See :meth:`SharePresence.take`.

    The inputs stay published until the last share ends.
    """
    assert plan.etcd is not None
    presence = SharePresence(plan, published, host)
    try:
        with remedy_added(plan.etcd):
            presence.take()
        yield presence
    finally:
        presence.close()
