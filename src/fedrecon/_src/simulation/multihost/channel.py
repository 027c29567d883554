"""What processes say to each other beside their sums: that they are alive, small values, and how they ended."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from fedrecon._src.core.formatting import plain

BEAT = 2.0  # seconds between signs of life
SILENCE = 40.0  # seconds without one after which a process counts as dead
LATE = 600.0  # seconds that the first process, when it has finished, waits for the others
VERDICT = 5.0  # seconds in which a process that died is noticed, where a sum has failed
LONGEST_HELLO = 1000  # bytes


class HostError(ValueError):
    """Several processes cannot run one simulation together."""


class Peer:
    """Another process, and the connection to it."""

    def __init__(self, connection: socket.socket, process: int, host: str):
        """Take over an open connection to process number `process`, on `host`."""
        connection.settimeout(SILENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.process, self.host = process, host
        self.lines = connection.makefile("rb")
        self._connection, self._sending = connection, threading.Lock()

    def __str__(self) -> str:
        """Name the process in words."""
        return f"process {self.process} on {self.host}"

    @property
    def seen_from(self) -> str:
        """The address at which that process sees this one."""
        numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        own = ipaddress.ip_address(socket.getnameinfo(self._connection.getsockname(), numeric)[0])
        return str(getattr(own, "ipv4_mapped", None) or own)

    def send(self, **message: Any) -> None:
        """Send a message; if nobody takes it, that is noticed where the answer is awaited."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the connection."""
        self.lines.close()
        self._connection.close()

    def hang_up(self) -> None:
        """Say that there are no more messages."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class Wire:
    """Connections of the first process to all others, over which each learns at once what happens to the others."""

    def __init__(self, process: int, processes: int, peers: Mapping[int, Peer]):
        """Listen to the `peers` of a process: all others for the first, the first for all others."""
        self.process, self.processes, self._peers = process, processes, peers
        self.name = f"process {process} on {socket.gethostname()}"
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._same: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: set[int] = set()
        self._ended, self._over = threading.Event(), False
        self._quitting = threading.Lock()
        if not peers:
            self._ended.set()
        self._asked = self._pressed = False
        self._last_pressed = -BEAT
        for peer in peers.values():
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.process == 0

    # ---- values ----

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return in every process what `make` returns in the first, as JSON holds it.

        Raises:
          HostError: `make` failed in the first process, where its own error is raised.
        """
        if self.first:
            try:
                value = make()
            except Exception as problem:
                self._tell(value=None, error=str(problem) or type(problem).__name__)
                raise
            self._tell(value=value)
            return value
        message = self._values.get()
        if "error" in message:
            time.sleep(VERDICT)  # in which the first ends all processes, unless somebody caught its error
            raise HostError(f"{self._peers[0]}: {message['error']}")
        return message["value"]

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse facts, such as a fingerprint of the data, that differ from those of the first process.

        The first process returns once all others have found the same facts.
        """
        facts = json.loads(json.dumps(facts))
        there = self.agree(lambda: facts)
        names = sorted(name for name in {**facts, **there} if facts.get(name) != there.get(name))
        if names:
            other = "; ".join(f"{name} is {facts.get(name)} here and {there.get(name)} there" for name in names)
            raise HostError(f"{self.name} was not started like {self._peers[0]}: {other}")
        if not self.first:
            self._tell(same=True)
            return
        for _ in self._peers:
            self._same.get()

    # ---- the end ----

    def finish(self) -> None:
        """Wait until all processes have finished, so that none takes another's end for its death."""
        if self._over:
            return
        if not self.first:
            self._tell(done=True)
            self._ended.wait()
            return
        if not self._ended.wait(LATE):
            late = ", ".join(str(peer) for k, peer in self._peers.items() if k not in self._done)
            self.quit(
                f"{self.name} finished {LATE:.0f} seconds ago, but {late} did not: they do not run the same program"
            )
        self._over = True
        self._tell(end=True)

    def fail(self, sentence: str, code: int) -> NoReturn:
        """End this process for a reason of its own, and thereby all others."""
        self.quit(sentence, code, told=f"{self.name} has ended: {sentence}")

    def quit(self, sentence: str, code: int = 1, told: str | None = None) -> NoReturn:
        """End this process and all others with a sentence; of several reasons the first is printed."""
        self._quitting.acquire()  # for good
        self._over = True
        self._tell(failed=told or sentence, code=code)
        print(f"fedrecon: {plain(' '.join(sentence.split()))}", file=sys.stderr, flush=True)
        for peer in self._peers.values():
            peer.hang_up()
        time.sleep(BEAT / 4)  # a connection that is closed with something unread loses what was sent last
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)

    def wait_for_verdict(self, problem: BaseException | None) -> None:
        """Give the wire time to say which process died, if an error is of the kind that a death causes."""
        if "gloo" in str(problem).lower() or "NCCL" in str(problem):
            time.sleep(VERDICT)

    # ---- Ctrl-C ----

    def handle_interrupts(self) -> None:
        """Forward Ctrl-C to the first process; pressed again, it ends all."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """Give a block a function that all processes call together: whether Ctrl-C was pressed in one of them."""
        self._pressed, self._asked = False, True
        try:
            yield lambda: self.agree(lambda: self._pressed)
        finally:
            self._asked = False

    def _interrupt(self, number: int, frame: Any) -> None:
        del number, frame
        before, self._last_pressed = self._last_pressed, time.monotonic()
        if self._last_pressed - before < BEAT:
            return  # launchers send it to every process, and all tell the first
        if not self._asked:
            raise KeyboardInterrupt
        # In threads: what this signal interrupts may be sending something.
        if self._pressed:
            threading.Thread(target=self.fail, args=("interrupted", 130)).start()
        elif not self.first:
            threading.Thread(target=self._tell, kwargs={"interrupt": True}).start()
        self._pressed = True

    # ---- threads ----

    def _tell(self, **message: Any) -> None:
        for peer in self._peers.values():
            peer.send(**message)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT)
            self._tell(beat=True)

    def _listen(self, peer: Peer) -> None:
        try:
            for line in peer.lines:
                self._take(peer, json.loads(line))
            how = "has died"
        except ConnectionError:
            how = "has died"
        except TimeoutError:
            how = f"has not been heard from for {SILENCE:.0f} seconds"
        except (OSError, ValueError) as problem:
            how = f"cannot be reached any more ({problem})"
        if not self._over:
            self.quit(
                f"{peer} {how}, and the others cannot continue without it. Start all processes again; with --resume "
                "they continue from the newest checkpoint."
            )

    def _take(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if "value" in message:
            self._values.put(message)
        elif "same" in message:
            self._same.put(peer.process)
        elif "failed" in message and not self._over:
            self.quit(message["failed"], int(message["code"]))
        elif "done" in message:
            self._done.add(peer.process)
            if len(self._done) == len(self._peers):
                self._ended.set()
        elif "end" in message:
            self._over = True
            self._ended.set()
        elif "interrupt" in message:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# ---- the wire of this process ----

_wire: Wire | None = None


def wire() -> Wire | None:
    """Return the wire to the other processes; None where this process is alone."""
    return _wire


def use(new: Wire) -> None:
    """Make a wire this process's own."""
    global _wire
    _wire = new


def is_first() -> bool:
    """Say whether this process writes and shows: the only one, or the first of several."""
    return _wire is None or _wire.first


def agree(make: Callable[[], Any]) -> Any:
    """Return in every process what `make` returns in the first (see `Wire.agree`)."""
    return make() if _wire is None else _wire.agree(make)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Give a block a function that several processes call together: whether Ctrl-C was pressed in one of them.

    Where a process is alone, Ctrl-C raises `KeyboardInterrupt` as usual, and the function returns False.
    """
    with contextlib.nullcontext(lambda: False) if _wire is None else _wire.interruptible() as pressed:
        yield pressed


def check_same(facts: Mapping[str, Any]) -> None:
    """Refuse facts that differ from those of the first process."""
    if _wire is not None:
        _wire.check_same(facts)
