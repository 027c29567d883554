"""A sum in one message per device, with two servers that do not work together.

A device adds a mask to its vector and sends it to the coordinator, with the mask's seed sealed to the helper
(`fedrecon_device.sealing`). When a batch is complete, the coordinator gives the helper all sealed seeds of it. The
helper answers with the sum of the masks and says which seeds it could open. The difference of the two sums is the sum
of the vectors of just those reports, exactly, however many devices dropped out.

    device                        coordinator                     helper
    make_report(vector, …)   →    Spool.add
                                  Spool.records              →    Helper.answer
                                  unmask(plan, reports, …)   ←

**What the helper promises.** A seed opens only for the plan, run, round, batch, broadcast and report id it was sealed
for. So all reports of a sum answer the same broadcast: a coordinator cannot send the model to one device and a model
whose updates are known to all others. A round of a run is answered once; the very same request gets the very same
answer. So no report is in two sums, also after a restart, and no two sums of one round differ in one report. A report
or a seed that is there twice counts once. A sum of fewer than `least` is refused. What it must remember for this is
one line per run, written before it answers.

**What breaks it.** Both servers together can open every report. A coordinator that invents all other devices of a batch
knows their vectors and so the one of the real device: admission (tokens of somebody else's backend) and noise of the
devices help, this protocol does not. Nor does it help against a coordinator that repeats a round's model and key in
another round or run, where one device is missing: the difference of the two sums is that device's vector. A device may
send any vector; only its range is bounded, by the ring.

References: Corrigan-Gibbs and Boneh, Prio, NSDI 2017 (sums of shares at two servers).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, Len
from pydantic import AliasPath, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from fedrecon._src.core.checks import check_rules, explain_validation
from fedrecon._src.privacy.secure_sum.terms import MessageError, Refusal, SecureSumError
from fedrecon._src.storage.atomic import StorageError, read_bytes, sync
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon_device import sealing
from fedrecon_device.sealing import ID, RECORD, Purpose

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

MEMORY, MEMORY_FORMAT = "helper.json", Format("fedrecon-helper", 1)
MOST_RUNS = 1000  # that a helper remembers
MOST_PLAN = 2**24  # bytes of a device plan
OWNER = 16  # bytes that name a device in a spool


class TooFewReports(SecureSumError):
    """Too few reports of a batch can be opened. Nothing is known of them: more of the same batch may follow."""


def _at(*path: Any) -> Any:
    """Say where in a plan a field is."""
    return Field(validation_alias=AliasPath(*path))


Count = Annotated[int, Gt(0)]


@dataclass(frozen=True)
class PromisedNoise:
    """The noise of each device: its variance, and the delta of what it promises."""

    variance: float
    delta: float


@dataclass(frozen=True)
class RingSettings:
    """Settings of an aggregator: the most reports that its ring has room for, and the fields of `ClientNoise`."""

    clients: int | None = None
    noise: tuple[float, float, int, Any, bool] | None = None


@dataclass(frozen=True)
class AggregatorRecipe:
    """How an aggregator is made, as far as the servers need to know."""

    settings: RingSettings


@with_config(ConfigDict(strict=True, val_json_bytes="hex"))
@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """What the two servers, or the coordinator alone, need to know of a device plan.

    Attributes:
      format: of the plan.
      protocol: how sums are made.
      algorithm: the digest of the algorithm.
      rounds: how many a run has at most.
      length: of a vector.
      dtype: of its entries.
      least: the fewest reports of a sum.
      reports_per_day: the most that one device may send.
      bits: of the ring.
      helper: the helper's public key, 32 bytes; None if sums are open.
      aggregator: what makes sums; None if that is not known.
      noise: what a device adds; None without.
      left_out: where the whole vector has numbers that devices do not send, since the server leaves what they are
        about as it is: the first place, and how many.
      content: the plan, as devices have it.
    """

    format: Literal["fedrecon-device-plan"]
    protocol: Annotated[Literal["open", "two-servers"], _at("sum", "protocol")]
    algorithm: str
    rounds: Count
    length: Annotated[Count, _at("vector", "length")]
    dtype: Annotated[Literal["uint32", "float32"], _at("vector", "dtype")]
    least: Annotated[Count, _at("sum", "least")]
    reports_per_day: Annotated[Count, _at("limits", "reports_per_day")]
    bits: Annotated[Literal[20, 24, 32], _at("sum", "bits")]
    helper: Annotated[Annotated[bytes, Len(32, 32)] | None, _at("sum", "helper")] = None
    aggregator: AggregatorRecipe | None = None
    noise: PromisedNoise | None = None
    left_out: Annotated[tuple[tuple[int, int], ...], _at("vector", "left_out")] = ()
    content: bytes = b""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the plan."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def ring(self) -> RingSettings:
        """How sums are made, as far as that is known."""
        return RingSettings() if self.aggregator is None else self.aggregator.settings

    @property
    def per_round(self) -> int | None:
        """With noise: how many reports close a round (`ClientNoise.per_round`); None without."""
        return None if self.ring.noise is None else max(round(self.ring.noise[1]), self.least)

    @property
    def report_bytes(self) -> int:
        """The size of every report."""
        return 4 * self.length if self.protocol == "open" else RECORD + sealing.packed_size(self.length, self.bits)

    def purpose(self, run: str, number: int, batch: bytes, broadcast: str) -> Purpose:
        """Return what the reports of a batch are for: answers to one broadcast, of which this is the SHA-256."""
        return Purpose(bytes.fromhex(self.digest), f"{run} {broadcast}", batch, number, self.length)

    def complete(self, total: np.ndarray) -> np.ndarray:
        """Return a sum of vectors with zeros where devices send nothing."""
        for begin, length in self.left_out:
            total = np.concatenate([total[:begin], np.zeros(length, total.dtype), total[begin:]])
        return total


_PLAN = TypeAdapter(ServedPlan)


def read_served_plan(path: Path) -> ServedPlan:
    """Read a device plan.

    Args:
      path: `plan.json`, or a bundle that has one.

    Raises:
      StorageError: there is none, it makes no sense, or a single report would be a sum.
    """
    file = path / "plan.json" if path.is_dir() else path
    content, is_no_plan = read_bytes(file, MOST_PLAN), f"{file} is not a device plan"
    try:
        plan = replace(_PLAN.validate_json(content), content=content)
    except ValidationError as error:
        advice = f"make one with fedrecon bundle RUN --train ({explain_validation(error)})"
        raise StorageError(f"{is_no_plan}; {advice}") from None
    is_open, reason = plan.protocol == "open", "the sum of one report is the report"
    rules = {
        f"{is_no_plan}: sums that are made by two servers, and no others, need a helper": is_open != bool(plan.helper),
        f"`least` in {file} must be at least 2 (got {plan.least}): {reason}": is_open or plan.least > 1,
    }
    check_rules(rules, StorageError)
    return plan


# ---- the helper ----


class Helper:
    """The second server: it opens seeds, adds up their masks, and never sees a vector."""

    def __init__(self, plan: ServedPlan, private: X25519PrivateKey, folder: Path):
        """Continue from the memory in a folder; one process at a time may use it.

        Raises:
          StorageError: the memory is damaged, or of another plan. Nothing is answered then.
        """
        self.plan, self._private, self._file = plan, private, folder / MEMORY
        self.public = private.public_key().public_bytes_raw()
        if plan.helper is None:
            raise StorageError("the sums of the plan are open: they need no helper")
        if self.public != plan.helper:
            raise StorageError(f"the plan names the helper {plan.helper.hex()}, and this one is {self.public.hex()}")
        self._runs: dict[str, dict[str, Any]] = {}  # by run: the newest round that was answered, and the request
        self._latest: tuple[tuple[str, int, str], bytes] | None = None  # an answer that may be asked for again
        if self._file.exists():
            memory = read_manifest(self._file, MEMORY_FORMAT)
            if memory["plan"] != plan.digest:
                raise StorageError(f"{self._file} is of the plan {memory['plan'][:16]}, not {plan.digest[:16]}")
            self._runs = memory["runs"]

    def answer(self, run: str, number: int, batch: bytes, records: bytes, broadcast: str) -> bytes:
        """Return which records are in the sum, as bits, and the sum of their masks, packed.

        Args:
          run: the name of the training.
          number: the round.
          batch: the name of the sum, 16 bytes.
          records: ids and sealed seeds, one after the other.
          broadcast: the SHA-256 of what all devices of the batch were sent, as hexadecimal digits.

        Raises:
          MessageError: the request is malformed.
          TooFewReports: too few seeds can be opened. Nothing was answered.
          Refusal: an answer would give too much away.
        """
        if len(records) % RECORD or len(batch) != ID:
            raise MessageError(f"records have {RECORD} bytes each, and a batch {ID} (got {len(records)}, {len(batch)})")
        request = hashlib.sha256(batch + broadcast.encode() + records).hexdigest()
        last = self._runs.get(run, {"round": -1, "request": ""})
        again, newer = (number, request) == (last["round"], last["request"]), number > last["round"]
        many = f"this helper has answered {MOST_RUNS} runs; use another memory, with another key and plan"
        rules = {
            f"the plan has {self.plan.rounds} rounds, from 0 (got {number})": number < self.plan.rounds,
            f"round {last['round']} was answered; so is every round before, each once": again or newer,
            many: run in self._runs or len(self._runs) < MOST_RUNS,
        }
        check_rules(rules, Refusal)
        if self._latest is not None and self._latest[0] == (run, number, request):
            return self._latest[1]  # it took longer than the coordinator waited
        parts = [records[k : k + RECORD] for k in range(0, len(records), RECORD)]
        seeds = self._open_once(parts, self.plan.purpose(run, number, batch, broadcast))
        readable = [seed for seed in seeds if seed is not None]
        if len(readable) < self.plan.least:
            counts = f"{len(readable)} of {len(seeds)} reports can be opened"
            raise TooFewReports(f"{counts}, and {self.plan.least} are needed")
        self._runs[run] = {"round": number, "request": request}
        write_manifest(self._file, MEMORY_FORMAT, {"plan": self.plan.digest, "runs": self._runs}, mode=0o600)
        sync(self._file.parent)
        total = np.zeros(self.plan.length, np.uint32)
        for seed in readable:
            total += sealing.expand(seed, self.plan.length)
        included = np.array([seed is not None for seed in seeds])
        answer = np.packbits(included, bitorder="little").tobytes() + sealing.pack(total, self.plan.bits)
        self._latest = (run, number, request), answer
        return answer

    def _open_once(self, parts: Iterable[bytes], purpose: Purpose) -> list[bytes | None]:
        """Open seeds; None for those that cannot be opened, and for ids and seeds that are there already.

        A batch with repeats is not refused: two devices that agree on an id or a seed could otherwise stop any round.
        """
        seeds, opened = list[bytes | None](), set[bytes]()
        for part in parts:
            seed = sealing.open_seed(self._private, self.public, part, purpose)
            seeds.append(None if seed in opened or part[:ID] in opened else seed)
            if seed is not None:
                opened |= {part[:ID], seed}
        return seeds


# ---- the coordinator ----


class Spool:
    """A file with the reports of one batch, in the order in which they came, so that memory does not grow with them."""

    def __init__(self, path: Path, size: int):
        """Open or make the file; a last report that was cut off is dropped.

        Args:
          path: the file.
          size: of a report, in bytes.
        """
        self.path, self._size = path, size
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        whole = os.fstat(self._file.fileno()).st_size // (OWNER + size)
        self._file.truncate(whole * (OWNER + size))
        self._file.seek(0, os.SEEK_END)
        self.owners = [entry[:OWNER] for entry in self._entries(whole)]  # of the reports, in their order

    def __len__(self) -> int:
        """Return how many reports there are."""
        return len(self.owners)

    def add(self, owner: bytes, report: bytes) -> None:
        """Append a report.

        Args:
          owner: 16 bytes that name its device.
          report: all of it.

        Raises:
          OSError: it cannot be written, and leaves no trace.
        """
        if len(report) != self._size or len(owner) != OWNER:
            raise MessageError(f"a report has {self._size} bytes (got {len(report)})")
        rest = memoryview(owner + report)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]  # which may write less than it was given
        except OSError:
            self._file.truncate(len(self.owners) * (OWNER + self._size))
            self._file.seek(0, os.SEEK_END)
            raise
        self.owners.append(owner)

    def _entries(self, count: int) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            for _ in range(count):
                yield file.read(OWNER + self._size)

    def reports(self, count: int) -> Iterator[bytes]:
        """Yield the first reports."""
        return (entry[OWNER:] for entry in self._entries(count))

    def records(self, count: int) -> bytes:
        """Return the ids and sealed seeds of the first reports, once these are on disk."""
        os.fsync(self._file.fileno())
        return b"".join(report[:RECORD] for report in self.reports(count))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def unmask(plan: ServedPlan, reports: Iterable[bytes], answer: bytes, count: int) -> tuple[np.ndarray, int]:
    """Return the sum of the reports that the helper included, modulo 2**bits, and how many these are.

    Args:
      plan: what both servers know.
      reports: all that the helper was asked about, in the same order.
      answer: the helper's.
      count: how many reports.

    Raises:
      MessageError: the answer is not one to this request.
    """
    cut = (count + 7) // 8
    included = np.unpackbits(np.frombuffer(answer[:cut], np.uint8), bitorder="little").astype(bool)
    if len(included) < count or included[count:].any() or included.sum() < plan.least:
        raise MessageError(f"the helper's answer must include {plan.least} or more of the {count} reports")
    try:
        total = -sealing.unpack(answer[cut:], plan.length, plan.bits)
        for report, is_in in zip(reports, included[:count], strict=True):
            if is_in:
                total += sealing.unpack(report[RECORD:], plan.length, plan.bits)
    except ValueError as error:
        raise MessageError(f"the sum cannot be unmasked: {error}") from None
    return total & np.uint32(2**plan.bits - 1), int(included.sum())
