"""How JAX joins the devices of processes that have met."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no setting for the address; its own functions take one
from jax._src.lib import _jax
from jax._src.xla_bridge import make_cpu_client
from jax.extend.backend import register_backend_factory

from fedrecon._src.simulation.multihost.channel import HostError
from fedrecon._src.simulation.multihost.host_arrays import gather, spread
from fedrecon._src.simulation.multihost.meeting import LOOPBACK, connect, met

FIREWALL = "Processes connect to each other on ports that the system chooses. Is there a firewall between the hosts?"

_joined = False


def join() -> None:
    """Join the devices of all processes, once they are started; do nothing where a process is alone."""
    global _joined
    found = met()
    if found is None or _joined:
        return
    place, port, address, wait = found
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # proxies are named if somebody does not answer
    host = f"[{place.host}]" if ":" in place.host else place.host
    if place.process > 0:
        _check_reachable(place.host, port, wait)
    try:
        register_backend_factory("cpu", lambda: _reached_at(address), fail_quietly=False)
        jax.distributed.initialize(
            f"{host}:{port}",
            place.processes,
            place.process,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{port}" if place.host in LOOPBACK else None,
        )
    except RuntimeError as problem:
        raise HostError(f"processes must meet before anything else uses JAX: {problem}") from None
    _joined = True
    _first_sum()
    if jax.default_backend() == "cpu":
        # JAX's service connected the processes. From here on it would only abort this one, without saying which other
        # one died: the wire does that. Accelerators may need it to connect again.
        jax.distributed.shutdown()


def _check_reachable(host: str, port: int, wait: float) -> None:
    """Check that JAX will find the first process: if it does not, it aborts this process after five minutes."""
    try:
        connect(host, port, wait).close()
    except OSError as problem:
        raise HostError(
            f"this process has met the first one at {host}, but cannot connect to port {port} there "
            f"({problem.strerror or problem}). {FIREWALL}"
        ) from None


def _reached_at(address: str) -> Any:
    """Start JAX on a CPU with sums over processes that reach this one at an address.

    By itself JAX takes the address that this host's name stands for. On many hosts that is their loopback.
    """
    collectives = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=address)
    return make_cpu_client(collectives)


def _first_sum() -> None:
    """Add up something, so that processes connect while all are here: later, one may be busy for long."""
    try:
        with _quiet(), _patient_threads():
            mine = np.ones(len(jax.local_devices()), np.int32)
            found = gather(spread(mine))
    except RuntimeError as problem:
        raise HostError(f"the processes have met, but cannot exchange arrays: {problem}. {FIREWALL}") from None
    if found.sum() != jax.device_count():
        raise HostError(f"a sum over {jax.device_count()} devices is {found.sum()}")


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Start threads that, when they wake, let a running thread finish what it does (Linux's policy for batch jobs).

    The thread with which gloo receives does not sleep until it can have its lock: it tries again and again. If it
    interrupts the thread that holds the lock, because that is sending, it keeps the core from it for as long as Linux
    lets it, often between .6 and 4 ms.
    """
    changed = False
    with contextlib.suppress(AttributeError, OSError):  # there is no such policy, or a container does not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # nobody has chosen another one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield  # threads take over the policy of the thread that starts them
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep gloo from telling standard output, where results go, that it has connected."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
