"""Federated implicit least squares: learn to rank from the items that people have, against all other items.

A client solves for its embedding z on its support by weighted least squares over all items: an item that it has should
score 1, and every item, with weight `unobserved`, should score 0. The cost of the latter is `z' G z` with the Gram
matrix G = V'V of the item embeddings V, so a client needs only its own rows of V and one small matrix. The gradient is
just as small: one of those rows, one of G. The server turns the gradient of G into one of all rows: V times the sum of
the matrix and its transpose.

An item has two embeddings: v, by which it is scored, and v + t, which says what having it tells about a person. With
one for both, an item that many people have for different reasons is either never recommended or tells too much.

References:
  Hu, Koren, Volinsky, Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008 (the loss, the Gram matrix).
  Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit
from fedrecon._src.client.closed_form import invert_positive
from fedrecon._src.core.checks import check_numbers

T = TypeVar("T")

ITEMS, HISTORY, GRAM, LOCAL = "item_embedding", "history_offset", "gram", "user_embedding"
TABLES = (ITEMS, HISTORY)
INVERSE = "inverse"  # of the system of a client without examples: the server computes it once a round, for all
POPULARITY, POPULARITY_WEIGHT = "item_popularity", "popularity_weight"
BLEND_AFTER = (0, 1, 2, 5, 10, 20)  # examples of a client, from which on popularity has another weight
LENGTHS = (16, 64)  # room for the examples of a side, of clients in a block that all have fewer than most others


class _Side(NamedTuple):
    """Support or query of one client: rows of the two tables for its items, and weights, zero where there is none."""

    rows: Array
    offsets: Array
    weight: Array


class _Everything(NamedTuple):
    """What stands for all items: their Gram matrix, and `_Cost.inverse` of it."""

    gram: Array
    inverse: Array


class _Cost(NamedTuple):
    """What a client minimises: squared errors of its items, and `unobserved` times the squared scores of all items."""

    unobserved: float
    ridge: float
    second_order: bool

    def everything(self, gram: Array) -> _Everything:
        """Return the Gram matrix with the inverse of the system of a client without examples, which all share."""
        return _Everything(gram, invert_positive(self.unobserved * gram + self.ridge * jnp.eye(len(gram))))

    def embedding(self, items: _Everything, side: _Side) -> Array:
        """Solve for a client's embedding on one side of its examples.

        With fewer examples than dimensions, the shared inverse is corrected for them (Woodbury's identity), so the
        client solves a system with one equation for each example.
        """
        rows = jnp.sqrt(side.weight)[:, None] * side.rows
        solve = _correct_inverse(*jax.lax.stop_gradient((rows, items)), self)

        def apply(x: Array) -> Array:
            return rows.T @ (rows @ x) + self.unobserved * (items.gram @ x) + self.ridge * x

        def refine(_: Any, right: Array) -> Array:
            first = solve(right)
            return first + solve(right - apply(first))

        return jax.lax.custom_linear_solve(apply, (side.rows + side.offsets).T @ side.weight, refine, symmetric=True)

    def on_query(self, items: _Everything, support: _Side, query: _Side) -> tuple[Array, Array]:
        """Return half the cost on the query, and there the sums of squared errors and of errors."""
        user = self.embedding(items, support)
        user = user if self.second_order else jax.lax.stop_gradient(user)
        error, support_scores = query.rows @ user - 1, support.rows @ user
        squares = jnp.sum(query.weight * error**2)
        everything = user @ items.gram @ user - jnp.sum(jnp.where(support.weight > 0, support_scores, 0) ** 2)
        errors = jnp.where(query.weight > 0, error, 0)
        return (squares + self.unobserved * everything) / 2, jnp.stack([jnp.sum(errors**2), jnp.sum(errors)])

    def gradients(
        self, items: _Everything, sides: tuple[_Side, _Side], both_ways: bool
    ) -> tuple[tuple[Array, tuple[_Side, _Side]], Array, Array]:
        """Return a client's gradients by the Gram matrix and its sides, its number of examples and its sums of metrics.

        They are from support to query, and back if `both_ways`.
        """
        counts = jnp.stack([jnp.sum(side.weight > 0) for side in sides]).astype(jnp.float32)
        takes_part = jnp.all(counts > 0)
        count = jnp.where(takes_part, counts.sum() if both_ways else counts[1], 0)

        def total(gram: Array, sides: tuple[_Side, _Side]) -> tuple[Array, Array]:
            ways = [sides, sides[::-1]][: 1 + both_ways]
            costs, errors = zip(*(self.on_query(items._replace(gram=gram), *way) for way in ways), strict=True)
            return jnp.where(takes_part, sum(costs) / jnp.maximum(count, 1), 0.0), sum(errors, jnp.zeros(2))

        gradients, errors = jax.grad(total, (0, 1), has_aux=True)(items.gram, sides)
        sums = jnp.stack([jnp.stack([errors[0], count]), jnp.stack([errors[1] + count, count])])
        return gradients, count, jnp.where(takes_part, sums, 0)


def _correct_inverse(rows: Array, items: _Everything, cost: _Cost) -> Callable[[Array], Array]:
    """Return how to solve with the matrix of a client, `rows' rows + unobserved gram + ridge`."""
    if len(rows) < len(items.gram):
        correction = rows @ items.inverse
        small = invert_positive(jnp.eye(len(rows)) + correction @ rows.T)
        return lambda right: items.inverse @ right - correction.T @ (small @ (correction @ right))
    shared = cost.unobserved * items.gram + cost.ridge * jnp.eye(len(items.gram))
    whole = invert_positive(rows.T @ rows + shared)
    return lambda right: whole @ right


@kit.register_factory
def federated_ials(
    model: kit.Model,
    *,
    unobserved: float,
    ridge: float,
    server: optax.GradientTransformation,
    split: Any = None,
    second_order: bool = True,
    both_ways: bool = True,
    aggregate: kit.Aggregator | None = None,
) -> kit.Algorithm:
    """Train item embeddings so that a client's hidden items score high once it has reconstructed its own embedding.

    Each client reconstructs on its support, `z = (X'X + unobserved G + ridge)^-1 (X + T)'1`, with the rows X and T of
    the tables `item_embedding` and `history_offset` for its items. It sends the gradient of half the cost on its query,
    `sum (q'z - 1)^2 + unobserved z'Gz`, by rows and as one `(dim, dim)` matrix. Items of its support do not count in
    this cost. Both gradients are means over its query examples, so uploads weighted by examples give the mean over the
    cohort's examples, as `with_prior` expects.

    Args:
      model: as `models.ranking_factorization` makes it, with an embedding of items, their Gram matrix, and an embedding
        of the user.
      unobserved: the weight of an item that a client does not have; one that it has weighs 1.
      ridge: on the client's embedding, above 0.
      server: the optimizer that takes the mean gradient of the item embeddings.
      split: S; halves redrawn in every round by default.
      second_order: differentiate through the reconstruction, so that embeddings of support items are trained too.
      both_ways: run every client twice, the second time with support and query exchanged.
      aggregate: weights, clipping; `aggregators.mean()` by default.

    Returns:
      An `Algorithm`.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> model = fr.models.ranking_factorization(num_items=1000, dim=32)
      >>> algorithm = fr.federated_ials(model, unobserved=0.1, ridge=1.0, server=optax.adam(0.05))
      >>> algorithm.has_local()
      True
    """
    check_numbers({"unobserved": unobserved, "ridge": ridge}, above=True)
    num_items = _check_model(model)
    cost = _Cost(unobserved, ridge, second_order)

    def define(model: kit.Model) -> kit.Method:
        by_rows = ITEMS in model.lookups

        def client(params: kit.Params, client_state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            items, sides = _Everything(params[GRAM], params[INVERSE]), (cohort.support, cohort.query)
            slots, rows = [side.columns["item"] for side in sides], num_items
            if by_rows:
                slots, rows = [cohort.support_slots["item"], cohort.slots["item"]], cohort.rows["item"].shape[1]

            def run(length: int) -> kit.Upload:
                support, query = (_side_of(model, params, side, length) for side in sides)
                of_clients = jax.vmap(partial(cost.gradients, both_ways=both_ways), (None, 0))
                gradients, examples, sums = of_clients(items, (support, query))
                positions = jnp.concatenate([slot[:, :length] for slot in slots], 1)
                return kit.Upload({kit.DELTA: _changes(*gradients, positions, rows)}, examples, sums)

            upload = _run_shortest(run, sides)
            if by_rows:
                delta = upload.parts[kit.DELTA]
                ids, count = cohort.rows["item"], cohort.num_rows["item"]
                delta |= {name: kit.RowChanges(ids, delta[name], count, num_items) for name in TABLES}
            return upload, client_state

        def reconstruct(params: kit.Params, client_state: Any, support: kit.Examples, keys: Array) -> kit.Params:
            embed = partial(jax.vmap(cost.embedding, (None, 0)), cost.everything(params[GRAM]))

            def run(length: int) -> Array:
                return embed(_side_of(model, params, support, length))

            after = jnp.sum(support.count[:, None] >= jnp.array(BLEND_AFTER), 1) - 1
            return {LOCAL: _run_shortest(run, [support]), POPULARITY_WEIGHT: params[POPULARITY_WEIGHT][after]}

        groups = {"item": (num_items, ("item",))} if by_rows else {}
        return kit.Method(
            init=lambda key: _init_server(model, server, key),
            client=client,
            server=lambda state, mean, report: _step_server(server, state, mean[kit.DELTA]),
            reconstruct=reconstruct,
            needs=kit.Needs(split or kit.half()._replace(redrawn=True), groups=groups, support_rows=True),
            message=lambda state: {**state.params, INVERSE: cost.everything(state.params[GRAM]).inverse},
            parts=lambda state: {kit.DELTA: {name: state.params[name] for name in sorted((GRAM, *TABLES))}},
        )

    return kit.Algorithm(model, define, aggregate or kit.mean())


def _run_shortest(run: Callable[[int], T], sides: Sequence[kit.Examples]) -> T:
    """Run a block of clients with no more room for examples than they need: most clients have far fewer than some."""
    full = max(side.columns["item"].shape[1] for side in sides)
    if len(sides[0].count) == 1:  # a device, which has room as it needs
        return run(full)
    lengths = [*(length for length in LENGTHS if length < full), full]
    most = jnp.max(jnp.stack([jnp.max(side.count) for side in sides]))
    return jax.lax.switch(jnp.searchsorted(jnp.array(lengths), most), [partial(run, length) for length in lengths])


def _side_of(model: kit.Model, params: kit.Params, examples: kit.Examples, length: int) -> _Side:
    """Return one side of the clients of a block, with room for so many examples each."""
    columns = {name: column[:, :length] for name, column in examples.columns.items()}
    item = columns["item"]
    real = jnp.arange(item.shape[1]) < examples.count[:, None]
    weights = jnp.where(real, model.loss(jnp.ones(item.shape), columns)[1], 0.0)
    return _Side(params[ITEMS][item], params[HISTORY][item], weights)


def _changes(of_gram: Array, of_sides: tuple[_Side, _Side], positions: Array, rows: int) -> dict[str, Any]:
    """Return what clients send: the gradients by the Gram matrix, and by rows at the positions of their examples."""
    clients = len(positions)
    flat = (positions + rows * jnp.arange(clients)[:, None]).reshape(-1)

    def place(parts: Sequence[Array]) -> Array:
        values = jnp.concatenate([-part for part in parts], 1)  # (clients, examples, dim)
        placed = jnp.zeros((clients * rows, values.shape[2])).at[flat].add(values.reshape(len(flat), -1))
        return placed.reshape(clients, rows, -1)

    of_items, of_history, _ = zip(*of_sides, strict=True)
    return {GRAM: -of_gram, ITEMS: place(of_items), HISTORY: place(of_history)}


def _check_model(model: kit.Model) -> int:
    """Raise an error unless the model has the parameters of `models.ranking_factorization`; return how many items."""
    shared, local = (kit.flatten(kit.shapes_of(init))[0] for init in (model.init_global, model.init_local))
    if not {*TABLES, GRAM, POPULARITY, POPULARITY_WEIGHT} == set(shared) or LOCAL not in local:
        raise ValueError(
            f"federated_ials trains {ITEMS} and {GRAM} and reconstructs {LOCAL}, as models.ranking_factorization has "
            f"them; this model has {', '.join(shared)} and {', '.join(local) or 'nothing local'}"
        )
    return shared[ITEMS].shape[0]


def _init_server(model: kit.Model, server: optax.GradientTransformation, key: Array) -> kit.TrainState:
    params = model.init_global(key)
    return kit.TrainState(params, server.init({name: params[name] for name in TABLES}))


def _step_server(server: optax.GradientTransformation, state: kit.TrainState, change: Any) -> kit.TrainState:
    """Turn the gradient of the Gram matrix into one of all rows, take a step, and compute the matrix anew."""
    tables = {name: state.params[name] for name in TABLES}
    whole = change[ITEMS] + tables[ITEMS] @ (change[GRAM] + change[GRAM].T)
    changes = {ITEMS: whole, HISTORY: change[HISTORY]}
    stepped = kit.step_server(server, kit.TrainState(tables, state.optimizer), changes)
    new = stepped.params[ITEMS]
    return kit.TrainState({**state.params, **stepped.params, GRAM: new.T @ new}, stepped.optimizer)
