"""A ClientApp for stock SuperNodes, with the same handlers as `fedrecon node`.

    flower-supernode --superlink HOST:8000 --root-certificates ca.crt --auth-supernode-private-key north.key \\
      --node-config 'fedrecon-file="ratings.csv" fedrecon-accept="0123456789abcdef"'

The node's operator sets these in the SuperNode's node config or, if they are not there, in environment variables
(`FEDRECON_FILE`, `FEDRECON_ACCEPT`):

    fedrecon-file           the node's file; required
    fedrecon-accept         the digest of the accepted plan, or at least its first 16 characters; required
    fedrecon-state          the folder where the node remembers what was accepted
    fedrecon-min-examples   users with fewer examples do not take part
    fedrecon-key            the node's private key, if keys of secure sums are signed
    fedrecon-nodes          a folder with public keys of the nodes that the operator knows
    fedrecon-algorithm      package.module:function, for a plan of an algorithm made in Python
    fedrecon-data-user      and so on: how a ratings file is read

The SuperNode starts a process for every message, which reads the file and starts JAX again: at least 5 seconds of CPU
per message. `fedrecon node` keeps one process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.app.config import Reading
from fedrecon._src.deploy.flower import client_app, private_key
from fedrecon._src.deploy.operating import Operator
from fedrecon._src.deploy.plan import Plan, names

PREFIX = "fedrecon-"


def answer(data: bytes, told: Mapping[str, Any], kept: bytes) -> tuple[bytes, bytes]:
    """Answer a message.

    Args:
      data: the message.
      told: the SuperNode's node config.
      kept: what the last process of this run kept.

    Returns:
      The reply, and what to keep.
    """
    settings = {**_environment(), **{name: value for name, value in told.items() if name.startswith(PREFIX)}}
    for name in ("file", "accept"):
        if not settings.get(PREFIX + name):
            raise ValueError(
                f"this SuperNode's {PREFIX}{name} is not set: give --node-config '{PREFIX}{name}=\"...\"', or set "
                f"{_variable(PREFIX + name)}"
            )
    operator = _operator(settings)
    folder = operator.folder / "compiled"
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        import jax

        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    key = settings.get(PREFIX + "key")
    node = operator.node(
        lambda plan: _accepts(plan, str(settings[PREFIX + "accept"])),
        lambda text: print(f"fedrecon: {text}", file=sys.stderr, flush=True),
        key=None if key is None else private_key(Path(str(key))),
    )
    node.go_on(kept)
    return node.handle(data), node.kept()


def _accepts(plan: Plan, digest: str) -> bool:
    return names(plan.digest, digest)


def _operator(settings: Mapping[str, Any]) -> Operator:
    def path(name: str) -> Path | None:
        found = settings.get(PREFIX + name)
        return None if found is None else Path(str(found))

    reading = {
        field.name: settings[f"{PREFIX}data-{field.name.replace('_', '-')}"]
        for field in dataclasses.fields(Reading)
        if f"{PREFIX}data-{field.name.replace('_', '-')}" in settings
    }
    algorithm = settings.get(PREFIX + "algorithm")
    return Operator(
        Path(str(settings[PREFIX + "file"])),
        path("state"),
        Reading(**reading),
        int(settings.get(PREFIX + "min-examples", 1)),
        path("nodes"),
        None if algorithm is None else str(algorithm),
    )


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


def _environment() -> dict[str, str]:
    names_ = ["file", "accept", "state", "min-examples", "key", "nodes", "algorithm"]
    names_ += [f"data-{field.name.replace('_', '-')}" for field in dataclasses.fields(Reading)]
    found = {PREFIX + name: os.environ.get(_variable(PREFIX + name)) for name in names_}
    return {name: value for name, value in found.items() if value}


app = client_app(answer)
