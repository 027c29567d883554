"""How processes meet: the first waits at an address, and the others call."""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from fedrecon._src.simulation.multihost import channel as wires
from fedrecon._src.simulation.multihost.channel import LONGEST_HELLO, HostError, Peer, Wire
from fedrecon._version import __version__

WAIT = 50.0  # seconds for all processes to arrive: with what follows, less than a minute
BETWEEN_CALLS = 0.2  # seconds between a caller's tries
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Place(NamedTuple):
    """A process among others.

    Attributes:
      host: where the first process is.
      port: on which it waits for the others.
      processes: how many there are.
      process: which this is, from 0.
      local_devices: the accelerators of this machine that are this process's; None for all.
    """

    host: str
    port: int
    processes: int
    process: int
    local_devices: Sequence[int] | None = None


class Met(NamedTuple):
    """What joining the devices needs to know.

    Attributes:
      place: this process's.
      jax_port: the port that the first process has found for JAX.
      address: of this process, where the others reach it.
      wait: how many seconds to wait for the others.
    """

    place: Place
    jax_port: int
    address: str
    wait: float = WAIT


_met: Met | None = None


def meet(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, wait: float = WAIT
) -> None:
    """Meet the other processes of a simulation; devices are joined when they are started.

    Args:
      coordinator: `host:port` of the first process; None to ask SLURM, Kubernetes or Open MPI for all three.
      processes: how many there are.
      process: which this is, from 0.
      wait: how many seconds to wait for the others.

    Raises:
      HostError: a process did not arrive, or was started differently.
    """
    global _met
    if wires.wire() is not None:
        raise HostError("this process has met the others already")
    place = find_place(coordinator, processes, process)
    if place.process == 0:
        port, peers = _free_port(), _receive(place, wait)
        seen = [peers[number].seen_from for number in sorted(peers)]
        address = next((one for one in seen if not is_loopback(one)), LOOPBACK[1])
        for peer in peers.values():
            peer.send(welcome=port, address=address)
    else:
        peer, port, address = _call(place, wait)
        peers = {0: peer}
        if not is_loopback(peer.seen_from):
            address = peer.seen_from  # else the first process is on this host, and has been seen by others
    _met = Met(place, port, address, wait)
    wire = Wire(place.process, place.processes, peers)
    wires.use(wire)
    wire.handle_interrupts()
    _end_together(wire)


def find_place(coordinator: str | None, processes: int | None, process: int | None) -> Place:
    """Check which process this is and where the first one is, or ask the environment."""
    given = (coordinator, processes, process)
    if all(value is None for value in given):
        return _detect()
    if coordinator is None or processes is None or process is None:
        raise HostError(
            f"coordinator is {coordinator}, processes {processes} and process {process}: give all three, or none where "
            "SLURM, Kubernetes or Open MPI starts the processes"
        )
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise HostError(f"coordinator is {coordinator!r}; expected HOST:PORT, such as node1:8476")
    if not 0 <= process < processes:
        raise HostError(f"process is {process} of {processes}; processes are numbered from 0")
    return Place(host.strip("[]"), int(port), processes, process)


def _detect() -> Place:
    """Ask JAX, which knows how SLURM, Kubernetes and Open MPI tell processes who they are."""
    from jax._src.clusters import ClusterEnv  # jax.distributed asks here too, but does not pass on the answer

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(WAIT))
    except (RuntimeError, KeyError, OSError) as problem:
        raise HostError(f"the environment does not say which process this is: {problem}") from None
    if any(value is None for value in found[:3]):
        raise HostError(
            "nothing in the environment says which process this is: SLURM, Kubernetes or Open MPI would. Give the "
            "coordinator, the number of processes and the number of this one"
        )
    return find_place(*found[:3])._replace(local_devices=found[3])


# ---- who is there ----


def _receive(place: Place, wait: float) -> dict[int, Peer]:
    """Wait for all other processes."""
    until, peers = time.monotonic() + wait, dict[int, Peer]()
    try:
        with _listening(place) as server:
            while len(peers) < place.processes - 1:
                server.settimeout(max(until - time.monotonic(), 0.01))
                connection = server.accept()[0]
                peer = _greeted(connection, place, peers)
                if peer is not None:
                    peers[peer.process] = peer
    except TimeoutError:
        missing = [str(k) for k in range(1, place.processes) if k not in peers]
        sentence = (
            f"of {place.processes} processes, {', '.join(missing)} did not arrive at {place.host}:{place.port} within "
            f"{wait:.0f} seconds"
        )
        raise _refuse(peers, sentence) from None
    except HostError as problem:
        raise _refuse(peers, str(problem)) from None
    return peers


