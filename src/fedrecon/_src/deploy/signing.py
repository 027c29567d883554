"""Signed keys in secure sums: a node trusts the nodes that the plan lists, not any that the server names."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.messages import Failure
from fedrecon._src.deploy.plan import Plan, PlanError


def read_public_keys(folder: Path) -> tuple[str, ...]:
    """Read the public keys in a folder, one line each, as a plan lists them.

    Raises:
      PlanError: there are none, or one cannot be read.
    """
    files = sorted(folder.glob("*.pub"))
    if not files:
        raise PlanError(f"{folder} has no public keys (*.pub); make some with fedrecon keys")
    lines = []
    for file in files:
        kind, text, *_ = [*file.read_text(encoding="ascii", errors="replace").split(), "", ""]
        _load(f"{kind} {text}")
        lines.append(f"{kind} {text} {file.stem}")
    return tuple(lines)


def number_of(plan: Plan, key: Any, known: Collection[str] | None) -> int | None:
    """Return a node's number among the nodes that a plan lists; None if keys are not signed.

    Args:
      plan: the plan of the secure sums.
      key: the node's private key.
      known: public keys of nodes that the node's owner knows; None to trust the plan's list.

    Raises:
      Failure: the node is not in the list, or its owner does not know a node that is.
    """
    if not plan.promises.signed:
        if known is not None and plan.secure:
            raise Failure("not_accepted", "this node's owner listed nodes, but in this plan keys are not signed")
        return None
    listed = [_core(line) for line in plan.nodes]
    if known is not None and (strange := [line for line in plan.nodes if _core(line) not in set(map(_core, known))]):
        raise Failure("not_accepted", f"the plan lists {len(strange)} nodes that this node's owner does not know")
    mine = None if key is None else _public(key)
    if mine not in listed:
        raise Failure("not_accepted", "the plan lists the keys of its nodes, and this node's is not among them")
    return listed.index(mine)


def verify_keys(plan: Plan) -> Mapping[int, Any] | None:
    """Return the keys of a plan's nodes by number; None if keys are not signed."""
    return {k: _load(_core(line)) for k, line in enumerate(plan.nodes)} if plan.promises.signed else None


def _core(line: str) -> str:
    """Return a public key without its comment."""
    return " ".join(line.split()[:2])


def _public(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@functools.lru_cache(maxsize=4096)
def _load(line: str) -> Any:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        return load_ssh_public_key(line.encode())
    except ValueError as problem:
        raise PlanError(f"{line[:60]!r} is not a public key: {problem}") from None
