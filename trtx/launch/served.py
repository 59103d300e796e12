"""``serve``: runs a plan as a ready topology for the duration of a ``with`` block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from trtx.errors import LaunchError, UsageError
from trtx.launch.discovery import remove_left_behind
from trtx.launch.events import Event
from trtx.launch.frontend_watch import UNROUTED_S
from trtx.launch.guardian import Guardian
from trtx.launch.handoffs import HandoffProofs
from trtx.launch.image_proofs import ImageProofs
from trtx.launch.interruption import Interruption, catch_signals
from trtx.launch.leftovers import clear_leftovers, refuse_second
from trtx.launch.ports import ANOTHER_PORT, HOLDER, OF_SEVERAL_HOSTS
from trtx.launch.presence import SharePresence
from trtx.launch.readiness import Readiness, ask_readiness, complete, once_routed, own_headers
from trtx.launch.route import FrontendStatus
from trtx.launch.run_directory import RunDirectory
from trtx.launch.scratch import Scratch
from trtx.launch.slots import Restart, Slot
from trtx.launch.stopping import Ending, stop
from trtx.launch.supervisor import Supervisor
from trtx.launch.warm_up import WARM_UP_TOKENS, warm_up_prompt
from trtx.topology import Plan

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds.

    ``ready_s``: from start until every worker is routable; large models load and compile for minutes.
    """

    ready_s: float = 1800.0
    request_s: float = 300.0  # one warm-up request, which may compile kernels
    drain_s: float = 30.0  # all stages of stopping together
    abandon_s: float = 3.0  # the same for a topology that was never ready, which has no requests


