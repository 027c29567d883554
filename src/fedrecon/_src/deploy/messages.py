"""Messages between server and nodes: a small header that says which plan, run and round, and a body of bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from annotated_types import Ge, Lt
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError, with_config

from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.pytrees import nbytes
from fedrecon._src.core.wire import SLACK, WireError, from_bytes
from fedrecon._src.deploy.admission import RefusalError
from fedrecon._src.deploy.plan import Plan

MAGIC = b"FRD1"
MOST_HEADER = 2**14
_START = struct.Struct(">4sI")
OK, REFUSED = "ok", "refused"
# What a sum is for; the last is followed by the number of a question of round zero.
TRAIN, PREPARE = "train", "prepare-"
_LENGTH = struct.Struct(">I")


class Failure(RefusalError):
    """A message that a node or the server rejects."""


@contextlib.contextmanager
def fails_with(reason: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of these types into a `Failure` for this reason."""
    try:
        yield
    except errors as error:
        raise Failure(reason, str(error)) from None


class Envelope(NamedTuple):
    """A message.

    Attributes:
      kind: what is asked for, or how it went.
      plan: the digest of the plan.
      run: which training of this plan.
      round: which round of it, from 0.
      facts: small things that depend on the kind.
      body: bytes that depend on the kind.
    """

    kind: str
    plan: str
    run: str
    round: int
    facts: Mapping[str, Any] = {}
    body: bytes = b""


def pack(message: Envelope) -> bytes:
    """Write a message."""
    header = json.dumps({name: value for name, value in message._asdict().items() if name != "body"}).encode()
    return _START.pack(MAGIC, len(header)) + header + message.body


_STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(_STRICT)
@dataclass
class _Facts:
    """The facts of all kinds of messages."""

    result_bytes: Annotated[int, Ge(0)] | None = None
    part: Literal["valid", "test"] | None = None
    number: Annotated[int, Ge(0), Lt(1000)] | None = None
    purpose: Annotated[str, StringConstraints(pattern=r"^(train|valid|test|prepare-[0-9]{1,3})$")] | None = None
    me: Annotated[int, Ge(0), Lt(2**63)] | None = None
    failed: str | None = None
    reason: str | None = None
    why: str | None = None


@with_config(_STRICT)
@dataclass
class _Header:
    """What a message begins with, as JSON."""

    kind: str
    plan: str
    run: str
    round: Annotated[int, Ge(0), Lt(2**32)]
    facts: _Facts


_HEADER = TypeAdapter(_Header)
REQUESTS: dict[str, set[str]] = {kind: set() for kind in ("join", "train", "share", "mask", "unmask", "finish")}
REQUESTS |= {"prepare": {"number"}, "evaluate": {"part"}, "advertise": {"purpose", "me"}}  # facts that each must have


def unpack(data: Any, most: int) -> Envelope:
    """Read a message from bytes that may be anything.

    Args:
      data: the bytes.
      most: how many of them are accepted.

    Raises:
      Failure: it is too large, or not a message.
    """
    data = data if isinstance(data, bytes) else b""
    if len(data) > most:
        raise Failure("too_large", f"a message of {len(data)} bytes; at most {most} are accepted")
    magic, size = _START.unpack(data[: _START.size].ljust(_START.size, b"\0"))
    size = size if magic == MAGIC and size <= MOST_HEADER else 0
    try:
        header = _HEADER.validate_json(data[_START.size : _START.size + size])
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))[:100]
        raise Failure("garbage", f"this is not a message of fedrecon: {field} {problem['msg'][:200]}") from None
    facts = {name: value for name, value in vars(header.facts).items() if value is not None}
    return Envelope(header.kind, header.plan, header.run, header.round, facts, data[_START.size + size :])


def check_request(message: Envelope) -> None:
    """Refuse a message that is no complete request."""
    if message.kind not in REQUESTS or not REQUESTS[message.kind] <= set(message.facts):
        raise Failure("garbage", f"unknown or incomplete message of kind {message.kind[:40]!r}")


def refusal(message: Envelope | None, failure: Failure) -> bytes:
    """Write a reply that refuses a message."""
    plan, run, number = (message.plan, message.run, message.round) if message else ("", "", 0)
    return pack(Envelope(REFUSED, plan, run, number, {"reason": failure.reason, "why": failure.why[:2000]}))


def purpose_of(question: Envelope) -> str:
    """Return what the sum that a message asks for is for: training, a part of the users, or round zero."""
    if question.kind == "prepare":
        return f"{PREPARE}{question.facts['number']}"
    return question.facts["part"] if question.kind == "evaluate" else TRAIN


def question_number(purpose: str) -> int | None:
    """Return which question of round zero a sum answers, by its number; None for any other sum."""
    number = purpose.removeprefix(PREPARE)
    return int(number) if purpose.startswith(PREPARE) and number.isdecimal() and len(number) < 4 else None


@functools.lru_cache(maxsize=16)
def largest_message(plan: Plan) -> int:
    """Return a bound on the bytes of any message of a plan, in either direction."""
    total = total_shapes(plan.algorithm)
    integers = 8 * sum(leaf.size for leaf in jax.tree.leaves(total))
    arrays = max(nbytes(plan.message_shapes), nbytes(plan.params_shapes), nbytes(total), integers)
    first = 0 if plan.zero is None else 16 * plan.zero.numbers_per_item * plan.zero.num_items
    return 2 * max(arrays, first, len(plan.content)) + 2**24


def pack_pair(first: bytes, second: bytes) -> bytes:
    """Write two bodies as one."""
    return _LENGTH.pack(len(first)) + first + second


def unpack_pair(body: bytes) -> tuple[bytes, bytes]:
    """Read two bodies from one."""
    if len(body) < _LENGTH.size or (size := _LENGTH.unpack_from(body)[0]) > len(body) - _LENGTH.size:
        raise Failure("garbage", "the message should have two parts")
    return body[_LENGTH.size : _LENGTH.size + size], body[_LENGTH.size + size :]


def read_tree(body: bytes, like: Any, *, finite: bool = True) -> Any:
    """Read the arrays of a body.

    Raises:
      Failure: they are not the expected ones, or not finite although they should be.
    """
    with fails_with("garbage", WireError):
        tree = from_bytes(body, like, most=nbytes(like) + SLACK)
    if finite and not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)):
        raise Failure("not_finite", "the message has numbers that are not finite")
    return tree
