"""Keys of nodes: what the server registers, what signs requests, and what signs the keys of secure sums."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.messages import Failure
from fedrecon._src.deploy.plan import Plan, PlanError


def read_private_key(path: Path) -> Any:
    """Read a node's private key, an Ed25519 key as OpenSSH writes it.

    Raises:
      ValueError: it cannot be read.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise ValueError(f"{path} is not an unencrypted private key ({error}); make one with fedrecon keys") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} is not an Ed25519 key; make one with fedrecon keys")
    return key


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


def read_registry(folder: Path) -> dict[bytes, str]:
    """Read the public keys in a folder as a registry: the names of nodes by the bytes of their keys.

    Raises:
      PlanError: there are none, or one cannot be read.
    """
    lines = read_public_keys(folder)
    return {_load(_without_comment(line)).public_bytes_raw(): line.split()[2] for line in lines}


def number_in_plan(plan: Plan, key: Any, trusted: Collection[str] | None) -> int | None:
    """Return a node's number among the nodes that a plan lists; None if keys are not signed.

    Args:
      plan: the plan of the secure sums.
      key: the node's private key.
      trusted: public keys of nodes that the node's owner knows; None to trust the plan's list.

    Raises:
      Failure: the node is not in the list, or its owner does not know a node that is.
    """
    if not plan.promises.signed:
        if trusted is not None and plan.secure:
            raise Failure("not_accepted", "this node's owner listed nodes, but in this plan keys are not signed")
        return None
    listed = [_without_comment(line) for line in plan.nodes]
    if trusted is not None and (strangers := set(listed) - set(map(_without_comment, trusted))):
        raise Failure("not_accepted", f"the plan lists {len(strangers)} nodes that this node's owner does not know")
    public = None if key is None else _public_line(key)
    if public not in listed:
        raise Failure("not_accepted", "the plan lists the keys of its nodes, and this node's is not among them")
    return listed.index(public)


def verify_keys(plan: Plan) -> Mapping[int, Any] | None:
    """Return the keys of a plan's nodes by number; None if keys are not signed."""
    return {k: _load(_without_comment(line)) for k, line in enumerate(plan.nodes)} if plan.promises.signed else None


def _without_comment(line: str) -> str:
    return " ".join(line.split()[:2])


def _public_line(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@functools.lru_cache(maxsize=4096)
def _load(line: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(line.encode())
    except ValueError as error:
        raise PlanError(f"{line[:60]!r} is not a public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise PlanError(f"{line[:60]!r} is not an Ed25519 key; make one with fedrecon keys")
    return key
