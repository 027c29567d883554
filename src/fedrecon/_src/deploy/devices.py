"""Rounds over devices: each comes when it likes, sends one report per round, and is not needed after that.

    GET /v1/plan                         the device plan
    GET /v1/check-in                     204 with Retry-After, or a task
    GET /v1/broadcasts/{sha256}          what a round begins with; immutable
    PUT /v1/rounds/{n}/reports/{ticket}  the report; 201, or 200 if it was received before

Every request has a token (`tokens`). Reports go to a file in the run's folder, so memory does not grow with them. A
round has one batch, whose reports outlive a restart: what a device has sent is not sent again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import math
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import httpx
import jax
import numpy as np
from pydantic import Field
from safetensors.numpy import save
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedrecon._src.algorithms.algorithm import Algorithm, ServerState, with_params
from fedrecon._src.algorithms.rounds import server_round, total_shapes
from fedrecon._src.algorithms.saving import DESCRIPTION, load_algorithm, save_algorithm
from fedrecon._src.algorithms.saving import digest as digest_of
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.factories import follow
from fedrecon._src.core.keys import fresh_key, round_key, run_keys, words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.coordinator import ServeResult, describe_round, run_facts, timestamp
from fedrecon._src.deploy.http_client import Conflict, Connection, backoff
from fedrecon._src.deploy.http_server import (
    Limits,
    RequestError,
    Service,
    immutable_response,
    round_number,
)
from fedrecon._src.deploy.registry import MAX_SECONDS, NotEnoughNodes
from fedrecon._src.deploy.tasks import DIGEST, MAC_BYTES, NAME_BYTES, TICKET
from fedrecon._src.deploy.tokens import Budgets, TokenError, device_of
from fedrecon._src.privacy.accounting import epsilon_of
from fedrecon._src.privacy.noise import ShareOfNoise
from fedrecon._src.privacy.secure_sum.two_servers import OWNER, Spool, SumPlan, read_sum_plan, unmask
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.server.fixed_point import from_vector
from fedrecon._src.storage.atomic import StorageError, read_bytes
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.ownership import MODEL
from fedrecon._src.storage.run_folder import RunFolder, find_part

SPOOL, BATCH, BATCH_FORMAT = "reports.spool", "batch.json", Format("fedrecon-device-batch", 1)  # in the run's folder
MOST_PLAN = 2**24  # bytes
REQUESTS_PER_SECOND, BURST = 1.0, 30.0  # of one device


@dataclass(frozen=True)
class ServedPlan:
    """What the coordinator needs to know of a device plan.

    Attributes:
      content: the plan, as devices have it.
      algorithm: the digest of the algorithm.
      rounds: how many.
      length: of a vector.
      dtype: of its entries.
      least: the fewest reports of a sum.
      reports_per_day: the most that one device may send.
      sums: what the helper knows of it; None if sums are open.
    """

    content: bytes
    algorithm: str
    rounds: int
    length: int
    dtype: str
    least: int
    reports_per_day: int
    sums: SumPlan | None

    @property
    def digest(self) -> str:
        """The SHA-256 of the plan."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def report_bytes(self) -> int:
        """The size of every report."""
        return 4 * self.length if self.sums is None else self.sums.report_bytes


