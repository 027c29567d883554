"""Flower's SuperLink as a process beside the server: started, watched, started again, ended."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from fedrecon._src.deploy.superlink_process import MOST
from fedrecon._src.storage.parts import check_names

OFFLINE = {  # Flower contacts nobody, and installs nothing
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
PATIENCE = 120.0  # seconds that a SuperLink may take to start, and to know a node
IN_MEMORY = ":flwr-in-memory:"  # where a SuperLink keeps its state
_FILES = re.compile(r"home|secret|superlink\.log")  # what a SuperLink leaves in its folder
PROCESS = Path(__file__).with_name("superlink_process.py")


class FlowerError(ValueError):
    """Flower cannot do what it should; the message says what to do."""


class Tls(NamedTuple):
    """Files of a server: its certificate, its key, and the certificate of the authority behind it."""

    certificate: Path
    key: Path
    authority: Path


def address_of(option: str, text: str) -> tuple[str, int]:
    """Return host and port of an address such as `fed.example.org:8000`.

    Raises:
      FlowerError: it is not an address.
    """
    host, _, port = text.rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    if not re.fullmatch(r"[^\s/@]+", host) or not 0 < number < 2**16:
        raise FlowerError(
            f"{option} is {text[:100]!r}; give host:port, such as 127.0.0.1:8000, with a port from 1 to 65535"
        )
    return host, number


class SuperLink:
    """Flower's SuperLink as a process of our own, started again if it dies; it dies with us."""

    def __init__(self, listen: str, folder: Path, tls: Tls | None, most: int = 2**31, database: Path | None = None):
        """Prepare.

        Args:
          listen: `host:port`.
          folder: for its files.
          tls: certificates; None for no encryption.
          most: bytes of the largest request that it accepts.
          database: where it keeps its state. By default in memory: a request then costs half as much, and we can
            tell a new one everything again.
        """
        self.host, self.port = address_of("--listen", listen)
        check_names(folder, _FILES)
        self.folder, self.tls, self.most = folder, tls, most
        self.database = IN_MEMORY if database is None else str(database)
        self.address = f"127.0.0.1:{self.port}" if self.host in ("0.0.0.0", "127.0.0.1", "localhost") else listen
        self.secret = secrets.token_bytes(32)
        self.process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self.restarts = 0

    @property
    def certificates(self) -> bytes | None:
        """What to trust when we talk to it ourselves."""
        return None if self.tls is None else self.tls.authority.read_bytes()

    def start(self) -> None:
        """Start it, wait until it answers, and start it again whenever it dies."""
        self._launch()
        self.wait()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # Calls of Flower's grid wait for a dead SuperLink without end, so nothing else would notice.
        while not self._stopping.wait(0.5):
            if not self.alive():
                self.restarts += 1
                self._launch()
                self._stopping.wait(5)

    def _launch(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(self.secret)
        safety = ["--insecure"]
        if self.tls is not None:
            safety = ["--ssl-certfile", str(self.tls.certificate), "--ssl-keyfile", str(self.tls.key)]
            safety += ["--ssl-ca-certfile", str(self.tls.authority), "--enable-supernode-auth"]
        command = [sys.executable, "-P", str(PROCESS)]  # files beside it must not be imported
        command += ["--host", self.host, "--port", str(self.port), "--isolation", "process", *safety]
        command += ["--database", self.database, "--superexec-auth-secret-file", str(secret)]
        environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(self.folder / "home"), MOST: str(self.most)}
        with (self.folder / "superlink.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
          FlowerError: it ended, or takes too long.
        """
        end = time.monotonic() + PATIENCE
        host, _, port = self.address.rpartition(":")
        while time.monotonic() < end:
            if not self.alive():
                raise FlowerError(f"Flower's SuperLink has ended: see {self.folder / 'superlink.log'}")
            try:
                with socket.create_connection((host, int(port)), 1):
                    return
            except OSError:
                time.sleep(0.2)
        raise FlowerError(f"Flower's SuperLink does not answer at {self.address}: see {self.folder / 'superlink.log'}")

    def alive(self) -> bool:
        """Say whether it runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End it, and whatever it started."""
        self._stopping.set()
        if self.process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            try:
                self.process.wait(5)
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
