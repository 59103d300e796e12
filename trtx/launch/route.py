"""Checks continuously, while a topology serves, whether requests reach its workers.

The checks run in threads of their own: a request may take minutes, and the supervision of the processes must not wait
for it.
"""

from __future__ import annotations

import threading
import time

from trtx.launch.handoffs import HandoffProofs
from trtx.launch.image_proofs import ImageProofs
from trtx.launch.readiness import ask_readiness, complete, is_live, own_headers
from trtx.topology import Plan

_EVERY_S = 1.0
_PROOF_PROMPT = "Say when you are there. This is the launcher's request "
_PROOF_TIMEOUT_S = 300.0  # same as for warm-up: a restarted worker may compile kernels during the request


class FrontendStatus:
    """The latest results of the checks on a plan's frontend. Times are ``time.monotonic()``; None: never.

    The check's threads write the attributes; any thread may read them.
    """

    def __init__(
        self,
        plan: Plan,
        handoffs: HandoffProofs | None = None,
        images: ImageProofs | None = None,
        *,
        url: str = "",
    ) -> None:
        """Sends no request before :meth:`start`. ``url``: the frontend to check; default: the plan's first.

        ``handoffs``, ``images``: records of the worker pairs and encoders that have already worked.
        """
        self.answered_at: float | None = None  # the last answer of any kind
        self.routed_at: float | None = None  # the last time the frontend reported every worker
        self.proved_at: float | None = None  # start time of the last real request that succeeded
        self.serves = False  # whether the frontend had a worker of every role at its last answer
        self.problem = ""  # the workers that the frontend does not count, and why
        self.request_problem = ""  # error of the last real request
        self.handoff_problem = ""  # the pair of workers whose KV handoff failed, and why
        self._plan = plan
        self._url = url or plan.url
        self._handoffs = handoffs or HandoffProofs(plan, self._url)
        self._images = images or ImageProofs(plan, self._url)
        self._whole_since: float | None = None
        self._wants_proof = False
        self._proof: threading.Thread | None = None
        self._requests = 0
        self._news = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="route", daemon=True)

    @property
    def proof(self) -> str:
        """A message for the user about what has worked: requests, KV handoffs, images."""
        return f"a request went through{self._handoffs.summary}{self._images.summary}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops sending requests. An open request ends with the frontend."""
        self._is_closed = True
        self._news.set()

    def expect(self, whole_since: float | None, *, proof: bool) -> None:
        """Sets what to check. ``proof``: when the frontend reports every worker, send real requests until one succeeds.

        ``whole_since``: the time since which every process is up, or None. While it is None, only the frontend's
        liveness is checked, because it logs an error for each request about a model that it doesn't have yet.
        """
        if (whole_since, proof) != (self._whole_since, self._wants_proof):
            self._whole_since, self._wants_proof = whole_since, proof
            self._news.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._ask()
            self._news.wait(_EVERY_S)
            self._news.clear()

    def _ask(self) -> None:
        plan, asked_at = self._plan, time.monotonic()
        if self._whole_since is None:
            if is_live(self._url, certificate=plan.certificate):
                self.answered_at = time.monotonic()
            return
        seen = ask_readiness(
            self._url, plan.model, plan.namespace, plan.expected_workers(), certificate=plan.certificate
        )
        if seen.has_answered:
            self.answered_at = time.monotonic()
        self.serves, self.problem = seen.serves, "" if seen.is_ready else seen.summary
        if not seen.is_ready:
            return
        self.routed_at = asked_at
        if self._wants_proof and (self._proof is None or not self._proof.is_alive()):
            self._proof = threading.Thread(target=self._prove, name="route-proof", daemon=True)
            self._proof.start()

    def _prove(self) -> None:
        """Sends one real request and, with KV handoffs, one for each pair of workers with a new instance."""
        plan, began_at = self._plan, time.monotonic()
        self._requests += 1
        prompt = f"{_PROOF_PROMPT}{self._requests}."
        own, certificate = own_headers(plan.namespace), plan.certificate
        problem = complete(
            self._url, plan.model, prompt, 1, timeout_s=_PROOF_TIMEOUT_S, certificate=certificate, headers=own
        )
        # Run it after a failed request too, because it names the pair of workers and the cause.
        self.handoff_problem = self._handoffs.prove_missing(self._handoffs.worker_ids(), _PROOF_TIMEOUT_S) or ""
        self.request_problem = problem or self._images.prove_missing(_PROOF_TIMEOUT_S) or ""
        if not self.request_problem and not self.handoff_problem:
            self.proved_at = began_at
