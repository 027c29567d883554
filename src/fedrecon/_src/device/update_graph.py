"""The client's part of a round as a graph for devices: what is drawn before it runs, and what it computes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrecon._src.algorithms.algorithm import Algorithm, Method, encode, with_params
from fedrecon._src.algorithms.rounds import as_clients, client_total, total_shapes
from fedrecon._src.algorithms.saving import digest
from fedrecon._src.algorithms.validation import decide_lookups
from fedrecon._src.core.checks import check_number, check_numbers, check_rules
from fedrecon._src.core.cohort import ABSENT, Cohort, Examples, Lengths, Needs, Packer, lengths_for, row_capacity
from fedrecon._src.core.factories import RecipeError, recipe_of
from fedrecon._src.core.keys import client_keys, round_key, run_keys, words_of
from fedrecon._src.core.model import Batch, shapes_of
from fedrecon._src.core.pytrees import Params, by_pattern, flatten, unflatten
from fedrecon._src.core.upload import DELTA, RowChanges, Summand, broadcast_clients
from fedrecon._src.device.export import column_types, draws, numbers, plain, promised, under
from fedrecon._src.device.inlining import ExportError
from fedrecon._src.device.onnx_graphs import OnnxGraph, to_onnx
from fedrecon._src.models.text.shared_weights import plain_layers
from fedrecon._src.privacy.accounting import check_delta, epsilon_of
from fedrecon._src.server.aggregator import Aggregator
from fedrecon_device.files import digest_of
from fedrecon_device.plan import MOST_REPORTS, PLAN_FORMAT, PLAN_VERSION, SIDES

RANDOM = (
    "the algorithm draws random numbers while it computes (dropout, or simulated noise), which a device cannot: train "
    "a model without dropout; with `ClientNoise`, set simulated=False"
)
Prepare = Callable[[Any], Batch]  # of numpy or JAX arrays
ROW_FIELDS = ("rows", "num_rows", "slots", "support_slots")


class DevicePlan(NamedTuple):
    """What devices agree to when they train, besides what follows from the algorithm.

    Attributes:
      rounds: how many rounds the training has at most.
      least: a sum has at least this many reports; with two servers 2 or more.
      helper: the public key of the second server, 64 hexadecimal digits; needed if the aggregator is
        `secure(protocol="two-servers")`.
      reports_per_day: how many reports a device sends per day at most.
      min_examples: a device with fewer examples does not take part.
      delta: of the guarantee, if devices add noise (`ClientNoise(..., simulated=False)` of `secure`).
      constant: patterns of the parameters that the server leaves as they are (`fr.optimizers.keep_constant`).
        Devices do not send what they would change in them.

    Example:
      >>> import fedrecon as fr
      >>> fr.device.DevicePlan(rounds=50, least=20).reports_per_day
      4
    """

    rounds: int = 100
    least: int = 10
    helper: str | None = None
    reports_per_day: int = 4
    min_examples: int = 2
    delta: float = 1e-6
    constant: tuple[str, ...] = ()

    def check(self, algorithm: Algorithm, *, onnx: bool = True) -> None:
        """Raise a `ValueError` if it does not fit the algorithm's sums, or if there are no graphs."""
        if not onnx:
            raise ValueError("`train` needs graphs (got onnx=False)")
        counts = {"rounds": self.rounds, "least": self.least, "min_examples": self.min_examples}
        check_numbers(counts, least=1)
        check_number("reports_per_day", self.reports_per_day, least=1, most=MOST_REPORTS)
        check_delta(self.delta)
        two_servers = _protocol(algorithm) != "open"
        if two_servers or self.helper is not None:
            missing = '`helper` needs an aggregator with two servers: secure(..., protocol="two-servers")'
            problem = f"`helper` must be the helper's public key, 64 hexadecimal digits (got {self.helper!r})"
            check_rules({missing: two_servers, problem: re.fullmatch("[0-9a-f]{64}", self.helper or "")})
            check_number("least", self.least, least=2)  # the sum of one report is the report