def _refuse(peers: dict[int, Peer], sentence: str) -> HostError:
    for peer in peers.values():
        peer.send(refused=sentence)
        peer.close()
    return HostError(sentence)


def _listening(place: Place) -> socket.socket:
    # A name such as this machine's own often stands for its loopback on it, where others would not find us.
    try:
        if place.host in LOOPBACK:
            return socket.create_server((place.host, place.port), family=_family(place.host))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", place.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as problem:
        raise HostError(f"cannot wait for others at {place.host}:{place.port}: {problem.strerror}") from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _greeted(connection: socket.socket, place: Place, peers: dict[int, Peer]) -> Peer | None:
    """Return who calls; None if it is not one of our processes."""
    try:
        connection.settimeout(5)
        with connection.makefile("rb") as lines:
            hello = json.loads(lines.readline(LONGEST_HELLO))
        peer = Peer(connection, int(hello["process"]), str(hello["host"])[:100])
        version, number = str(hello["fedrecon"])[:40], int(hello["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return None
    problem = None
    if version != __version__:
        problem = f"{peer} runs fedrecon {version}, the first process {__version__}"
    elif number != place.processes:
        problem = f"{peer} was started as one of {number} processes, the first as one of {place.processes}"
    elif not 0 < peer.process < place.processes or peer.process in peers:
        problem = f"{peer} has called, but there is already a process with this number"
    if problem:
        raise _refuse({peer.process: peer}, problem)
    return peer


def _call(place: Place, wait: float) -> tuple[Peer, int, str]:
    """Call the first process until it answers; return it, the port that it has found for JAX, and its address."""
    where = f"{place.host}:{place.port}"
    try:
        connection = connect(place.host, place.port, wait)
    except OSError as problem:
        raise HostError(
            f"the first process did not answer at {where} within {wait:.0f} seconds "
            f"({problem.strerror or problem}){_proxies()}"
        ) from None
    hello = {"fedrecon": __version__, "processes": place.processes, "process": place.process}
    peer = Peer(connection, 0, place.host)
    peer.send(**hello, host=socket.gethostname())
    connection.settimeout(wait + 10)  # as long as the first waits for the others
    try:
        answer = json.loads(peer.lines.readline())
    except (OSError, ValueError) as problem:
        peer.close()
        raise HostError(f"the first process at {where} did not answer ({problem}): it has ended") from None
    connection.settimeout(wires.SILENCE)
    if "refused" in answer:
        peer.close()
        raise HostError(str(answer["refused"]))
    return peer, int(answer["welcome"]), str(answer["address"])


def connect(host: str, port: int, wait: float) -> socket.socket:
    """Connect to an address, again and again until somebody answers; after so many seconds raise the last error."""
    until = time.monotonic() + wait
    while True:
        try:
            return socket.create_connection((host, port), max(until - time.monotonic(), 0.01))
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(BETWEEN_CALLS)


def _proxies() -> str:
    found = sorted(name for name in os.environ if name.lower().endswith("_proxy"))
    return f"; {', '.join(found)} may be why: unset it if hosts reach each other directly" if found else ""


def is_loopback(address: str) -> bool:
    """Say whether only processes of the same host reach an address."""
    return ipaddress.ip_address(address).is_loopback


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def met() -> Met | None:
    """Return how this process met the others; None where it is alone."""
    return _met


def processes() -> int:
    """Return how many processes run the simulation."""
    return 1 if _met is None else _met.place.processes


# ---- how it ends ----


def _end_together(wire: Wire) -> None:
    """Let an error in one process end all, and let each wait at its end for the others."""
    before = sys.excepthook

    def hook(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        wire.wait_for_verdict(problem)
        before(kind, problem, trace)
        wire.fail(f"{kind.__name__}: {problem}", 130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
    atexit.register(wire.finish)