class ServedTopology:
    """A topology that is ready. Only :func:`serve` creates it."""

    def __init__(self, plan: Plan, whole: Plan, supervisor: Supervisor, interruption: Interruption) -> None:
        self.plan = plan
        self.whole = whole  # the plan of all hosts if ``plan`` is a share, else the same plan
        self.load_seconds = 0.0  # from the start of the first process until every worker is routable
        self.warm_up_seconds = 0.0  # time of the first real requests, a few per worker
        self._supervisor = supervisor
        self._interruption = interruption

    @property
    def url(self) -> str:
        return self.plan.url

    @property
    def model(self) -> str:
        """The model name in clients' requests."""
        return self.plan.model

    @property
    def restarts(self) -> tuple[Restart, ...]:
        return tuple(self._supervisor.restarts)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The supervisor's current view of every process. Read only."""
        return tuple(self._supervisor.slots)

    @property
    def is_whole(self) -> bool:
        """Whether every process is alive and serving; False from a death until the restarted process is routable."""
        return self._supervisor.is_whole

    def check(self) -> None:
        """Raises LaunchError once the topology has been given up, Interrupted after SIGINT, SIGTERM or SIGHUP."""
        if self._supervisor.failure is not None:
            raise LaunchError(self._supervisor.failure)
        self._interruption.check()

    def wait(self, seconds: float) -> None:
        """Sleeps for ``seconds`` and calls :meth:`check` meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(_POLL_S, left))
        self.check()


@contextlib.contextmanager
def serve(
    plan: Plan,
    *,
    on_event: Callable[[Event], None],
    whole: Plan | None = None,
    presence: SharePresence | None = None,
    on_slots: Callable[[tuple[Slot, ...]], None] = lambda slots: None,
    interruption: Interruption | None = None,
    timeouts: Timeouts = Timeouts(),
) -> Iterator[ServedTopology]:
    """Starts ``plan``, yields when it is ready and warm, and stops it when the block is left for any reason.

    ``whole``: the plan of all hosts if ``plan`` is one host's share. The block is entered once all hosts are ready;
    leaving it ends only this share. ``presence``: the share's entry in etcd, which the guardian removes too.

    Inside the block, SIGINT and SIGTERM set a flag instead of raising KeyboardInterrupt: call ``check()`` or ``wait()``
    regularly. A second signal while stopping kills everything at once. ``interruption``: the flag to use if the caller
    outlives several topologies. ``on_event`` is called from this thread and from the supervisor's; ``on_slots`` is
    called once, before anything starts, with the live view of the processes.

    If this process is killed, a guardian ends all processes and deletes their files. Raises UsageError if a port of the
    plan was taken in the meantime or its run directory can't be written, LaunchError if a process dies before the
    topology is ready or the topology is not ready in time, Interrupted.
    """
    interruption = interruption or Interruption()
    whole = whole or plan
    with catch_signals(interruption), contextlib.ExitStack() as cleanup:
        held = _hold_ports(plan)
        clear_leftovers(plan)
        scratch = _make_directories(plan)
        cleanup.callback(scratch.remove)
        guardian = Guardian(plan.marker, plan.scratch_dir, plan.etcd)
        cleanup.callback(guardian.goodbye)
        if presence is not None:
            presence.tell(on_event, lambda lease: guardian.watch_worker("the share", lease))
        handoffs = HandoffProofs(whole, plan.url, here=plan)
        images = ImageProofs(whole, plan.url, plan.model_path)
        # a host without a frontend proves recovery through the other hosts' frontends
        asked = plan.frontends or whole.frontends
        routes = {one.name: FrontendStatus(whole, handoffs, images, url=whole.url_of(one)) for one in asked}
        for route in routes.values():
            cleanup.callback(route.close)
        over_hosts = whole if whole.hosts else None
        supervisor = Supervisor(plan, on_event, guardian=guardian, routes=routes, scratch=scratch, whole=over_hosts)
        topology = ServedTopology(plan, whole, supervisor, interruption)
        on_slots(topology.slots)
        if count := remove_left_behind(plan):
            message = (
                f"{count} workers of an earlier share that was killed here were still registered, and have been removed"
            )
            on_event(Event("lost", message))
        HOLDER.release(held)
        try:
            start = time.monotonic()
            supervisor.start()
            _wait_ready(topology, supervisor, start + timeouts.ready_s, on_event)
            topology.load_seconds = time.monotonic() - start
            supervisor.mark_ready()
            for route in routes.values():
                route.start()
            _warm_up(topology, handoffs, images, timeouts.request_s)
            topology.warm_up_seconds = time.monotonic() - start - topology.load_seconds
            on_event(
                Event(
                    "ready",
                    f"{plan.mode} topology ready at {', '.join(whole.urls)}: {_loaded(topology, start)}, "
                    f"warmed up in {topology.warm_up_seconds:.1f} s{handoffs.summary}{images.summary}",
                )
            )
            yield topology
        finally:
            supervisor.end_watch()
            before = interruption.count
            try:
                on_event(Event("stopping", "stopping: workers drain, then the frontend; Ctrl-C again kills at once"))
            finally:  # even if a listener raises
                has_served = topology.load_seconds > 0
                endings = stop(
                    plan,
                    supervisor.slots,
                    supervisor.sessions,
                    deadline_s=timeouts.drain_s if has_served else timeouts.abandon_s,
                    hurry=lambda: interruption.is_hurried or interruption.count > before,
                )
                supervisor.leave()
            on_event(Event("stopped", _stop_summary(endings)))


def take_place(share: Plan) -> None:
    """Checks this machine as :func:`serve` does, before the plan is published, and holds the share's ports.

    Raises UsageError if a port is taken, or if a share of that name runs here.
    """
    _hold_ports(share)
    clear_leftovers(share)


def _hold_ports(plan: Plan) -> tuple[int, ...]:
    """Holds all ports of the plan's processes, unless the HOLDER has them already.

    Raises UsageError if one is taken.
    """
    try:
        return _held_ports(plan)
    except UsageError:
        refuse_second(plan)  # the ports may belong to a running share
        raise


def _held_ports(plan: Plan) -> tuple[int, ...]:
    for_http = OF_SEVERAL_HOSTS if plan.this_host else ANOTHER_PORT
    held = [HOLDER.hold(*plan.http_of(frontend), for_http) for frontend in plan.frontends]
    held += [HOLDER.hold("127.0.0.1", port) for port in plan.internal_ports]
    if plan.this_host:
        way_out = f"end the process that uses it, or give {plan.this_host} another first_port in the hosts file"
        for process in plan.processes:
            held += [HOLDER.hold(process.address, port, way_out) for port in process.ports.values()]
    return tuple(held)


def _make_directories(plan: Plan) -> Scratch:
    """Creates the run directory's files and the topology's temporary directory. Raises UsageError."""
    try:
        RunDirectory(plan).write()
    except OSError as error:
        raise UsageError(
            f"run directory {str(plan.run_dir)!r} can't be written ({error.strerror}); "
            "name a parent that you can write to with -o"
        ) from error
    scratch = Scratch(plan.scratch_dir, plan.discovery_dir)
    try:
        scratch.make()
    except OSError as error:
        raise UsageError(
            f"the topology's directory {str(plan.scratch_dir)!r} can't be made ({error.strerror}); "
            "set TMPDIR to a directory that you can write to"
        ) from error
    if (problem := scratch.start_problem()) is not None:
        scratch.remove()
        raise UsageError(f"no process can be started: {problem}, or set TMPDIR to another directory")
    return scratch


def _wait_ready(
    topology: ServedTopology, supervisor: Supervisor, deadline: float, on_event: Callable[[Event], None]
) -> None:
    """Waits until the topology is ready.

    Asks a frontend only once every process is up, because it logs an error for each request about a model that it
    lacks.
    """
    plan, whole_since, message = topology.plan, 0.0, ""
    seen = Readiness(False, "not every process is up")
    logs = plan.run_dir / "serve" / "logs"
    while not seen.is_ready:
        topology.check()
        now = time.monotonic()
        if now >= deadline:
            up = [slot.spec.name for slot in topology.slots if slot.state == "up"]
            waits = f"; {supervisor.missing_workers}" if supervisor.missing_workers else ""
            raise LaunchError(
                f"{plan.mode} topology is not ready in time: {seen.summary} (up: {', '.join(up) or 'none'}){waits}; "
                f"see the logs in {logs}, and lower the model's size or max_seq_len if it loads too slowly{_hint(plan)}"
            )
        whole_since = (whole_since or now) if topology.is_whole else 0.0
        if whole_since and now - whole_since > UNROUTED_S:
            error = f"; the frontend's last error: {supervisor.frontend_error}" if supervisor.frontend_error else ""
            raise LaunchError(
                f"every process is up, but for {UNROUTED_S:g} s the frontend has not counted every worker: "
                f"{seen.summary}{error}; see the logs in {logs}"
            )
        if supervisor.missing_workers != message and all(slot.state == "up" for slot in topology.slots):
            message = supervisor.missing_workers
            if message:
                on_event(Event("waiting", f"{plan.this_host} is up and waits for other hosts: {message}"))
        time.sleep(_POLL_S)
        if topology.is_whole:
            seen = _ask(topology.whole)


def _ask(plan: Plan) -> Readiness:
    """The readiness of all frontends: the first negative answer, with the frontend's address if there are several."""
    seen = Readiness(False, "it has no frontend")
    for url in plan.urls:
        seen = ask_readiness(url, plan.model, plan.namespace, plan.expected_workers(), certificate=plan.certificate)
        if not seen.is_ready:
            return seen if len(plan.urls) == 1 else replace(seen, summary=f"{seen.summary} at {url}")
    return seen


