"""The coordinator's side for devices: each comes when it likes, reports once a round, and is not needed after that.

    GET /v1/plan                         the device plan
    GET /v1/check-in                     204 with Retry-After, or a task
    GET /v1/broadcasts/{sha256}          what a round begins with; immutable
    PUT /v1/rounds/{n}/reports/{ticket}  the report; 201, or 200 if it was received before

Every request has a token (`admission`). Reports go to a file in the run's folder, so memory does not grow with them. A
round has one batch, whose reports outlive a restart: what a device has sent is not sent again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fedrecon._src.core.checks import check_number
from fedrecon._src.deploy.admission import Budgets, device_of
from fedrecon._src.deploy.http_server import (
    ROUNDS,
    Limits,
    RequestError,
    Service,
    immutable_response,
    round_number,
)
from fedrecon._src.deploy.registry import MAX_SECONDS
from fedrecon._src.deploy.tasks import DIGEST, MAC_BYTES, NAME_BYTES, NodeTask
from fedrecon._src.privacy.secure_sum.two_servers import OWNER, ServedPlan, Spool

REQUESTS_PER_SECOND, BURST = 1.0, 30.0  # of one device
COUNTED = "reports-{}.counted"  # by day, in the run's folder: the owners of the day's reports, 16 bytes each


@dataclass(frozen=True)
class DeviceTask(NodeTask):
    """What a device is asked to do: fetch a broadcast, train on it, report.

    Attributes:
      plan: the digest of the device plan.
      run: the name of the training.
      round: which round of it, from 0.
      broadcast: the SHA-256 of what the round begins with, by which it is fetched.
      size: the bytes of that.
      ticket: what the report is sent with.
      seconds: how many are left.
    """

    plan: Annotated[str, Field(pattern=f"^{DIGEST}$")]
    run: str


@dataclass
class OpenRound:
    """A round that takes reports, until there are as many as close it."""

    number: int
    batch: bytes
    broadcast: bytes
    spool: Spool
    closes_at: int
    deadline: float

    def __post_init__(self) -> None:
        """Name what it begins with."""
        self.digest = hashlib.sha256(self.broadcast).hexdigest()
        self.owners = set(self.spool.owners)


class DeviceApi(Service):
    """The endpoints for devices."""

    def __init__(self, plan: ServedPlan, secret: bytes, retry: float = 60.0, limits: Limits | None = None):
        """Admit devices whose tokens were issued with a secret, and have them ask again after `retry` s on average."""
        check_number("retry", retry, least=1e-3, most=MAX_SECONDS)
        self.plan, self._secret, self._retry = plan, secret, retry
        self.run, self.done = "", 0  # the training, and how many of its rounds are over
        self.folder: Path | None = None  # where the reports of a day are counted; None to forget them with the process
        self.counts: Counter[str] = Counter()  # of a round: devices invited, late reports, bytes sent and received
        self._round: OpenRound | None = None
        self._closed: OpenRound | None = None  # the last one
        self._changed = threading.Condition()
        self._budgets = Budgets(REQUESTS_PER_SECOND, BURST)
        self._day, self._today = "", Counter[bytes]()  # reports by owner
        self._counted: Spool | None = None  # the same, on disk
        super().__init__(limits or Limits(plan.report_bytes), ROUNDS)

    # ---- for the round loop ----

    def open_round(self, new: OpenRound) -> None:
        """Take reports of a round."""
        with self._changed:
            self._round = new

    def close_round(self, current: OpenRound) -> None:
        """Take no reports; a device that did not hear that its report of this round arrived is still told so."""
        with self._changed:
            self._round, self._closed = None, current

    def wait(self, reports: int, seconds: float) -> bool:
        """Wait until the open round has so many reports, and say whether it has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._round is not None and len(self._round.spool) >= reports, seconds
            )

    # ---- for devices ----

    def _authenticate(self, request: Request) -> tuple[str, bytes]:
        """Return the name of a device, and the bytes that stand for it in a spool."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        device = device_of(self._secret, token if scheme.lower() == "bearer" else "")
        if not self._budgets.spend(device):
            raise RequestError(429, "too-many", f"a device may send {REQUESTS_PER_SECOND:g} requests per second")
        return device, hmac.digest(self._secret, f"fedrecon-owner {device}".encode(), "sha256")[:OWNER]

    def _ticket(self, number: int, device: str) -> str:
        text = f"fedrecon-ticket {self.run} {number} {device}"
        return hmac.digest(self._secret, text.encode(), "sha256")[: NAME_BYTES + MAC_BYTES].hex()

    def _reports_today(self) -> Counter[bytes]:
        """Return how many reports devices have sent since midnight (UTC), by owner, also before a restart."""
        day = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
        if self._day != day:
            self.close()
            self._day, self._today = day, Counter()
            if self.folder is not None:
                for file in self.folder.glob(COUNTED.format("*")):
                    if file.name != COUNTED.format(day):
                        file.unlink()
                self._counted = Spool(self.folder / COUNTED.format(day), 0)
                self._today.update(self._counted.owners)
        return self._today

    def close(self) -> None:
        """Close the file of the day's reports; it is opened again for the next report."""
        if self._counted is not None:
            self._counted.close()
        self._day, self._counted = "", None

    async def get_plan(self, request: Request) -> Response:
        """Return the plan."""
        self._authenticate(request)
        return immutable_response(request, self.plan.content, self.plan.digest, "application/json")

    async def check_in(self, request: Request) -> Response:
        """Return the open round, if the device has not reported in it and may report today."""
        device, owner = self._authenticate(request)
        with self._changed:
            current = self._round
            over = current is None or owner in current.owners or len(current.spool) >= current.closes_at
            if current is None or over or self._reports_today()[owner] >= self.plan.reports_per_day:
                pause = math.ceil(self._retry * random.uniform(0.5, 1.5))  # or all come back at once
                return Response(status_code=204, headers={"Retry-After": str(pause)})
            self.counts["invited"] += 1
            ticket, seconds = self._ticket(current.number, device), max(current.deadline - time.monotonic(), 1.0)
            facts = (current.number, current.digest, len(current.broadcast), ticket, round(seconds, 3))
            task = DeviceTask(*facts, self.plan.digest, self.run)
        return JSONResponse(dataclasses.asdict(task), headers={"Cache-Control": "no-store"})

    async def get_broadcast(self, request: Request) -> Response:
        """Return what the open round begins with."""
        self._authenticate(request)
        current = self._round
        if current is None or request.path_params["digest"] != current.digest:
            raise RequestError(404, "no-broadcast", "no open round begins with such a broadcast")
        self.counts["sent"] += len(current.broadcast)
        return immutable_response(request, current.broadcast, current.digest, "application/octet-stream")

    async def put_report(self, request: Request) -> Response:
        """Take a report."""
        device, owner = self._authenticate(request)
        number = round_number(request)
        if not self.run:  # there are no tickets yet
            raise _not_open()
        if not hmac.compare_digest(request.path_params["ticket"].encode(), self._ticket(number, device).encode()):
            raise RequestError(404, "forged", "the coordinator gave this device no such ticket")
        if self._check_report(number, owner):
            return Response(status_code=200)
        data = await self.read_body(request, owner)
        if len(data) != self.plan.report_bytes:
            raise RequestError(400, "wrong-size", f"a report has {self.plan.report_bytes} bytes (got {len(data)})")
        if self.plan.dtype == "float32" and not np.isfinite(np.frombuffer(data, "<f4")).all():
            raise RequestError(400, "not-finite", "a report has finite numbers")
        with self._changed:
            if self._check_report(number, owner) or self._round is None:  # meanwhile, by another connection
                return Response(status_code=200)
            self._round.spool.add(owner, data)
            self._round.owners.add(owner)
            self._reports_today()[owner] += 1
            if self._counted is not None:
                self._counted.add(owner, b"")
            self.counts["received"] += len(data)
            self._changed.notify_all()
        return Response(status_code=201)

    def _check_report(self, number: int, owner: bytes) -> bool:
        """Return whether a report is there already; refuse it if its round is not open, or after enough reports."""
        with self._changed:
            current = self._round
            rounds = (current, self._closed)
            if any(task and task.number == number and owner in task.owners for task in rounds):
                return True
            if current is None and number >= self.done:  # after a restart, or while the helper is asked
                raise _not_open()
            if current is None or current.number != number or len(current.spool) >= current.closes_at:
                self.counts["late"] += 1
                raise RequestError(410, "expired", "the round is over")
            if self._reports_today()[owner] >= self.plan.reports_per_day:
                raise RequestError(429, "enough-today", f"a device may report {self.plan.reports_per_day} times a day")
            return False


def _not_open() -> RequestError:
    return RequestError(429, "not-open", "the round is not open now; send the report again", **{"Retry-After": "5"})
