"""Several processes that run one simulation, on `jax.distributed`: starting, agreeing on values, and global arrays.

Every process runs the same program. JAX connects them, notices when one stops answering, and then ends the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.pytrees import first_difference
from fedrecon._src.storage.run_folder import RunFolder

AXIS = "clients"
TIMEOUT = 100  # seconds that processes wait for each other
MAX_CPU_DEVICES = 64  # unless the machine has more cores
SMALL_LOOP = 2**20  # bytes that a step may read and write for its loop to be compiled as one function
REPEATED_SIGNAL = 2.0  # seconds: launchers and terminals may both forward one Ctrl-C


class HostError(ValueError):
    """Several processes cannot run one simulation together."""


# ---- starting ----


def start_jax_devices(jax_devices: int | None = None, *, small_loops: bool = True) -> None:
    """Start JAX with several devices on a CPU.

    The number is fixed at the first use of JAX in a process, so call this before anything else. If JAX has already
    started, nothing changes, and `layout` refuses more devices than there are.

    Args:
      jax_devices: how many; None for one per core.
      small_loops: compile loops over small arrays as one function. Steps of small models then take half the time, but
        those with larger products, as in text, take several times as long.

    Example:
      >>> import fedrecon as fr
      >>> fr.start_jax_devices(2)
    """
    number = count_cores() if jax_devices is None else jax_devices
    check_number("jax_devices", number, least=1, most=max(MAX_CPU_DEVICES, count_cores()))
    if small_loops:
        _compile_small_loops()
    with contextlib.suppress(RuntimeError):  # JAX has started already
        jax.config.update("jax_num_cpu_devices", number)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile_small_loops() -> None:
    """Let XLA compile loops over small arrays on a CPU as one function, instead of starting every operation by itself.

    Steps of small models take half the time. Larger loops stay as they are, since their products are faster in a
    library. Existing values of the option are kept, and XLA ignores options that it does not know.
    """
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_backend_extra_options"
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}=xla_cpu_small_while_loop_byte_threshold={SMALL_LOOP}".strip()


def small_loops() -> bool:
    """Return whether XLA compiles small loops as one function: the last bits of results depend on it."""
    return "small_while_loop" in os.environ.get("XLA_FLAGS", "")


def start_hosts(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    jax_devices: int | None = None,
    timeout: int = TIMEOUT,
    small_loops: bool = True,
) -> None:
    """Run one simulation in several processes, on one host or on many, with `jax.distributed`.

    Every process runs the same program on the same data and calls this before anything else uses JAX. From then on
    `layout` has the devices of all of them, each process packs and runs its share of the clients, and all get the same
    results. Only the first writes to a `RunFolder`. If a process dies, JAX ends the others; run all of them again with
    the same folder to continue from its newest checkpoint.

    Args:
      coordinator: `host:port` at which the first process listens; None if SLURM, Open MPI or another launcher that JAX
        detects has started the processes. There is no authentication, so use a private network.
      processes: how many there are.
      process: the number of this one, from 0.
      jax_devices: how many devices on its CPU each process has; None for one per core.
      timeout: seconds after which a process that has not connected, or no longer answers, counts as dead.
      small_loops: as for `start_jax_devices`.

    Raises:
      HostError: a `ValueError`; the processes could not connect, or JAX has been used before.

    Example:
      >>> import fedrecon as fr
      >>> fr.start_hosts("node1:8476", processes=2, process=0)  # doctest: +SKIP
    """
    if jax.distributed.is_initialized():
        raise HostError("`start_hosts` was already called in this process")
    start_jax_devices(jax_devices, small_loops=small_loops)
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending a process
    names = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    timeouts: dict[str, Any] = dict.fromkeys(names, timeout)
    try:
        jax.distributed.initialize(coordinator, processes, process, **timeouts)
    except (RuntimeError, ValueError, TypeError) as problem:
        raise HostError(
            f"`coordinator`, `processes` and `process` (got {coordinator!r}, {processes} and {process}) do not connect "
            f"this process to the others: {problem}"
        ) from None


def is_first_process() -> bool:
    """Return whether this process writes and prints: the only one, or the first of several."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


