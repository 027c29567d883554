"""The device plan: what a device agrees to when it trains, checked before anything relies on it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrecon_device.contents import content_of
from fedrecon_device.manifest import MOST_NUMBERS, Checker

PLAN, PLAN_FORMAT, PLAN_VERSION = "plan.json", "fedrecon-device-plan", 1
SIDES = ("support", "query")
PROTOCOLS, BITS = ("open", "two-servers"), (20, 24, 32)
MOST_REPORTS = 1000  # a day: a browser remembers no more
MOST_VARIANCE = 2.0**60  # of noise, in steps squared; a ring of 32 bits holds far less
CHECK = Checker(PLAN)


def read_plan(data: bytes) -> dict[str, Any]:
    """Read a device plan and check what devices rely on.

    Args:
      data: the bytes of plan.json.

    Raises:
      BundleError: it is damaged, or of a version that this runtime does not read; the message names the field.
    """
    plan = content_of(PLAN, data)
    CHECK.expect(isinstance(plan, dict) and plan.get("format") == PLAN_FORMAT, "format", PLAN_FORMAT)
    version = plan.get("version")
    CHECK.expect(type(version) is int and version == PLAN_VERSION, "version", f"{PLAN_VERSION}; update this runtime")
    CHECK.expect(isinstance(plan.get("graph"), str), "graph", "the digest of update.onnx")
    CHECK.whole(plan, "rounds")
    _check_examples(CHECK.object(plan, "examples"))
    _check_split(CHECK.object(plan, "split"), plan["examples"])
    _check_rows(CHECK.object(plan, "rows"), plan["examples"]["columns"])
    _check_vector(CHECK.object(plan, "vector"))
    _check_sum(CHECK.object(plan, "sum"))
    CHECK.expect("noise" in plan, "noise", "null, or an object")
    if plan["noise"] is not None:
        _check_noise(CHECK.object(plan, "noise"), plan)
    limits = CHECK.object(plan, "limits")
    often = CHECK.whole(limits, "reports_per_day")
    CHECK.expect(1 <= often <= MOST_REPORTS, "limits.reports_per_day", f"1 to {MOST_REPORTS}")
    CHECK.whole(limits, "min_examples")
    if CHECK.object(plan, "state"):
        key = plan.get("state_key")
        CHECK.expect(_all_below(key, 1 << 32) and len(key) == 2, "state_key", "two 32-bit words")
    return plan


def _all_below(numbers: Any, limit: int) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < limit for number in numbers)


def _check_examples(examples: Mapping[str, Any]) -> None:
    columns = CHECK.object(examples, "columns")
    CHECK.expect(bool(columns), "examples.columns", "at least one column")
    room = sum(CHECK.whole(examples, side) for side in (*SIDES, "most"))
    numbers = room * sum(math.prod(CHECK.column(name, about)) for name, about in columns.items())
    CHECK.expect(room <= MOST_NUMBERS and numbers <= MOST_NUMBERS, "examples", f"at most {MOST_NUMBERS} numbers")


def _check_split(split: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Check that positions are those of a person's examples, whatever their number."""
    most, by, pattern = examples["most"], split.get("by"), split.get("pattern")
    by_column = isinstance(by, str) and by in examples["columns"] and not examples["columns"][by]["shape"]
    CHECK.expect(by is None or by_column, "split.by", "a column of numbers, or null")
    CHECK.expect(isinstance(split.get("redrawn"), bool), "split.redrawn", "true or false")
    CHECK.expect(pattern is None or _all_below(pattern, 1 << 32), "split.pattern", "positions, or null")
    for side in SIDES:
        tables = []
        for field in ("counts", "begins"):
            numbers: Any = CHECK.object(split, field).get(side)
            fine = _all_below(numbers, most + 1) and len(numbers) == most + 1
            CHECK.expect(fine, f"split.{field}.{side}", f"{most + 1} numbers up to {most}")
            tables.append(np.array(numbers, np.int64))
        counts, begins = np.minimum(tables[0], examples[side]), tables[1]
        CHECK.expect(pattern is None or counts.max() <= len(pattern), "split.pattern", f"{counts.max()} positions")
        # of each number of examples, the farthest position from where the side begins
        farthest = counts - 1 if pattern is None else np.maximum.accumulate([-1, *pattern])[counts]
        inside = (counts == 0) | (begins + farthest < np.arange(most + 1))
        CHECK.expect(bool(inside.all()), f"split.begins.{side}", "positions of a person's examples")


def _check_rows(groups: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    for group, table in groups.items():
        features: Any = table.get("features") if isinstance(table, dict) else None
        fine = isinstance(features, list) and bool(features)
        fine = fine and all(
            isinstance(name, str) and columns.get(name, {}).get("dtype") == "int32" for name in features
        )
        CHECK.expect(fine, f"rows.{group}.features", "columns of integers")
        CHECK.expect(isinstance(table.get("support"), bool), f"rows.{group}.support", "true or false")
        CHECK.expect(CHECK.whole(table, "table") < 1 << 31, f"rows.{group}.table", "fewer rows")
        CHECK.expect(CHECK.whole(table, "capacity") <= MOST_NUMBERS, f"rows.{group}.capacity", "fewer rows")


def _check_vector(vector: Mapping[str, Any]) -> None:
    length, layout = CHECK.whole(vector, "length"), vector.get("layout")
    CHECK.expect(0 < length <= MOST_NUMBERS, "vector.length", f"1 to {MOST_NUMBERS}")
    CHECK.expect(vector.get("dtype") in ("uint32", "float32"), "vector.dtype", "uint32 or float32")
    fine = isinstance(layout, list) and all(
        isinstance(entry, dict)
        and set(entry) in ({"at", "values"}, {"at", "values", "ids", "count"})
        and _all_below([entry["at"]], length)
        and all(isinstance(name, str) for field, name in entry.items() if field != "at")
        for entry in layout
    )
    CHECK.expect(fine, "vector.layout", "names of outputs and their places")


def _check_sum(total: Mapping[str, Any]) -> None:
    CHECK.expect(total.get("protocol") in PROTOCOLS, "sum.protocol", " or ".join(PROTOCOLS))
    CHECK.expect(total.get("bits") in BITS, "sum.bits", "20, 24 or 32")
    helper = total.get("helper")
    fine = helper is None if total["protocol"] == "open" else isinstance(helper, str) and len(helper) == 64
    CHECK.expect(fine and re.fullmatch("[0-9a-f]*", helper or "") is not None, "sum.helper", "a key of 64 digits")
    fine = CHECK.whole(total, "least") >= 2 or total["protocol"] == "open"
    CHECK.expect(fine, "sum.least", "2 or more, since the sum of one report is the report")


def _check_noise(noise: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Check the noise that a device adds, and what is promised if as many as `least` add it."""
    for name, most in (("variance", MOST_VARIANCE), ("epsilon", math.inf), ("delta", 1.0)):
        value: Any = noise.get(name)
        fine = type(value) in (int, float) and 0 < value <= most
        CHECK.expect(fine, f"noise.{name}", f"a number above 0{f', at most {most:g}' if most < math.inf else ''}")
    fine = 1 <= CHECK.whole(noise, "least") <= plan["sum"]["least"]
    CHECK.expect(fine, "noise.least", "1 or more, and no more than the reports of a sum")
    CHECK.expect(plan["vector"]["dtype"] == "uint32", "vector.dtype", "uint32, since noise is added to integers")