def read_served_plan(bundle: Path) -> ServedPlan:
    """Read the plan in a bundle.

    Raises:
      StorageError: there is none, or it makes no sense.
    """
    file = bundle / "plan.json"
    content = read_bytes(file, MOST_PLAN)
    try:
        plan = json.loads(content)
        protocol, vector, least = plan["sum"]["protocol"], plan["vector"], plan["sum"]["least"]
        limit, dtype = plan["limits"]["reports_per_day"], vector.get("dtype", "uint32")
        numbers = (plan["rounds"], vector["length"], least, limit)
        good = plan["format"] == "fedrecon-device-plan" and protocol in ("open", "two-servers")
        good = good and all(type(number) is int and number > 0 for number in numbers) and dtype in ("uint32", "float32")
        algorithm = str(plan["algorithm"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise StorageError(f"{file} is not a device plan; make one with fedrecon bundle RUN --train")
    sums = read_sum_plan(file) if protocol == "two-servers" else None
    return ServedPlan(content, algorithm, numbers[0], numbers[1], dtype, least, limit, sums)


@dataclass(frozen=True)
class DevicePace:
    """How rounds over devices are paced.

    Attributes:
      reports: how many close a round; None for the plan's least.
      deadline: seconds after which a round is closed if there are enough for a sum.
      patience: seconds to wait for that many before giving up.
      retry: seconds after which a device asks again, on average.
    """

    reports: int | None = None
    deadline: float = 3600.0
    patience: float = 86_400.0
    retry: float = 60.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("reports", self.reports, least=1)
        for name in ("deadline", "patience", "retry"):
            check_number(name, getattr(self, name), least=1e-3, most=MAX_SECONDS)


@dataclass(frozen=True)
class DeviceTask:
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
    round: Annotated[int, Field(ge=0, lt=10**9)]
    broadcast: Annotated[str, Field(pattern=f"^{DIGEST}$")]
    size: Annotated[int, Field(ge=0)]
    ticket: Annotated[str, Field(pattern=f"^{TICKET}$")]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass
class OpenRound:
    """A round that takes reports."""

    number: int
    batch: bytes
    broadcast: bytes
    spool: Spool
    most: int
    deadline: float

    def __post_init__(self) -> None:
        """Name what it begins with."""
        self.digest = hashlib.sha256(self.broadcast).hexdigest()
        self.owners = set(self.spool.owners)


class DeviceApi(Service):
    """The endpoints for devices."""

    def __init__(self, plan: ServedPlan, secret: bytes, retry: float = 60.0, limits: Limits | None = None):
        """Admit devices whose tokens were issued with a secret."""
        self.plan, self._secret, self._retry = plan, secret, retry
        self.run = ""
        self.counts: Counter[str] = Counter()  # of a round: invited, late, bytes
        self._round: OpenRound | None = None
        self._changed = threading.Condition()
        self._budgets = Budgets(REQUESTS_PER_SECOND, BURST)
        self._today: tuple[int, Counter[bytes]] = (0, Counter())  # the day, and reports by owner
        routes = [
            Route("/v1/plan", self.get_plan),
            Route("/v1/check-in", self.check_in),
            Route("/v1/broadcasts/{digest}", self.get_broadcast),
            Route("/v1/rounds/{number}/reports/{ticket}", self.put_report, methods=["PUT"]),
        ]
        super().__init__(limits or Limits(plan.report_bytes), routes)

    # ---- for the round loop ----

    def open_round(self, new: OpenRound | None) -> None:
        """Take reports of a round; None to take none."""
        with self._changed:
            self._round = new

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
        try:
            device = device_of(self._secret, token if scheme.lower() == "bearer" else "")
        except TokenError as error:
            raise RequestError(401, error.problem, str(error), **{"WWW-Authenticate": "Bearer"}) from None
        if not self._budgets.spend(device):
            raise RequestError(429, "too-many", f"a device may send {REQUESTS_PER_SECOND:g} requests per second")
        return device, hmac.digest(self._secret, f"fedrecon-owner {device}".encode(), "sha256")[:OWNER]

    def _ticket(self, number: int, device: str) -> str:
        text = f"fedrecon-ticket {self.run} {number} {device}"
        return hmac.digest(self._secret, text.encode(), "sha256")[: NAME_BYTES + MAC_BYTES].hex()

    def _reports_today(self) -> Counter[bytes]:
        day = int(time.time() // 86_400)
        if self._today[0] != day:
            self._today = (day, Counter())
        return self._today[1]

    async def get_plan(self, request: Request) -> Response:
        """Return the plan."""
        self._authenticate(request)
        return immutable_response(request, self.plan.content, self.plan.digest, "application/json")

    async def check_in(self, request: Request) -> Response:
        """Return the open round, if the device has not reported in it and may report today."""
        device, owner = self._authenticate(request)
        with self._changed:
            current = self._round
            over = current is None or owner in current.owners or len(current.spool) >= current.most
            if current is None or over or self._reports_today()[owner] >= self.plan.reports_per_day:
                pause = math.ceil(self._retry * random.uniform(0.5, 1.5))  # or all come back at once
                return Response(status_code=204, headers={"Retry-After": str(pause)})
            self.counts["invited"] += 1
            task = DeviceTask(
                self.plan.digest,
                self.run,
                current.number,
                current.digest,
                len(current.broadcast),
                self._ticket(current.number, device),
                round(max(current.deadline - time.monotonic(), 1.0), 3),
            )
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
        if not hmac.compare_digest(request.path_params["ticket"].encode(), self._ticket(number, device).encode()):
            raise RequestError(404, "forged", "the coordinator gave this device no such ticket")
        if self._is_received(number, owner):
            return Response(status_code=200)
        data = await self.read_body(request)
        if len(data) != self.plan.report_bytes:
            raise RequestError(400, "wrong-size", f"a report has {self.plan.report_bytes} bytes (got {len(data)})")
        if self.plan.dtype == "float32" and not np.isfinite(np.frombuffer(data, "<f4")).all():
            raise RequestError(400, "not-finite", "a report has finite numbers")
        with self._changed:
            if self._is_received(number, owner) or self._round is None:  # meanwhile, by another connection
                return Response(status_code=200)
            self._round.spool.add(owner, data)
            self._round.owners.add(owner)
            self._reports_today()[owner] += 1
            self.counts["received"] += len(data)
            self._changed.notify_all()
        return Response(status_code=201)

    def _is_received(self, number: int, owner: bytes) -> bool:
        """Say whether a report is there already; raise if its round is over or the device has sent enough today."""
        with self._changed:
            current = self._round
            if current is not None and current.number == number and owner in current.owners:
                return True
            if current is None or current.number != number or len(current.spool) >= current.most:
                self.counts["late"] += 1
                raise RequestError(410, "expired", "the round is over")
            if self._reports_today()[owner] >= self.plan.reports_per_day:
                raise RequestError(429, "enough-today", f"a device may report {self.plan.reports_per_day} times a day")
            return False


# ---- the round loop ----


LIARS = (0.0, 0.1, 0.25, 0.5)  # shares of the reports of a round for which the guarantee is computed


def describe_noise(share: ShareOfNoise, rounds: int, reports: int, delta: float) -> list[tuple[float, float]]:
    """Return what holds if a share of the reports lies about its noise: pairs of that share and epsilon.

    A device that lies, or works together with a server, adds no noise that hides others. One that drops out adds none,
    and hides nobody. No sampling is claimed, and a device may be in every round.

    Args:
      share: of the noise that a device adds.
      rounds: how many sums are published.
      reports: how many a sum has.
      delta: of the guarantee.
    """
    return [(lie, epsilon_of([share.release(1.0, rounds, (1 - lie) * reports)], delta)) for lie in LIARS]


class Start(NamedTuple):
    """What training begins with.

    Attributes:
      algorithm: what is trained.
      params: the global parameters.
      save: writes a model to a `folder`, with other `params`.
    """

    algorithm: Algorithm
    params: Any
    save: Callable[..., Any]


def open_start(path: Path, plan: ServedPlan) -> Start:
    """Open what a plan's training begins with: a run of `fedrecon train`, or what `save_algorithm` wrote.

    Raises:
      StorageError: there is none, or it is damaged.
    """
    folder = path if (path / DESCRIPTION).exists() else find_part(path, MODEL)
    if (folder / DESCRIPTION).exists():
        algorithm, params = load_algorithm(folder)
        return Start(algorithm, params, functools.partial(save_algorithm, algorithm=algorithm, replace=True))
    saved, recipe = open_model(path), json.loads(plan.content).get("aggregator")
    algorithm = saved.trainable(plan.rounds, None if recipe is None else follow(recipe))
    return Start(algorithm, saved.params, lambda folder, params: dataclasses.replace(saved, params=params).save(folder))


def serve_devices(
    api: DeviceApi,
    start: Start,
    folder: RunFolder,
    helper: Connection | None,
    pace: DevicePace,
    *,
    seed: int = 0,
    delta: float = 1e-6,
    resume: bool = False,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Callable[[str], None] = lambda text: None,
) -> ServeResult:
    """Train over devices, and write what `fedrecon train` writes.

    Args:
      api: takes reports; somebody serves it meanwhile.
      start: what training begins with.
      folder: where everything goes.
      helper: reaches the helper, signed with the coordinator's key; None if the plan's sums are open.
      pace: how many reports, and how long to wait.
      seed: of the run.
      delta: with noise, of the guarantee.
      resume: continue from the newest checkpoint, and with the reports of the round after it.
      on_record: called with every round's record.
      say: called with remarks.

    Raises:
      NotEnoughNodes: too few reports for too long, or the helper cannot be reached.
      StorageError: the folder holds another run, or the plan is for another algorithm.
    """
    if (actual := digest_of(start.algorithm)) != api.plan.algorithm:
        raise StorageError(f"the plan is for the algorithm {api.plan.algorithm[:16]}, and this is {actual[:16]}")
    if (helper is None) != (api.plan.sums is None):
        raise ValueError(f"`helper` must be {'given' if helper is None else 'None'}: the plan says how sums are made")
    with folder.lock():
        noise = _noise_of(api.plan, start.algorithm, pace, delta, say)
        facts = run_facts(api.plan.digest, {"made_by": "devices", "seed": seed, "noise": noise}, folder, resume)
        folder.describe(facts)
        api.run = facts["deployment"]["run"]
        rounds = _Rounds(api, start, folder, helper, pace, facts["seed"], say)
        interrupted = False
        try:
            while rounds.done < api.plan.rounds:
                record = rounds.run_next()
                on_record(record)
        except KeyboardInterrupt:
            interrupted = True
        params = rounds.params()
        start.save(folder=folder.model_path, params=params)
        folder.describe(facts | {"ended": timestamp(), "rounds": rounds.done, "interrupted": interrupted})
        return ServeResult(params, rounds.history, rounds.done, None, None, interrupted)


def _noise_of(
    plan: ServedPlan, algorithm: Algorithm, pace: DevicePace, delta: float, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Say what the noise of devices promises; None without noise.

    Raises:
      StorageError: a sum of so few reports as the plan allows would have less noise than is promised.
    """
    if algorithm.aggregator.share is None:
        return None
    share = algorithm.aggregator.share(total_shapes(algorithm).parts)
    if plan.least < share.least:
        raise StorageError(f"`least` of the plan is {plan.least}; the noise is promised for {share.least} reports")
    reports = max(pace.reports or plan.least, plan.least)
    promised = epsilon_of([share.release(1.0, plan.rounds)], delta)
    say(f"noise of devices: epsilon {promised:.3g} at delta {delta:g} after all rounds, if {share.least} are honest")
    table = describe_noise(share, plan.rounds, reports, delta)
    holds = ", ".join(f"{lie:.0%}: {epsilon:.3g}" for lie, epsilon in table)
    say(f"with {reports} reports in a round, of which a share adds no noise, epsilon is {holds}")
    return {
        "delta": delta,
        "epsilon": promised,
        "least": share.least,
        "liars": {f"{lie:g}": epsilon for lie, epsilon in table},
    }


class _Rounds:
    """Training between rounds."""

    def __init__(
        self,
        api: DeviceApi,
        start: Start,
        folder: RunFolder,
        helper: Connection | None,
        pace: DevicePace,
        seed: int,
        say: Callable[[str], None],
    ):
        self.api, self.plan, self.folder, self.helper, self.pace = api, api.plan, folder, helper, pace
        self.algorithm, self.seed, self.say = start.algorithm, seed, say
        begun = with_params(self.algorithm.init(run_keys(seed).init), start.params)
        self.state: ServerState = jax.tree.map(np.asarray, begun)
        self.done, self.history = 0, list[dict[str, Any]]()
        if (checkpoint := folder.restore({"server": self.state._asdict(), "kept": ()})) is not None:
            self.done, saved, self.history = checkpoint
            self.state = ServerState(**saved["server"])

    def params(self) -> Any:
        return jax.tree.map(np.asarray, self.algorithm.params(self.state))

    def run_next(self) -> dict[str, Any]:
        """Run one round, save the state after it, and return its record."""
        began, number = time.monotonic(), self.done
        self.api.counts.clear()
        current, batch_size = self._open_batch(number)
        try:
            total, received, counted = self._collect(current, batch_size)
        finally:
            self.api.open_round(None)
            current.spool.close()
        noised = self.algorithm.aggregator.share is not None
        key = fresh_key() if noised else round_key(self.seed, number)
        parts = from_vector(total, total_shapes(self.algorithm))
        state, report = server_round(self.algorithm, self.state, [parts], key)
        self.state, self.done = jax.tree.map(np.asarray, state), number + 1
        counts = self.api.counts
        record = {
            **describe_round(self.algorithm, self.done, report),
            "invited": counts["invited"],
            "answered": counted,
            "late": counts["late"],
            "failed": {"unreadable": received - counted} if received > counted else {},
            "seconds": round(time.monotonic() - began, 3),
            "bytes_sent": counts["sent"],
            "bytes_received": counts["received"],
        }
        self.history.append(record)
        self.folder.record(record)
        self.folder.checkpoint(self.done, {"server": self.state._asdict(), "kept": ()})
        current.spool.path.unlink()
        return record

    def _open_batch(self, number: int) -> tuple[OpenRound, int | None]:
        """Begin a round, or continue it; also return how many reports its batch was closed with."""
        file, spool = self.folder.path / BATCH, self.folder.path / SPOOL
        about = read_manifest(file, BATCH_FORMAT) if file.exists() else {}
        if about.get("round") != number:
            spool.unlink(missing_ok=True)
            about = {"round": number, "batch": secrets.token_hex(16), "size": None}
            write_manifest(file, BATCH_FORMAT, about)
        batch, reports = bytes.fromhex(about["batch"]), Spool(spool, self.plan.report_bytes)
        if len(reports):
            self.say(f"round {number + 1} continues with {len(reports)} reports")
        most = max(self.pace.reports or self.plan.least, self.plan.least)
        deadline = time.monotonic() + self.pace.deadline
        return OpenRound(number, batch, self._broadcast(number, batch), reports, most, deadline), about["size"]

    def _broadcast(self, number: int, batch: bytes) -> bytes:
        arrays = {f"message/{path}": leaf for path, leaf in flatten(self.algorithm.message(self.state))[0].items()}
        about = {
            "plan": self.plan.digest,
            "run": self.api.run,
            "round": number,
            "key": words_of(round_key(self.seed, number)).tolist(),
            "batch": batch.hex(),
        }
        return save(
            {name: np.asarray(leaf, order="C") for name, leaf in arrays.items()}, {"fedrecon": json.dumps(about)}
        )

    def _collect(self, current: OpenRound, batch_size: int | None) -> tuple[np.ndarray, int, int]:
        """Wait for enough reports and return their sum, how many there were, and how many are in it."""
        end, needed = time.monotonic() + self.pace.patience, self.plan.least
        while True:
            if batch_size is None:
                self._await_reports(current, needed, end)
                batch_size = len(current.spool)
                about = {"round": current.number, "batch": current.batch.hex(), "size": batch_size}
                write_manifest(self.folder.path / BATCH, BATCH_FORMAT, about)
            if self.plan.sums is None or self.helper is None:
                return self._add_open(current.spool, batch_size), batch_size, batch_size
            try:
                answer = self._ask_helper(self.helper, current, batch_size, end)
            except Conflict as refusal:
                if refusal.kind != "too-few":
                    raise NotEnoughNodes(f"the helper refuses round {current.number + 1}: {refusal}") from None
                self.say(f"round {current.number + 1} needs more reports: {refusal}")
                needed, batch_size = batch_size + 1, None
                current.most = max(current.most, needed)
                continue
            total, counted = unmask(self.plan.sums, current.spool.reports(batch_size), answer, batch_size)
            return total, batch_size, counted

    def _await_reports(self, current: OpenRound, needed: int, end: float) -> None:
        """Take reports until there are as many as close a round, or enough for a sum at its deadline."""
        self.api.open_round(current)
        while not self.api.wait(current.most, min(current.deadline, end) - time.monotonic()):
            if len(current.spool) >= needed:
                break
            if time.monotonic() >= end:
                raise NotEnoughNodes(
                    f"round {current.number + 1} has {len(current.spool)} reports and needs {needed}. "
                    f"{current.number} rounds are done and saved; continue with --resume"
                )
            current.deadline = time.monotonic() + self.pace.deadline
        self.api.open_round(None)

    def _ask_helper(self, helper: Connection, current: OpenRound, batch_size: int, end: float) -> bytes:
        """Return the helper's answer; ask again if it cannot be reached."""
        path = f"/v1/rounds/{current.number}/batches/{current.batch.hex()}?run={quote(self.api.run)}"
        records, pauses, status = current.spool.records(batch_size), backoff(), ""
        while True:
            try:
                return helper.post(path, records, self.plan.report_bytes + batch_size)
            except httpx.TransportError as error:
                reason = helper.lasting(error)
                if reason is not None or time.monotonic() > end:
                    raise NotEnoughNodes(
                        reason or f"the helper at {helper.server} cannot be reached: {error}"
                    ) from None
                if status != type(error).__name__:
                    status = type(error).__name__
                    self.say(f"the helper at {helper.server} cannot be reached ({status}: {error}); trying again")
                time.sleep(next(pauses))

    def _add_open(self, spool: Spool, count: int) -> np.ndarray:
        """Add up reports that the coordinator can read."""
        dtype = np.dtype(self.plan.dtype).newbyteorder("<")
        total: Any = np.zeros(self.plan.length, np.float64 if self.plan.dtype == "float32" else np.uint32)
        for report in spool.reports(count):
            total += np.frombuffer(report, dtype)
        return total.astype(self.plan.dtype)
