"""What nodes are asked for: sums of training, of an evaluation or of round zero, and which arrays these are."""

from __future__ import annotations

import functools
import struct
from typing import Any

from fedrecon._src.algorithms.rounds import total_shapes
from fedrecon._src.core.wire import nbytes
from fedrecon._src.deploy import measure
from fedrecon._src.deploy.messages import Failure
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.secret import length_of
from fedrecon._src.deploy.settings_plan import SettingsPlan

TRAIN, PARTS, PREPARE = "train", ("valid", "test"), "prepare-"  # the last is followed by the number of a question
_LENGTH = struct.Struct(">I")


def question_in(of: str) -> int | None:
    """Return which question of round zero a sum answers, by its number; None for any other sum."""
    number = of.removeprefix(PREPARE)
    return int(number) if of.startswith(PREPARE) and number.isdecimal() and len(number) < 4 else None


def shapes_of(plan: Plan, of: str) -> Any:
    """Return what a node sends, as shapes or zeros: for training, an evaluation, or a question of round zero."""
    if of == TRAIN:
        return total_shapes(plan.algorithm)
    number = question_in(of)
    if number is None:
        return measure.nothing(plan.algorithm.model)
    if plan.zero is None or not plan.unprepared:
        raise Failure("garbage", "this plan has no round zero, or it is over")
    try:
        return plan.zero.zeros(number)
    except ValueError as problem:
        raise Failure("garbage", str(problem)) from None


@functools.lru_cache(maxsize=16)
def largest_message(plan: Plan) -> int:
    """Return a bound on the bytes of any message of a plan, in either direction."""
    total = total_shapes(plan.algorithm)
    arrays = max(nbytes(plan.message_shapes), nbytes(plan.params_shapes), nbytes(total), 8 * length_of(total))
    first = 16 * 3 * len(plan.legend) if isinstance(plan, SettingsPlan) else 0  # for round zero: three numbers per item
    return 2 * max(arrays, first, len(plan.content)) + 2**24


def two_in_one(first: bytes, second: bytes) -> bytes:
    """Write two bodies as one."""
    return _LENGTH.pack(len(first)) + first + second


def two_of(body: bytes) -> tuple[bytes, bytes]:
    """Read two bodies from one."""
    if len(body) < _LENGTH.size or (size := _LENGTH.unpack_from(body)[0]) > len(body) - _LENGTH.size:
        raise Failure("garbage", "the message should have two parts")
    return body[_LENGTH.size : _LENGTH.size + size], body[_LENGTH.size + size :]