# ---- agreeing ----


def broadcast(make: Callable[[], Any]) -> Any:
    """Return in every process what `make` returns in the first, as JSON represents it.

    Raises:
      HostError: `make` failed in the first process, where its own error is raised.
    """
    if not jax.distributed.is_initialized():
        return make()
    reply, problem = {}, None
    if is_first_process():
        try:
            reply = {"value": make()}
        except Exception as error:
            reply, problem = {"error": str(error) or type(error).__name__}, error
    reply = json.loads(_broadcast_bytes(json.dumps(reply).encode()))
    if problem is not None:
        raise problem
    if "error" in reply:
        raise HostError(f"the first process failed: {reply['error']}")
    return reply["value"]


def broadcast_arrays(tree: Any) -> Any:
    """Return the first process's arrays, bit for bit, in every process; the others pass arrays of the same shapes."""

    def copy(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return np.frombuffer(_broadcast_bytes(array.tobytes()), array.dtype).reshape(array.shape).copy()

    return jax.tree.map(copy, tree)


def _broadcast_bytes(data: bytes) -> bytes:
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.zeros(1 << size.bit_length(), np.uint8)  # few different sizes, since each is compiled
    if is_first_process():
        padded[:size] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes()[:size]


def check_same(facts: Mapping[str, Any]) -> None:
    """Raise `HostError` in every process unless all have the same facts, such as a fingerprint of the data."""
    if not jax.distributed.is_initialized():
        return
    facts = json.loads(json.dumps(facts))
    expected = broadcast(lambda: facts)
    problem = first_difference(facts, expected)
    differs = np.flatnonzero(multihost_utils.process_allgather(np.array(problem is not None)))
    if differs.size:
        number, where = (jax.process_index(), problem) if problem else (differs[0], "in settings, data or versions")
        raise HostError(f"process {number} differs from the first process: {where}")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that all processes call at the same point: whether one of them received Ctrl-C.

    Where a process is alone, Ctrl-C raises `KeyboardInterrupt` as usual, and the function returns False.
    """
    if not jax.distributed.is_initialized() or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[float] = []

    def on_interrupt(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > REPEATED_SIGNAL:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: bool(multihost_utils.process_allgather(np.array(bool(received))).any())
    finally:
        signal.signal(signal.SIGINT, previous)


def _in_first(name: str) -> Any:
    """Return a method that calls the folder's method of a name in the first process, and does nothing in the others."""

    def run(self: _FirstProcessFolder, *arguments: Any) -> None:
        if is_first_process():
            getattr(self._folder, name)(*arguments)

    return run


class _FirstProcessFolder(RunFolder):
    """A run's folder that only the first process reads and writes; other hosts need not have it."""

    replace, complete, describe, record, checkpoint = map(
        _in_first, ("replace", "complete", "describe", "record", "checkpoint")
    )

    def __init__(self, folder: RunFolder):
        super().__init__(folder.path, folder.checkpoint_every)
        self._folder = folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            broadcast(lambda: stack.enter_context(self._folder.lock()))
            yield

    def restore(self, like: Any) -> tuple[int, Any, list[dict[str, Any]]] | None:
        state = like

        def read() -> Any:
            nonlocal state
            newest = self._folder.restore(like)
            if newest is None:
                return None
            done, state, records = newest
            return done, records

        newest = broadcast(read)
        return None if newest is None else (newest[0], broadcast_arrays(state), newest[1])


def share_folder(folder: RunFolder) -> RunFolder:
    """Return the same folder, which only the first of several processes then reads and writes."""
    if isinstance(folder, _FirstProcessFolder) or not jax.distributed.is_initialized():
        return folder
    return _FirstProcessFolder(folder)


# ---- arrays ----


def make_global(tree: Any, mesh: Mesh, *axes: str | None) -> Any:
    """Make global arrays of those of this process: parts along `AXIS`, else the same in every process.

    Arrays that span the processes already stay as they are.
    """
    arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), tree)
    return multihost_utils.host_local_array_to_global_array(arrays, mesh, PartitionSpec(*axes))


def gather(tree: Any) -> Any:
    """Return arrays with the clients of all processes in every process."""
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))
