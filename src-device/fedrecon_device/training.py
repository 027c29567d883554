"""Training on a device: its plan, its examples as inputs of the update graph, and the vector that it reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedrecon_device.bundle import Bundle, newest, padded
from fedrecon_device.errors import BundleError
from fedrecon_device.files import digest_of, read_checked
from fedrecon_device.keys import Key, client_key, redrawn_order
from fedrecon_device.plan import PLAN, SIDES, read_plan

Columns = Mapping[str, np.ndarray]


class Update(NamedTuple):
    """The result of a round on a device.

    Attributes:
      vector: all that leaves the device, one row of numbers.
      state: what the device keeps for its next round, by path; it never leaves. Empty for most methods.
    """

    vector: np.ndarray
    state: dict[str, np.ndarray]


class Trainer:
    """Runs rounds of training on a device.

    Attributes:
      plan: what the device agrees to, the content of plan.json.
      digest: the plan's digest, sha256 of its bytes in hexadecimal digits.
    """

    def __init__(self, bundle: Bundle):
        """Open the plan and the update graph of a bundle.

        Raises:
          BundleError: the bundle has no plan, or one that is damaged or does not belong to its graph.
        """
        self._graph = bundle.graph("update")  # says why there is none
        data = read_checked(bundle.folder, bundle.manifest, PLAN)
        self.plan, self.digest = read_plan(data), digest_of(data)
        self._bundle = bundle
        if self.plan["graph"] != bundle.manifest["files"]["update.onnx"]["sha256"]:
            raise BundleError(f"{PLAN} is for another update.onnx than the bundle has")
        used = {name for entry in self.plan["vector"]["layout"] for field, name in entry.items() if field != "at"}
        used |= {f"new_state/{path}" for path in self.plan["state"]}
        if not used <= set(self._graph.outputs):
            raise BundleError(f"{PLAN} names {min(used - set(self._graph.outputs))!r}, which update.onnx does not give")

    def update(
        self,
        message: Mapping[str, np.ndarray],
        round_key: Key,
        name: str,
        columns: Mapping[str, Any],
        state: Mapping[str, np.ndarray] | None = None,
    ) -> Update:
        """Train on a person's examples for one round.

        Args:
          message: what the server sent, arrays by name (`message/PATH`).
          round_key: the two words of the round's key.
          name: of the device; it stays on the device.
          columns: one array per feature, oldest example first.
          state: what the device kept from its last round, by path; None before its first, or if it keeps nothing.

        Raises:
          BundleError: the message or the examples do not fit the plan.
        """
        inputs = {
            **message,
            "key": _words(client_key(round_key, name)),
            **pack_examples(self.plan, columns, round_key, name),
        }
        state = self.first_state(name) if state is None else state
        outputs = self._graph.run({**inputs, **{f"state/{path}": leaf for path, leaf in state.items()}})
        return Update(
            lay_out(self.plan["vector"], outputs), {path: outputs[f"new_state/{path}"] for path in self.plan["state"]}
        )

    def first_state(self, name: str) -> dict[str, np.ndarray]:
        """Return what a device keeps before its first round, by path; empty for methods that keep nothing."""
        if not self.plan["state"]:
            return {}
        inputs = {f"global/{path}": table for path, table in self._bundle.tables.items()}
        inputs["key"] = _words(client_key(tuple(self.plan["state_key"]), name))
        outputs = self._bundle.graph("state").run(inputs)
        return {output.removeprefix("state/"): values for output, values in outputs.items()}


def _words(key: Key) -> np.ndarray:
    return np.array(key, np.uint32).view(np.int32)


def lay_out(about: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what a device adds to the sum as one row of numbers; rows of tables go to their places.

    Args:
      about: the plan's entry `vector`.
      outputs: of the update graph.

    Raises:
      BundleError: the outputs do not fit into the vector.
    """
    vector = np.zeros(about["length"], about["dtype"])
    for entry in about["layout"]:
        values, at = outputs[entry["values"]], entry["at"]
        if "ids" not in entry:
            places = np.arange(values.size)
        else:
            count, width = int(outputs[entry["count"]]), math.prod(values.shape[1:])
            values, ids = values[:count], outputs[entry["ids"]][:count]
            places = (ids.astype(np.int64)[:, None] * width + np.arange(width)).reshape(-1)
        if places.size and not 0 <= at + places.min() <= at + places.max() < len(vector):
            raise BundleError(f"update.onnx: {entry['values']} does not fit into a vector of {len(vector)} numbers")
        vector[at + places] = values.reshape(-1)
    return vector


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
        inputs |= {f"{side}/{feature}": padded(column, about[side]) for feature, column in sides[side].items()}
    for group, table in plan["rows"].items():
        inputs |= _list_rows(group, table, sides, {side: about[side] for side in SIDES})
    return inputs


def _list_rows(
    group: str, table: Mapping[str, Any], sides: Mapping[str, Columns], lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Number the ids of a group of tables in order of first use, query before support."""
    places: dict[int, int] = {}
    inputs: dict[str, Any] = {}
    for side, prefix in (("query", "slots"), ("support", "support_slots"))[: 2 if table["support"] else 1]:
        slots = _slots(group, table, sides[side], places)
        inputs |= {f"{prefix}/{feature}": padded(values, lengths[side]) for feature, values in slots.items()}
    rows = np.array(list(places), np.int32)
    if len(rows) > table["capacity"]:
        raise BundleError(f"{PLAN}: {group} has room for {table['capacity']} rows; these examples have {len(rows)}")
    return {f"rows/{group}": padded(rows, table["capacity"]), f"num_rows/{group}": np.int32(len(rows)), **inputs}


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
