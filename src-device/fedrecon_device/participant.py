"""Taking part in training: ask, download, compute, report, sleep. Only the vector leaves, at most once a round."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import re
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from fedrecon_device.bundle import Bundle
from fedrecon_device.errors import ParticipationError
from fedrecon_device.personal import Personal
from fedrecon_device.tensors import read_metadata, read_tensors
from fedrecon_device.training import Trainer

TIMEOUT = 60.0  # seconds
MOST_ANSWER, MOST_BROADCAST = 2**16, 2**30  # bytes
LONGEST_PAUSE = 86_400.0
LARGEST = np.finfo(np.float32).max  # graphs compute in float32, whatever type a broadcast has
DAY = 86_400
FIRST_PAUSE, LAST_PAUSE = 5.0, 3600.0  # seconds, between two tries to reach the server
SENDING, SENT, LATE = "sending", "sent", "too late"


class Step(NamedTuple):
    """What a device did when it asked.

    Attributes:
      report: the entry about the report that it sent, as `reports` lists it; None if it sent none.
      pause: seconds until it should ask again.
    """

    report: dict[str, Any] | None
    pause: float


class Participant:
    """A device that takes part in training. Everything about it is in one file of its owner."""

    def __init__(
        self,
        bundle: Bundle | str | Path,
        server: str,
        store: str | Path,
        *,
        token: str | Callable[[], str],
        authority: str | Path | None = None,
    ):
        """Agree to the plan in a bundle.

        Args:
          bundle: a bundle made for training, or its folder.
          server: the coordinator's URL. Without TLS (http) only on the same machine.
          store: the owner's file, the one of `Personal`, to which examples are added.
          token: what the operator's backend issued for this device, or a function that fetches it.
          authority: the certificate that vouches for the server; those of the system by default.

        Raises:
          BundleError: the bundle is not made for training.
        """
        self.personal = Personal(bundle, store)
        self.trainer = Trainer(self.personal.bundle)
        self._token, self._url = token, urlsplit(server)
        if self._url.scheme not in ("https", "http") or not self._url.hostname:
            raise ValueError(f"`server` must be a URL such as https://fed.example.org (got {server[:100]!r})")
        if self._url.scheme == "http" and not _is_loopback(self._url.hostname):
            raise ValueError(f"`server` must begin with https:// unless it is this machine (got {server[:100]!r})")
        self._tls = ssl.create_default_context(cafile=authority) if self._url.scheme == "https" else None

    # ---- for the owner ----

    def reports(self) -> list[dict[str, Any]]:
        """List every report: when, of which run and round, how many bytes, how protected, whether it arrived."""
        return self._entry()["reports"]

    def leave(self) -> None:
        """Forget everything about taking part; the owner's examples stay."""
        content = self.personal.stored()
        content.pop("participation", None)
        self.personal.store.write(content)

    def _entry(self) -> dict[str, Any]:
        entry = self.personal.stored().get("participation")
        return entry or {"name": secrets.token_hex(16), "reports": [], "plan": None, "state": {}}

    def _join(self) -> dict[str, Any]:
        """Return what is known about taking part; from now on it is in the owner's file."""
        entry, stored = self._entry(), self.personal.stored()
        if "participation" not in stored:
            self.personal.store.write({**stored, "participation": entry})
        return entry

    def _save(self, entry: Mapping[str, Any]) -> None:
        """Save what is known about taking part, unless the owner left or deleted the file since."""
        stored = self.personal.stored()
        if stored.get("participation", {}).get("name") != entry["name"]:
            raise ParticipationError("the owner no longer takes part")
        self.personal.store.write({**stored, "participation": dict(entry)})

    # ---- taking part ----

    def run(self, stop: Callable[[], bool] = lambda: False, sleep: Callable[[float], Any] = time.sleep) -> None:
        """Take part until `stop` says so: ask, and sleep as long as the server says.

        Raises:
          ParticipationError: the server asks for something that the owner did not agree to, or refuses the token.
          BundleError: what the server sent does not fit the plan.
        """
        pause = FIRST_PAUSE
        while not stop():
            try:
                sleep(self.step().pause)
                pause = FIRST_PAUSE
            except (OSError, http.client.HTTPException):
                sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)

    def step(self) -> Step:
        """Ask for a task and, if there is one, train and report.

        Raises:
          ParticipationError: the server asks for something that the owner did not agree to, or refuses the token; or
            the owner left meanwhile, or has sent as many reports as the plan's noise is for.
          BundleError: what the server sent does not fit the plan.
          OSError: the server cannot be reached.
        """
        columns, limits = self.personal.columns(), self.trainer.plan["limits"]
        if len(next(iter(columns.values()))) < limits["min_examples"]:
            return Step(None, DAY)
        entry = self._join()
        recent = [report for report in entry["reports"] if report["time"] > time.time() - DAY]
        if len(recent) >= limits["reports_per_day"]:
            return Step(None, max(recent[-limits["reports_per_day"]]["time"] + DAY - time.time(), 1.0))
        self._check_budget(entry)
        status, headers, body = self._request("GET", "/v1/check-in", MOST_ANSWER)
        if status == 204:
            return Step(None, _pause(headers, 1.0))
        task = self._read_task(body)
        if any((report["run"], report["round"]) == (task["run"], task["round"]) for report in entry["reports"]):
            # The server does not have it, as after a crash, and does not get another.
            return Step(None, _pause(headers, min(max(task["seconds"], 60.0), 3600.0)))
        arrays, about = self._fetch(task)
        update = self.trainer.update(arrays, tuple(about["key"]), entry["name"], columns, self._state(entry))
        data = self._protect(update.vector, about, task["broadcast"])
        report = {
            "time": int(time.time()),
            "plan": self.trainer.digest,
            "run": task["run"],
            "round": task["round"],
            "bytes": len(data),
            "protected": self.protection(),
            "status": SENDING,
        }
        # Written before it is sent: whatever happens, there is no second report of this round.
        state = {path: array.tolist() for path, array in update.state.items()}
        entry |= {"reports": [*entry["reports"], report], "plan": self.trainer.digest, "state": state}
        self._save(entry)
        path = f"/v1/rounds/{task['round']}/reports/{task['ticket']}"
        report["status"] = SENT if self._send(path, data, task["seconds"]) else LATE
        self._save(entry)
        return Step(report, _pause(headers, 1.0))

    def _check_budget(self, entry: Mapping[str, Any]) -> None:
        """Refuse to send more reports than the plan's noise is for: one in each of its rounds, whatever the runs."""
        plan = self.trainer.plan
        count = sum(report.get("plan") == self.trainer.digest for report in entry["reports"])
        if plan["noise"] is not None and count >= plan["rounds"]:
            raise ParticipationError(
                f"this device has sent the {plan['rounds']} reports that the plan's noise protects"
            )

    def protection(self) -> str:
        """Say how reports are protected."""
        about = self.trainer.plan["sum"]
        if about["protocol"] == "open":
            return "TLS only: the server sees each report"
        noise = "" if self.trainer.plan["noise"] is None else ", with noise from this device"
        return f"masked for two servers: they learn sums of {about['least']} or more{noise}"

    def _state(self, entry: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Return what this device kept from its last round of this plan; None before the first."""
        if entry["plan"] != self.trainer.digest:
            return None
        types = self.trainer.plan["state"]
        return {path: np.asarray(entry["state"][path], about["dtype"]) for path, about in types.items()}

    def _read_task(self, body: bytes) -> dict[str, Any]:
        task = _json(body)
        good = isinstance(task, dict) and isinstance(task.get("run"), str)
        good = good and all(type(task.get(name)) is int and 0 <= task[name] < 2**53 for name in ("round", "size"))
        good = good and isinstance(task.get("seconds"), int | float) and 0 < task["seconds"] < float("inf")
        patterns = {"plan": "[0-9a-f]{64}", "broadcast": "[0-9a-f]{64}", "ticket": "[0-9a-zA-Z_-]{1,200}"}
        if not good or not all(re.fullmatch(pattern, str(task.get(name))) for name, pattern in patterns.items()):
            raise ParticipationError("the server does not answer like a coordinator of this version")
        if task["plan"] != self.trainer.digest:
            raise ParticipationError(
                f"the server asks for the plan {task['plan'][:16]}; the owner agreed to {self.trainer.digest[:16]}"
            )
        if task["round"] >= (rounds := self.trainer.plan["rounds"]):
            raise ParticipationError(f"the server asks for round {task['round']}; the plan has {rounds}, from 0")
        return task

    def _fetch(self, task: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Download what the round begins with, and check that it is what the task names."""
        most = min(task["size"], MOST_BROADCAST)
        status, _, data = self._request("GET", f"/v1/broadcasts/{task['broadcast']}", most)
        if status != 200 or hashlib.sha256(data).hexdigest() != task["broadcast"]:
            raise ConnectionError(f"the broadcast could not be fetched (status {status})")
        about = _json(read_metadata(data, "broadcast").get("fedrecon", "").encode())
        key: Any = about.get("key") if isinstance(about, dict) else None
        good = isinstance(key, list) and len(key) == 2 and all(type(k) is int and 0 <= k < 2**32 for k in key)
        good = good and all(about.get(name) == task[name] for name in ("plan", "run", "round"))
        if not good or not re.fullmatch("[0-9a-f]{32}", str(about.get("batch"))):
            raise ParticipationError("the broadcast is for another plan, run or round than the task")
        arrays = read_tensors(data, "broadcast")
        if not all((np.abs(array) <= LARGEST).all() for array in arrays.values()):  # false of what is not a number, too
            raise ParticipationError("the broadcast has numbers that are not finite")
        return arrays, about

    def _protect(self, vector: np.ndarray, about: Mapping[str, Any], broadcast: str) -> bytes:
        """Return the bytes that are sent: with two servers, bound to the broadcast that they answer."""
        plan = self.trainer.plan
        noise, total, length = plan["noise"], plan["sum"], plan["vector"]["length"]
        if vector.shape != (length,):
            raise ParticipationError(f"the plan names {length} numbers, and the update has {vector.shape}")
        if noise is None and total["protocol"] == "open":
            return vector.astype(np.dtype(plan["vector"]["dtype"]).newbyteorder("<")).tobytes()
        from fedrecon_device.sealing import Purpose, add_noise, make_report  # needs `cryptography`

        vector = vector if noise is None else add_noise(vector, noise["variance"])
        if total["protocol"] == "open":
            return vector.astype("<u4").tobytes()
        batch, digest = bytes.fromhex(about["batch"]), bytes.fromhex(self.trainer.digest)
        purpose = Purpose(digest, f"{about['run']} {broadcast}", batch, about["round"], length)
        return make_report(vector, bytes.fromhex(total["helper"]), purpose, total["bits"])

    def _send(self, path: str, data: bytes, seconds: float) -> bool:
        """Send the report, again if the connection fails; return whether it arrived before its round was over."""
        end, pause = time.monotonic() + min(seconds, DAY), 1.0
        while True:
            try:
                status, _, _ = self._request("PUT", path, MOST_ANSWER, data)
                return status in (200, 201)
            except (OSError, http.client.HTTPException):
                if time.monotonic() + pause > end:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 60.0)

    def _request(
        self, method: str, path: str, most: int, data: bytes | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request on a connection of its own; redirections are not followed."""
        host, port = self._url.hostname or "", self._url.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=TIMEOUT)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._tls)
        )
        token = self._token if isinstance(self._token, str) else self._token()
        try:
            headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
            connection.request(method, self._url.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            body = response.read(most + 1)
        finally:
            connection.close()
        if response.status == 401:
            raise ParticipationError(f"the server refuses the token: {_detail(body)}")
        if len(body) > most or not (response.status < 300 or response.status in (404, 410)):
            raise ConnectionError(f"the server answers with status {response.status}: {_detail(body)}")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def _pause(headers: Mapping[str, str], otherwise: float) -> float:
    """Return how many seconds the server wants to be left alone."""
    text = headers.get("retry-after", "")
    return min(max(float(text), 1.0), LONGEST_PAUSE) if text.isdecimal() else otherwise


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _detail(body: bytes) -> str:
    problem = _json(body)
    return str(problem.get("detail"))[:300] if isinstance(problem, dict) else ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
