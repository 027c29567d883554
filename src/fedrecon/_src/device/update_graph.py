"""The client's part of a round as a graph for devices: what is drawn before it runs, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, encode
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.core.cohort import ABSENT, Cohort, Examples, Lengths, Needs, Packer, lengths_for, row_capacity
from fedrecon._src.core.model import Batch
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.core.upload import RowChanges, Summand, broadcast_clients
from fedrecon._src.device.onnx_graphs import ExportError, OnnxGraph, to_onnx
from fedrecon._src.models.text.shared_weights import plain_layers

SIDES = ("support", "query")
ROW_FIELDS = ("rows", "num_rows", "slots", "support_slots")


class UpdateGraph:
    """A client's part of a round (R, U and the aggregator's encoding) with flat, named inputs and outputs.

    Inputs are `message/PATH`, `key` (the two words of the client's key, as int32), the examples as
    `fedrecon_device.training.pack_examples` packs them, and `state/PATH`. Outputs are what a client adds to the sum: of
    tables, the ids and values of rows; then `state/PATH`. Nothing random is left to the graph but where local
    parameters start, which it draws from `key` as the simulator does.
    """

    def __init__(self, algorithm: Algorithm, like: Mapping[str, np.ndarray], most: int, prepare: Prepare | None = None):
        """Prepare to export.

        Args:
          algorithm: what is trained, with decided lookups.
          like: made-up examples, one array per feature.
          most: how many examples of a person a device uses.
          prepare: turns columns as people have them into those of the model.
        """
        self._algorithm, self._prepare = algorithm, prepare or (lambda columns: dict(columns))
        self._needs = algorithm.method.needs._replace(columns=list(like))
        self._like, self._most = like, most
        self.lengths = lengths_for(most, self._needs)
        state = jax.eval_shape(algorithm.init, jax.random.key(0))
        message, self._structure = flatten(jax.eval_shape(algorithm.message, state))
        kept, self._kept = flatten(self._state_shapes())
        self.inputs = {
            **{f"message/{path}": leaf for path, leaf in message.items()},
            **{f"state/{path}": leaf for path, leaf in kept.items()},
            "key": jax.ShapeDtypeStruct((2,), jnp.int32),
            "round_key": jax.ShapeDtypeStruct((2,), jnp.uint32),
            **{name: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for name, x in self._packed_shapes().items()},
        }
        self.layout: list[dict[str, Any]] = []
        self.outputs: list[str] = []
        self.vector = (0, np.dtype(np.float32))  # its length and type
        jax.eval_shape(self.run, self.inputs)  # which also finds out the layout

    def _state_shapes(self) -> Any:
        method = self._algorithm.method
        if method.init_client is None:
            return ()
        params = jax.eval_shape(lambda: self._algorithm.params(self._algorithm.init(jax.random.key(0))))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            jax.eval_shape(method.init_client, params, keys),
        )

    def _packed_shapes(self) -> dict[str, np.ndarray]:
        columns = {name: np.asarray(column)[:0] for name, column in self._like.items()}
        return packed_inputs(Packer(as_clients(columns), self._needs, self.lengths).pack(np.array([ABSENT])))

    def run(self, named: Mapping[str, Any]) -> list[Any]:
        """Run a round for one client, from named arrays."""
        algorithm = self._algorithm
        message = unflatten(self._structure, _under("message/", named))
        kept = unflatten(self._kept, {path: leaf[None] for path, leaf in _under("state/", named).items()})
        start = algorithm.model.init_local(named["key"].astype(jnp.uint32))
        fixed = algorithm.define(algorithm.model._replace(init_local=lambda key: start))
        cohort = self._cohort(named)
        key = jax.random.wrap_key_data(named["round_key"])
        with plain_layers():
            upload, kept = fixed.client(message.method, kept, cohort, key)
            summand = encode(algorithm, message, upload, key[None])
        outputs = self._laid_out(summand)
        outputs |= {f"state/{path}": leaf[0] for path, leaf in flatten(kept)[0].items()}
        self.outputs = list(outputs)
        return list(outputs.values())

    def _cohort(self, named: Mapping[str, Any]) -> Cohort:
        """Return a cohort of one client."""

        def examples(side: str) -> Examples:
            columns = self._prepare(_under(f"{side}/", named))
            return Examples({name: column[None] for name, column in columns.items()}, named[f"{side}_count"][None])

        rows = [{name: x[None] for name, x in _under(f"{field}/", named).items()} for field in ROW_FIELDS]
        return Cohort(jnp.zeros(1, jnp.int32), jnp.zeros((1, 2), jnp.uint32), *map(examples, SIDES), *rows)

    def _laid_out(self, summand: Summand) -> dict[str, Any]:
        """Return what a client adds, by name, and note where each array goes in its vector."""
        outputs: dict[str, Any] = {}
        self.layout, at = [], 0
        parts = [
            (f"{part}/{path}", change)
            for part, some in sorted(summand.parts.items())
            for path, change in sorted(some.items())
        ]
        small = [(f"scalar/{name}", value) for name, value in sorted({**summand.scalars, **summand.flags}.items())]
        for name, change in [*parts, *small]:
            values = change.values if isinstance(change, RowChanges) else change
            values = values if name.startswith("scalar/") else _scaled(values, summand)
            entry: dict[str, Any] = {"at": at, "values": name}
            outputs[name] = values[0]
            length = math.prod(values.shape[1:])
            if isinstance(change, RowChanges):
                outputs[f"{name}/ids"], outputs[f"{name}/count"] = change.ids[0], change.count[0]
                entry |= {"ids": f"{name}/ids", "count": f"{name}/count"}
                length = change.table * math.prod(values.shape[2:])
            self.layout.append(entry)
            at += length
        dtypes = {np.dtype(outputs[entry["values"]].dtype) for entry in self.layout}
        if len(dtypes) != 1:
            raise ExportError(f"a device sends numbers of one type; the aggregator encodes {sorted(map(str, dtypes))}")
        self.vector = at, dtypes.pop()
        return outputs

    def graph(self) -> OnnxGraph:
        """Translate it to ONNX.

        Raises:
          ExportError: it draws random numbers besides the start, or an operation has no translation.
        """
        refused = {
            "round_key": "the algorithm draws random numbers while it computes (dropout, or simulated noise), which a "
            "device cannot: train a model without dropout; with `secure`, set simulated_noise=False"
        }
        return to_onnx(self.run, self.inputs, self.outputs, refused=refused)

    def describe(self) -> dict[str, Any]:
        """Return what a device plan says about examples, rows and the vector."""
        length, dtype = self.vector
        return {
            "examples": {
                **self.lengths._asdict(),
                "most": self._most,
                "columns": {n: {"dtype": str(x.dtype), "shape": list(x.shape[1:])} for n, x in self._like.items()},
            },
            "split": describe_split(self._needs, self._most, self.lengths),
            "rows": describe_rows(self._needs, self._like, self.lengths),
            "state": {
                name.removeprefix("state/"): {"dtype": str(x.dtype), "shape": list(x.shape)}
                for name, x in self.inputs.items()
                if name.startswith("state/")
            },
            "vector": {"length": length, "dtype": str(dtype), "layout": self.layout},
        }


Prepare = Callable[[Batch], Batch]


def packed_inputs(cohort: Cohort) -> dict[str, Any]:
    """Return the only client of a cohort as inputs of its graph.

    Args:
      cohort: of one client, packed with lengths.
    """
    inputs: dict[str, Any] = {}
    for side in SIDES:
        examples: Examples = getattr(cohort, side)
        inputs |= {f"{side}/{name}": column[0] for name, column in examples.columns.items()}
        inputs[f"{side}_count"] = examples.count[0]
    for field in ROW_FIELDS:
        inputs |= {f"{field}/{name}": column[0] for name, column in getattr(cohort, field).items()}
    return inputs


def _under(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): jnp.asarray(x) for name, x in named.items() if name.startswith(prefix)}


def _scaled(values: Any, summand: Summand) -> Any:
    """Return what is added of a part: integers as they are, floats times the client's scale."""
    if jnp.issubdtype(values.dtype, jnp.integer):
        return values
    scale = broadcast_clients(summand.scale, values)
    return jnp.where(scale > 0, values, 0) * scale


def describe_split(needs: Needs, most: int, lengths: Lengths) -> dict[str, Any]:
    """Return a split as a device plan says it: how many examples go where, for every number of examples up to `most`.

    Args:
      needs: of the algorithm.
      most: how many examples of a person a device uses.
      lengths: room for support and query examples.
    """
    split, sizes = needs.split, np.arange(most + 1)
    counts, begins = (
        {side: values.tolist() for side, values in zip(SIDES, pair, strict=True)}
        for pair in (split.counts(sizes), split.begins(sizes))
    )
    pattern = None if split.pattern is None else split.pattern(np.arange(max(lengths))).tolist()
    return {"counts": counts, "begins": begins, "pattern": pattern, "by": split.by, "redrawn": split.redrawn}


def describe_rows(needs: Needs, like: Mapping[str, np.ndarray], lengths: Lengths) -> dict[str, Any]:
    """Return the groups of lookup tables as a device plan says them.

    Args:
      needs: of the algorithm.
      like: made-up examples, one array per feature.
      lengths: room for support and query examples.
    """
    examples = lengths.query + (lengths.support if needs.support_rows else 0)
    return {
        group: {
            "features": list(features),
            "table": rows,
            "capacity": row_capacity(examples * sum(like[feature][:1].size for feature in features), rows),
            "support": needs.support_rows,
        }
        for group, (rows, features) in needs.groups.items()
    }
