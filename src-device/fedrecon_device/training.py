"""Training on a device: its plan, and its examples as the inputs of the update graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedrecon_device.errors import BundleError
from fedrecon_device.keys import Key, redrawn_order

Columns = Mapping[str, np.ndarray]
SIDES = ("support", "query")


def pack_examples(plan: Mapping[str, Any], columns: Mapping[str, Any], round_key: Key, name: str) -> dict[str, Any]:
    """Return a person's examples as inputs of the update graph: support and query, padded, and the rows they touch.

    Args:
      plan: the content of plan.json.
      columns: one array per feature, all of the same length, oldest example first; of more than fit, the newest count.
      round_key: the two words of the round's key.
      name: of the device; with the round's key it gives the order of a redrawn split.
    """
    about, split = plan["examples"], plan["split"]
    columns = newest(about["columns"], columns, about["most"])
    size = len(next(iter(columns.values())))
    order = np.arange(size)
    if split["redrawn"]:
        order = np.array(redrawn_order(round_key, name, size), np.int64)
    elif split["by"] is not None:
        order = np.argsort(columns[split["by"]], kind="stable")
    inputs: dict[str, Any] = {}
    sides = {}
    for side in SIDES:
        count = min(split["counts"][side][size], about[side])
        pattern = np.arange(count) if split["pattern"] is None else np.array(split["pattern"][:count], np.int64)
        source = order[split["begins"][side][size] + pattern]
        sides[side] = {feature: column[source] for feature, column in columns.items()}
        inputs[f"{side}_count"] = np.int32(count)
        inputs |= {f"{side}/{feature}": _padded(column, about[side]) for feature, column in sides[side].items()}
    for group, table in plan["rows"].items():
        inputs |= _list_rows(group, table, sides, {side: about[side] for side in SIDES})
    return inputs


def newest(about: Mapping[str, Any], columns: Mapping[str, Any], most: int) -> dict[str, np.ndarray]:
    """Return the newest examples in the types that graphs take.

    Raises:
      BundleError: a column is missing, or columns have different lengths or shapes.
    """
    lengths = {name: len(columns[name]) for name in about if name in columns}
    if set(lengths) != set(about) or len(set(lengths.values())) > 1:
        raise BundleError(f"examples need {list(about)} of the same length; got {lengths}")
    result = {}
    for name, column in about.items():
        values = np.asarray(columns[name], column["dtype"])[max(0, lengths[name] - most) :]
        result[name] = values.reshape(len(values), *column["shape"])
    return result


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


def _list_rows(
    group: str, table: Mapping[str, Any], sides: Mapping[str, Columns], lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Number the ids of a group of tables in order of first use, query before support."""
    places: dict[int, int] = {}
    inputs: dict[str, Any] = {}
    for side, prefix in (("query", "slots"), ("support", "support_slots"))[: 2 if table["support"] else 1]:
        slots = _slots(group, table, sides[side], places)
        inputs |= {f"{prefix}/{feature}": _padded(values, lengths[side]) for feature, values in slots.items()}
    rows = np.array(list(places), np.int32)
    return {f"rows/{group}": _padded(rows, table["capacity"]), f"num_rows/{group}": np.int32(len(rows)), **inputs}


def _slots(group: str, table: Mapping[str, Any], columns: Columns, places: dict[int, int]) -> dict[str, np.ndarray]:
    """Return the place of every id in the list of rows, and add ids that are new to it."""
    features: Sequence[str] = table["features"]
    widths = [math.prod(columns[feature].shape[1:]) for feature in features]
    ids = np.concatenate(
        [columns[f].reshape(len(columns[f]), width) for f, width in zip(features, widths, strict=True)], 1
    )
    if ids.size and not 0 <= ids.min() <= ids.max() < table["table"]:
        raise BundleError(f"{group} has ids from {ids.min()} to {ids.max()}; the table has {table['table']} rows")
    flat = np.array([places.setdefault(int(row), len(places)) for row in ids.reshape(-1)], np.int32).reshape(ids.shape)
    parts = np.split(flat, np.cumsum(widths)[:-1], 1)
    return {feature: part.reshape(columns[feature].shape) for feature, part in zip(features, parts, strict=True)}