def _hint(plan: Plan) -> str:
    """Another reason why an engine on several GPUs may not start, seen without NVLink (TensorRT-LLM #9680)."""
    if plan.gpu_count <= plan.worker_count:
        return ""
    return "; if ranks wait for each other, set NCCL_P2P_DISABLE=1 where `nvidia-smi topo -m` shows no NVLink"


def _warm_up(topology: ServedTopology, handoffs: HandoffProofs, images: ImageProofs, request_s: float) -> None:
    """Sends the first real requests. Raises LaunchError with the pair of workers or the encoder at fault, and the
    cause.

    One request proves the route of each frontend. Then it sends these concurrently:

    - one request for each pair of workers with a KV handoff
    - images, until each encoder has encoded one
    - on the host of the first frontend, two requests per worker, so that each worker has run both of its phases
    """
    plan, urls = topology.plan, topology.whole.urls
    count = 2 * topology.whole.worker_count if plan.url == urls[0] else 0
    pool = ThreadPoolExecutor(max_workers=count + len(urls) + 1)

    def finish(waiting: Sequence[Future[str | None]]) -> str | None:
        while not all(answer.done() for answer in waiting):
            topology.check()
            time.sleep(0.02)
        return next((problem for answer in waiting if (problem := answer.result()) is not None), None)

    def ask(number: int) -> Future[str | None]:
        prompt = warm_up_prompt(number)
        url = urls[number % len(urls)]
        ask_it = partial(
            complete, url, plan.model, prompt, WARM_UP_TOKENS, timeout_s=request_s, certificate=plan.certificate,
            headers=own_headers(plan.namespace),
        )  # fmt: skip
        return pool.submit(once_routed, ask_it)

    def prove() -> str | None:
        return handoffs.prove_missing(handoffs.worker_ids(), request_s)

    logs, first = plan.run_dir / "serve" / "logs", len(urls)
    try:
        problem = finish([ask(number) for number in range(first)])
        proving = [pool.submit(prove)]  # even if a request has failed, because this check names the pair and the cause
        if problem is None:
            proving.append(pool.submit(images.prove_missing, request_s))
            problem = finish([ask(number) for number in range(first, first + count)])
        unproved = finish(proving)
    finally:
        # after an interruption, the frontend's end aborts the open requests
        pool.shutdown(wait=False, cancel_futures=True)
    if unproved is not None:
        raise LaunchError(f"{plan.mode} topology at {plan.url} is not ready: {unproved}; see the logs in {logs}")
    if problem is not None:
        raise LaunchError(f"the first requests to {', '.join(urls)} failed: {problem}; see the logs in {logs}")


def _loaded(topology: ServedTopology, start: float) -> str:
    """The load time, for the ready message.

    Over hosts it excludes the wait for other hosts, which people may start by hand.
    """
    if not topology.plan.this_host:
        return f"loaded in {topology.load_seconds:.1f} s"
    here = max(slot.up_since for slot in topology.slots) - start
    return f"loaded in {here:.1f} s here, all hosts joined after {topology.load_seconds:.1f} s"


def _stop_summary(endings: Mapping[str, Ending]) -> str:
    if odd := [f"{name} {ending}" for name, ending in endings.items() if ending != "clean"]:
        clean = [name for name, ending in endings.items() if ending == "clean"]
        return f"stopped: {', '.join(odd)}" + (f"; cleanly: {', '.join(clean)}" if clean else "")
    return f"stopped, cleanly: {', '.join(endings) or 'no process was left'}"
