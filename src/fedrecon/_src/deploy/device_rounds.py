"""The round loop over devices: open a round, wait for reports, ask the helper, take a step, save."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import numpy as np
from safetensors.numpy import save

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.algorithms.saving import DESCRIPTION, load_algorithm, save_algorithm
from fedrecon._src.algorithms.saving import digest as digest_of
from fedrecon._src.core.checks import check_rules
from fedrecon._src.core.display import Say
from fedrecon._src.core.factories import follow
from fedrecon._src.core.keys import round_key, words_of
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.deploy.coordinator import ServeResult, Training, begin_run
from fedrecon._src.deploy.devices import DeviceApi, OpenRound
from fedrecon._src.deploy.http_client import Conflict, Connection, backoff
from fedrecon._src.deploy.plan_privacy import share_of_noise
from fedrecon._src.deploy.registry import NotEnoughNodes, Pace
from fedrecon._src.privacy.accounting import epsilon_of
from fedrecon._src.privacy.noise import ShareOfNoise
from fedrecon._src.privacy.secure_sum.two_servers import ServedPlan, Spool, unmask
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.server.fixed_point import from_vector
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.ownership import MODEL
from fedrecon._src.storage.run_folder import RunFolder, find_part

SPOOL, BATCH, BATCH_FORMAT = "reports.spool", "batch.json", Format("fedrecon-device-batch", 1)  # in the run's folder


LIARS = (0.0, 0.1, 0.25, 0.5)  # shares of the reports of a round for which the guarantee is computed


def describe_noise(share: ShareOfNoise, rounds: int, reports: int, delta: float) -> dict[str, float]:
    """Return epsilon by the share of the reports that lie about their noise.

    A device that lies, or works together with a server, adds no noise that hides others. One that drops out adds none,
    and hides nobody. No sampling is claimed, and a device may be in every round.

    Args:
      share: of the noise that a device adds.
      rounds: how many sums are published.
      reports: how many a sum has.
      delta: of the guarantee.
    """
    return {f"{lie:g}": epsilon_of([share.release(1.0, rounds, (1 - lie) * reports)], delta) for lie in LIARS}


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
    pace: Pace,
    *,
    seed: int = 0,
    resume: bool = False,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    say: Say = lambda text: None,
) -> ServeResult:
    """Train over devices, and write what `fedrecon train` writes.

    Args:
      api: takes reports; somebody serves it meanwhile.
      start: what training begins with.
      folder: where everything goes.
      helper: reaches the helper, signed with the coordinator's key; None if the plan's sums are open.
      pace: how many reports, and how long to wait.
      seed: of the run.
      resume: continue from the newest checkpoint, and with the reports of the round after it.
      on_record: called with every round's record.
      say: called with remarks.

    Raises:
      NotEnoughNodes: too few reports for too long, or the helper cannot be reached.
      StorageError: the folder holds another run, or the plan is for another algorithm.
      ValueError: a round would have more reports than its sum has room for.
    """
    plan, reports = api.plan, pace.per_round
    if (actual := digest_of(start.algorithm)) != plan.algorithm:
        raise StorageError(f"the plan is for the algorithm {plan.algorithm[:16]}, and this is {actual[:16]}")
    room, by_noise, needed = plan.ring.clients or math.inf, plan.per_round, "given" if helper is None else "None"
    rules = {
        f"--per-round must be at most {room}, for which sums have room (got {reports})": (reports or 0) <= room,
        f"--per-round must be {by_noise}, by which the plan divides noisy sums (got {reports})": (
            by_noise is None or reports in (None, by_noise)
        ),
        f"`helper` must be {needed}: the plan says how sums are made": (helper is None) == (plan.protocol == "open"),
    }
    check_rules(rules)
    with folder.lock():
        noise = _noise_of(plan, start.algorithm, pace, say)
        facts = begin_run(folder, plan.digest, {"made_by": "devices", "seed": seed, "noise": noise}, resume)
        api.run, api.folder = facts["deployment"]["run"], folder.path
        training = Training(start.algorithm, folder, facts["seed"], start.params)
        api.done = training.done
        rounds = _Rounds(api, training, helper, pace, say)
        interrupted = False
        try:
            while training.done < plan.rounds:
                on_record(rounds.run_next())
        except KeyboardInterrupt:
            interrupted = True
        finally:
            api.close()
        start.save(folder=folder.model_path, params=training.params())
        return training.end(facts, interrupted)


def _reports_of(plan: ServedPlan, pace: Pace) -> int:
    """Return how many reports close a round."""
    return max(pace.per_round or plan.per_round or plan.least, plan.least)


def _noise_of(plan: ServedPlan, algorithm: Algorithm, pace: Pace, say: Say) -> dict[str, Any] | None:
    """Say what the noise of devices promises; None without noise.

    Raises:
      StorageError: the plan's devices add other noise than the algorithm says, or a sum of so few reports as the plan
        allows would have less than is promised.
    """
    share = share_of_noise(algorithm)
    equal, least = (plan.noise and plan.noise.variance) == (share and share.variance), share.least if share else 0
    rules = {
        "the noise that the plan's devices add is not that of the algorithm; make the bundle again": equal,
        f"`least` of the plan is {plan.least}; the noise is promised for {least} reports": plan.least >= least,
    }
    check_rules(rules, StorageError)
    if share is None or plan.noise is None:
        return None
    delta = plan.noise.delta
    promised = epsilon_of([share.release(1.0, plan.rounds)], delta)
    say(
        f"privacy: devices add noise; epsilon is {promised:.3g} at delta {delta:g} after {plan.rounds} rounds, while "
        f"at least {share.least} reports of every sum are honest"
    )
    tables = {}
    for reports in sorted({plan.least, _reports_of(plan, pace)}):
        tables[str(reports)] = table = describe_noise(share, plan.rounds, reports, delta)
        holds = ", ".join(f"{epsilon:.3g} ({float(lie):.0%})" for lie, epsilon in table.items())
        say(f"privacy: epsilon if a share of {reports} reports adds no noise: {holds}")
    return {"delta": delta, "epsilon": promised, "least": share.least, "liars": tables}


@dataclass(frozen=True)
class _Rounds:
    """Rounds of a training over devices."""

    api: DeviceApi
    training: Training
    helper: Connection | None
    pace: Pace
    say: Say

    def run_next(self) -> dict[str, Any]:
        """Run one round, save the state after it, and return its record."""
        began, training, counts = time.monotonic(), self.training, self.api.counts
        counts.clear()
        current, batch_size = self._open_batch(training.done)
        try:
            total, received, counted = self._collect(current, batch_size)
        finally:
            self.api.close_round(current)
            current.spool.close()
        record = {
            **training.step([from_vector(self.api.plan.complete(total), total_shapes(training.algorithm))]),
            "invited": counts["invited"],
            "answered": counted,
            "late": counts["late"],
            "failed": {"unreadable": received - counted} if received > counted else {},
            "seconds": round(time.monotonic() - began, 3),
            "bytes_sent": counts["sent"],
            "bytes_received": counts["received"],
        }
        if (share := share_of_noise(training.algorithm)) is not None and self.api.plan.noise is not None:
            record["epsilon"] = epsilon_of([share.release(1.0, training.done)], self.api.plan.noise.delta)
        training.record(record)
        training.checkpoint()
        current.spool.path.unlink()
        self.api.done = training.done
        return record

    def _open_batch(self, number: int) -> tuple[OpenRound, int | None]:
        """Begin a round, or continue it; also return how many reports its batch was closed with.

        Raises:
          StorageError: the round would continue with another broadcast than the one its reports are bound to.
        """
        file, spool = self.training.folder.path / BATCH, self.training.folder.path / SPOOL
        about = read_manifest(file, BATCH_FORMAT) if file.exists() else {}
        is_new = about.get("round") != number
        batch = secrets.token_bytes(16) if is_new else bytes.fromhex(about["batch"])
        if is_new:
            spool.unlink(missing_ok=True)
        broadcast, reports = self._broadcast(number, batch), Spool(spool, self.api.plan.report_bytes)
        closes_at = _reports_of(self.api.plan, self.pace)
        current = OpenRound(number, batch, broadcast, reports, closes_at, time.monotonic() + self.pace.deadline)
        if is_new:
            self._write_batch(current, None)
            return current, None
        if about.get("broadcast") != current.digest:
            reports.close()
            raise StorageError(
                f"{file} has the broadcast {str(about.get('broadcast'))[:16]}, and round {number + 1} would continue "
                f"with {current.digest[:16]}; delete {file.name} to begin the round again"
            )
        if len(reports):
            self.say(f"round {number + 1} continues with {len(reports)} reports")
        # Reports that were lost (a full disk) are asked for again.
        return current, about["size"] if (about["size"] or 0) <= len(reports) else None

    def _write_batch(self, current: OpenRound, size: int | None) -> None:
        """Write what a restart needs to know of a round; with the size, once the helper may be asked."""
        about = {"round": current.number, "batch": current.batch.hex(), "broadcast": current.digest, "size": size}
        write_manifest(self.training.folder.path / BATCH, BATCH_FORMAT, about)

    def _broadcast(self, number: int, batch: bytes) -> bytes:
        training = self.training
        about = {
            "plan": self.api.plan.digest,
            "run": self.api.run,
            "round": number,
            "key": words_of(round_key(training.seed, number)).tolist(),
            "batch": batch.hex(),
        }
        leaves = flatten(training.algorithm.message(training.state))[0]
        arrays = {f"message/{path}": np.asarray(leaf, order="C") for path, leaf in leaves.items()}
        return save(arrays, {"fedrecon": json.dumps(about)})

    def _collect(self, current: OpenRound, batch_size: int | None) -> tuple[np.ndarray, int, int]:
        """Wait for enough reports and return their sum, how many there were, and how many are in it."""
        end, needed = time.monotonic() + self.pace.patience, self.api.plan.least
        if batch_size is not None:  # it was closed before a restart
            self.api.close_round(current)
        while True:
            if batch_size is None:
                self._await_reports(current, needed, end)
                batch_size = len(current.spool)
                self._write_batch(current, batch_size)
            if self.helper is None:
                return self._add_open(current.spool, batch_size), batch_size, batch_size
            try:
                answer = self._ask_helper(self.helper, current, batch_size, end)
            except Conflict as refusal:
                if refusal.reason != "too-few":
                    raise NotEnoughNodes(f"the helper refuses round {current.number + 1}: {refusal}") from None
                self.say(f"round {current.number + 1} needs more reports: {refusal}")
                needed, batch_size = batch_size + 1, None
                current.closes_at = max(current.closes_at, needed)
                continue
            total, counted = unmask(self.api.plan, current.spool.reports(batch_size), answer, batch_size)
            return total, batch_size, counted

    def _await_reports(self, current: OpenRound, needed: int, end: float) -> None:
        """Take reports until there are as many as close a round, or enough for a sum at its deadline."""
        self.api.open_round(current)
        while not self.api.wait(current.closes_at, min(current.deadline, end) - time.monotonic()):
            if len(current.spool) >= needed:
                break
            if time.monotonic() >= end:
                raise NotEnoughNodes(
                    f"round {current.number + 1} has {len(current.spool)} reports and needs {needed}. "
                    f"{current.number} rounds are done and saved; continue with --resume"
                )
            current.deadline = time.monotonic() + self.pace.deadline
        self.api.close_round(current)

    def _ask_helper(self, helper: Connection, current: OpenRound, batch_size: int, end: float) -> bytes:
        """Return the helper's answer; ask again if it cannot be reached, or needs longer than a request may take."""
        path = f"/v1/rounds/{current.number}/batches/{current.batch.hex()}"
        path += f"?run={quote(self.api.run)}&broadcast={current.digest}"
        records, pauses, status = current.spool.records(batch_size), backoff(), ""
        while True:
            try:
                return helper.post(path, records, self.api.plan.report_bytes + batch_size)
            except httpx.TransportError as error:
                reason = helper.lasting(error)
                if reason is None and time.monotonic() > end:
                    reason = f"the helper at {helper.server} cannot be reached: {error}"
                if reason is not None:
                    raise NotEnoughNodes(reason) from None
                if status != type(error).__name__:
                    status, slow = type(error).__name__, isinstance(error, httpx.ReadTimeout)
                    what = "has not answered yet" if slow else f"cannot be reached ({status}: {error})"
                    self.say(f"the helper at {helper.server} {what}; trying again")
                time.sleep(next(pauses))

    def _add_open(self, spool: Spool, count: int) -> np.ndarray:
        """Add up reports that the coordinator can read."""
        dtype = np.dtype(self.api.plan.dtype).newbyteorder("<")
        total: Any = np.zeros(self.api.plan.length, np.float64 if self.api.plan.dtype == "float32" else np.uint32)
        for report in spool.reports(count):
            total += np.frombuffer(report, dtype)
        return total.astype(self.api.plan.dtype)