def _protocol(algorithm: Algorithm) -> str:
    ring = algorithm.aggregator.ring
    return "two-servers" if ring is not None and ring.protocol == "two-servers" else "open"


class UpdateGraph:
    """A client's part of a round (R, U and the aggregator's encoding) with flat, named inputs and outputs.

    Inputs are `message/PATH`, `key` (the two words of the client's key, as int32), the examples as
    `fedrecon_device.training.pack_examples` packs them, and `state/PATH`. Outputs are what a client adds to the sum: of
    tables, the ids and values of rows; then `new_state/PATH`. Nothing random is left to the graph but where local
    parameters start, which it draws from `key` as the simulator does.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        like: Mapping[str, np.ndarray],
        most: int,
        prepare: Prepare,
        constant: Sequence[str] = (),
    ):
        """Prepare to export.

        Args:
          algorithm: what is trained.
          like: made-up examples, one array per feature.
          most: how many examples of a person a device uses.
          prepare: turns columns as people have them into those of the model.
          constant: patterns of the parameters whose changes are not sent.
        """
        self._prepare = prepare
        self._constant = by_pattern(dict.fromkeys(constant, True), "constant", shapes_of(algorithm.model.init_global))
        prepared = {name: np.asarray(column) for name, column in prepare(like).items()}
        algorithm = self._algorithm = decide_lookups(algorithm, as_clients(prepared))
        self._needs = algorithm.method.needs._replace(columns=list(like))
        self._like, self._most = like, most
        self.lengths = lengths_for(most, self._needs)
        key, init_client = jax.random.key(0), algorithm.method.init_client or (lambda params, keys: ())
        state = jax.eval_shape(algorithm.init, key)
        message, self._structure = flatten(jax.eval_shape(algorithm.message, state))
        first = jax.eval_shape(lambda state: init_client(algorithm.params(state), jax.random.split(key, 1)), state)
        self._client_state, self._state = flatten(first)
        nobody = as_clients({name: np.asarray(column)[:0] for name, column in like.items()})
        packed = packed_inputs(Packer(nobody, self._needs, self.lengths).pack(np.array([ABSENT])))
        self.inputs = {
            **{f"message/{path}": leaf for path, leaf in message.items()},
            **{f"state/{path}": jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for path, x in self._client_state.items()},
            "key": jax.ShapeDtypeStruct((2,), jnp.int32),
            "round_key": jax.ShapeDtypeStruct((2,), jnp.uint32),
            **{name: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for name, x in packed.items()},
        }
        jax.eval_shape(self.run, self.inputs)  # which sets `outputs`, `layout`, `left_out` and `vector`

    def run(self, named: Mapping[str, Any]) -> list[Any]:
        """Run a round for one client, from named arrays."""
        message = unflatten(self._structure, under("message/", named))
        client_state = unflatten(self._state, {path: leaf[None] for path, leaf in under("state/", named).items()})
        cohort, key = self._cohort(named), jax.random.wrap_key_data(named["round_key"])
        with plain_layers():
            upload, client_state = self._started(named["key"]).client(message.method, client_state, cohort, key)
            summand = encode(self._algorithm, message, upload, key[None])
        outputs = self._laid_out(summand)
        outputs |= {f"new_state/{path}": leaf[0] for path, leaf in flatten(client_state)[0].items()}
        self.outputs = list(outputs)
        return list(outputs.values())

    def _started(self, key: Array) -> Method:
        """Return the method with local parameters that start as a client's key says, whatever keys it is given."""
        model = self._algorithm.model
        start = model.init_local(key.astype(jnp.uint32))
        return self._algorithm.define(model._replace(init_local=lambda key: start))

    def _cohort(self, named: Mapping[str, Any]) -> Cohort:
        """Return a cohort of one client."""

        def examples(side: str) -> Examples:
            columns = self._prepare(under(f"{side}/", named))
            return Examples({name: column[None] for name, column in columns.items()}, named[f"{side}_count"][None])

        client, identity = jnp.zeros(1, jnp.int32), jnp.zeros((1, 2), jnp.uint32)
        rows = [{name: x[None] for name, x in under(f"{field}/", named).items()} for field in ROW_FIELDS]
        return Cohort(client, identity, examples("support"), examples("query"), *rows)

    def _laid_out(self, summand: Summand) -> dict[str, Any]:
        """Return what a client adds, by name, and note where each array goes in its vector."""
        outputs: dict[str, Any] = {}
        self.layout: list[dict[str, Any]] = []
        self.left_out: list[tuple[int, int]] = []  # places in the whole vector that are not sent, and how many
        at = whole = 0
        changes: dict[str, Any] = {
            f"{part}/{path}": change
            for part, some in sorted(summand.parts.items())
            for path, change in sorted(some.items())
        }
        changes |= {f"scalar/{name}": x for name, x in sorted({**summand.scalars, **summand.flags}.items())}
        for name, change in changes.items():
            by_rows = isinstance(change, RowChanges)
            values = change.values if by_rows else change
            values = values if name.startswith("scalar/") else _scaled(values, summand)
            length = change.table * math.prod(values.shape[2:]) if by_rows else math.prod(values.shape[1:])
            whole += length
            if name.removeprefix(f"{DELTA}/") in self._constant:
                self.left_out.append((whole - length, length))
                continue
            outputs[name], entry = values[0], {"at": at, "values": name}
            if by_rows:
                outputs[f"{name}/ids"], outputs[f"{name}/count"] = change.ids[0], change.count[0]
                entry |= {"ids": f"{name}/ids", "count": f"{name}/count"}
            self.layout.append(entry)
            at += length
        dtypes = {np.dtype(outputs[entry["values"]].dtype) for entry in self.layout}
        if len(dtypes) != 1:
            raise ExportError(f"a device sends numbers of one type; the aggregator encodes {sorted(map(str, dtypes))}")
        self.vector = at, dtypes.pop()  # its length and type
        return outputs

    def graph(self) -> OnnxGraph:
        """Translate it to ONNX.

        Raises:
          ExportError: it draws random numbers besides the start, or an operation has no translation.
        """
        return to_onnx(self.run, self.inputs, self.outputs, refused={"round_key": RANDOM})

    def state_graph(self) -> OnnxGraph | None:
        """Translate where a client's state starts, from `global/PATH` and `key`; None if clients keep nothing."""
        if self._algorithm.method.init_client is None:
            return None
        params, structure = flatten(shapes_of(self._algorithm.model.init_global))
        inputs = {f"global/{path}": leaf for path, leaf in params.items()}
        inputs |= {name: self.inputs[name] for name in ("key", "round_key")}

        def first_state(named: Mapping[str, Any]) -> list[Any]:
            init_client: Any = self._started(named["key"]).init_client
            keys = jax.random.wrap_key_data(named["round_key"])[None]
            first = init_client(unflatten(structure, under("global/", named)), keys)
            return [leaf[0] for leaf in flatten(first)[0].values()]

        names = [f"state/{path}" for path in self._client_state]
        return to_onnx(first_state, inputs, names, refused={"round_key": RANDOM})

    def plan(self, terms: DevicePlan, graph: OnnxGraph, seed: int) -> dict[str, Any]:
        """Return the content of plan.json.

        Args:
          terms: what devices agree to.
          graph: this, translated.
          seed: from which clients draw where their state starts.
        """
        (length, dtype), algorithm = self.vector, self._algorithm
        read = {end["name"].partition("/")[2] for end in graph.inputs if end["name"].startswith(SIDES)}
        read |= {feature for _, features in self._needs.groups.values() for feature in features}
        read |= {self._needs.split.by}
        columns = {name: column for name, column in self._like.items() if name in read}
        ring = algorithm.aggregator.ring
        return {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "algorithm": digest(algorithm),
            "aggregator": _recipe(algorithm.aggregator),
            "graph": digest_of(graph.data),
            "rounds": terms.rounds,
            "examples": {**self.lengths._asdict(), "most": self._most, "columns": column_types(columns)},
            "split": describe_split(self._needs, self._most, self.lengths),
            "rows": describe_rows(self._needs, self._like, self.lengths),
            "inputs": {end["name"]: {"dtype": end["dtype"], "shape": end["shape"]} for end in graph.inputs},
            "state": column_types(self._client_state),
            "state_key": [0, seed],
            "vector": {"length": length, "dtype": str(dtype), "layout": self.layout, "left_out": self.left_out},
            "sum": {
                "protocol": _protocol(algorithm),
                "bits": 32 if ring is None else ring.bits,
                "helper": terms.helper,
                "least": terms.least,
            },
            "noise": self._noise(terms),
            "limits": {"reports_per_day": terms.reports_per_day, "min_examples": terms.min_examples},
        }

    def _noise(self, terms: DevicePlan) -> dict[str, Any] | None:
        """Return the noise that a device adds, and what is promised after all rounds; None without noise."""
        share_of = self._algorithm.aggregator.share
        if share_of is None:
            return None
        share = share_of(total_shapes(self._algorithm).parts)
        if terms.least < share.least:
            raise ValueError(f"`least` must be at least {share.least}, as the noise promises (got {terms.least})")
        epsilon = epsilon_of([share.release(1.0, terms.rounds)], terms.delta)  # no sampling is claimed
        return {"variance": share.variance, "least": share.least, "epsilon": epsilon, "delta": terms.delta}

    def vectors(self, params: Params, seed: int) -> dict[str, Any]:
        """Return test vectors of training: a message, and what the simulator makes of made-up people's examples.

        Of methods that keep something on a client there are two rounds.

        Args:
          params: the global parameters of the message, as the bundle has them.
          seed: of the rounds.
        """
        algorithm, init_client = self._algorithm, self._algorithm.method.init_client
        message = algorithm.message(with_params(algorithm.init(run_keys(seed).init), params))
        cases = []
        for number, (name, columns) in enumerate(draws(self._like, self._most).items()):
            columns = {feature: column[-self._most :] for feature, column in columns.items()}
            prepared = {feature: np.asarray(column) for feature, column in self._prepare(columns).items()}
            keys = client_keys(jax.random.key(seed), as_clients(prepared, name).identities())
            state, rounds = None if init_client is None else init_client(params, keys), []
            for key in [round_key(seed, number), round_key(seed, number + 1)][: 1 if state is None else 2]:
                result = client_total(algorithm, message, prepared, key, state, client=name, lengths=self.lengths)
                vector = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(result.total)])
                vector = np.delete(vector, [k for begin, size in self.left_out for k in range(begin, begin + size)])
                state = result.client_state
                stored = {path: promised(leaf[0]) for path, leaf in flatten(state)[0].items()}
                rounds.append({"key": words_of(key).tolist(), "vector": promised(vector), "state": stored})
            cases.append({"name": name, "examples": plain(columns), "rounds": rounds})
        leaves = {f"message/{path}": np.asarray(leaf) for path, leaf in flatten(message)[0].items()}
        tables = flatten(params)[0]
        return {"message": {name: _referred(name, leaf, tables) for name, leaf in leaves.items()}, "cases": cases}


def _recipe(aggregator: Aggregator) -> Any:
    """Return how the aggregator was made, so that a coordinator can make it again; None if that is not known."""
    with contextlib.suppress(RecipeError):
        return recipe_of(aggregator)
    return None


def _referred(name: str, leaf: np.ndarray, tables: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Write an array of a message: by the table of the bundle that it is, if there is one."""
    path = name.removeprefix("message/method/")
    if path in tables and np.array_equal(tables[path], leaf):
        return {"table": path}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "values": numbers(leaf)}


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
