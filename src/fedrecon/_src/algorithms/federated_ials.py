"""Federated implicit least squares: learn to rank from the items that people have, against all other items.

A client solves for its embedding z on its support by weighted least squares over all items: an item that it has should
score 1, and every item, with weight `unobserved`, should score 0. The cost of the latter is `z' G z` with the Gram
matrix G = V'V of the item embeddings V, so a client needs only its own rows of V and one small matrix. The gradient is
just as small: one of those rows, one of G. The server turns the gradient of G into one of all rows: V times the sum of
the matrix and its transpose.

References:
  Hu, Koren, Volinsky, Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008 (the loss, the Gram matrix).
  Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedrecon import kit
from fedrecon._src.client.least_squares import solve_positive
from fedrecon._src.core.checks import check_number

ITEMS, GRAM, LOCAL = "item_embedding", "gram", "user_embedding"


class _SideExamples(NamedTuple):
    """Support or query of one client: positions in its rows, and weights, zero where there is no example."""

    position: Array
    weight: Array


class _Cost(NamedTuple):
    """What a client minimises: squared errors of its items, and `unobserved` times the squared scores of all items."""

    unobserved: float
    ridge: float
    second_order: bool

    def embedding(self, rows: Array, gram: Array, side: _SideExamples) -> Array:
        """Solve for a client's embedding on one side of its examples."""
        side_rows = rows[side.position]
        matrix = side_rows.T @ (side.weight[:, None] * side_rows) + self.unobserved * gram
        return solve_positive(matrix + self.ridge * jnp.eye(len(gram)), side_rows.T @ side.weight)

    def on_query(self, rows: Array, gram: Array, support: _SideExamples, query: _SideExamples) -> tuple[Array, Array]:
        """Return half the cost on the query, and there the sums of squared errors and of errors."""
        user = self.embedding(rows, gram, support)
        user = user if self.second_order else jax.lax.stop_gradient(user)
        error, support_scores = rows[query.position] @ user - 1, rows[support.position] @ user
        squares = jnp.sum(query.weight * error**2)
        everything = user @ gram @ user - jnp.sum(jnp.where(support.weight > 0, support_scores, 0) ** 2)
        errors = jnp.where(query.weight > 0, error, 0)
        return (squares + self.unobserved * everything) / 2, jnp.stack([jnp.sum(errors**2), jnp.sum(errors)])

    def gradients(self, rows: Array, gram: Array, ways: list[tuple[_SideExamples, _SideExamples]]) -> _Gradients:
        """Return what a client sends, from each `(support, query)` of `ways`."""
        counts = jnp.stack([jnp.sum(side.weight > 0) for _, side in ways]).astype(jnp.float32)
        takes_part = jnp.any(ways[0][0].weight > 0) & jnp.any(ways[0][1].weight > 0)
        count = jnp.where(takes_part, counts.sum(), 0)

        def total(rows: Array, gram: Array) -> tuple[Array, Array]:
            costs, errors = zip(*(self.on_query(rows, gram, *way) for way in ways), strict=True)
            return jnp.where(takes_part, sum(costs) / jnp.maximum(count, 1), 0.0), sum(errors, jnp.zeros(2))

        (of_rows, of_gram), errors = jax.grad(total, (0, 1), has_aux=True)(rows, gram)
        sums = jnp.stack([jnp.stack([errors[0], count]), jnp.stack([errors[1] + count, count])])
        return _Gradients(of_rows, of_gram, count, jnp.where(takes_part, sums, 0))


class _Gradients(NamedTuple):
    """Gradients of a client by its rows and by the Gram matrix, its number of examples, and its sums of metrics."""

    rows: Array
    gram: Array
    examples: Array
    sums: Array


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

    Each client reconstructs on its support, `z = (X'X + unobserved G + ridge)^-1 X'1`. It sends the gradient of half
    the cost on its query, `sum (q'z - 1)^2 + unobserved z'Gz`, by rows and as one `(dim, dim)` matrix. Items of its
    support do not count in this cost. Both gradients are means over its query examples, so uploads weighted by examples
    give the mean over the cohort's examples, as `with_prior` expects.

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
    check_number("unobserved", unobserved, above=True)
    check_number("ridge", ridge, above=True)
    num_items = _check_model(model)
    cost = _Cost(unobserved, ridge, second_order)

    def side_of(examples: kit.Examples, position: Array) -> _SideExamples:
        real = jnp.arange(position.shape[1]) < examples.count[:, None]
        weights = model.loss(jnp.ones(position.shape), examples.columns)[1]
        return _SideExamples(position, jnp.where(real, weights, 0.0))

    def client_gradients(rows: Array, gram: Array, support: _SideExamples, query: _SideExamples) -> _Gradients:
        return cost.gradients(rows, gram, [(support, query), (query, support)][: 1 + both_ways])

    def define(model: kit.Model) -> kit.Method:
        by_rows = ITEMS in model.lookups

        def client(params: kit.Params, client_state: Any, cohort: kit.Cohort, key: Array) -> tuple[kit.Upload, Any]:
            del key
            if by_rows:
                rows, axis = params[ITEMS][cohort.rows["item"]], 0
                positions = cohort.support_slots["item"], cohort.slots["item"]
            else:
                rows, axis = params[ITEMS], None
                positions = cohort.support.columns["item"], cohort.query.columns["item"]
            sides = side_of(cohort.support, positions[0]), side_of(cohort.query, positions[1])
            gradients = jax.vmap(client_gradients, (axis, None, 0, 0))(rows, params[GRAM], *sides)
            change: Any = -gradients.rows
            if by_rows:
                change = kit.RowChanges(cohort.rows["item"], change, cohort.num_rows["item"], num_items)
            parts = {kit.DELTA: {GRAM: -gradients.gram, ITEMS: change}}
            return kit.Upload(parts, gradients.examples, gradients.sums), client_state

        def reconstruct(params: kit.Params, client_state: Any, support: kit.Examples, keys: Array) -> kit.Params:
            del client_state, keys
            sides = side_of(support, support.columns["item"])
            return {LOCAL: jax.vmap(cost.embedding, (None, None, 0))(params[ITEMS], params[GRAM], sides)}

        groups = {"item": (num_items, ("item",))} if by_rows else {}
        halves = kit.half()._replace(redrawn=True) if split is None else split
        return kit.Method(
            init=lambda key: _init_server(model, server, key),
            client=client,
            server=lambda state, mean, report: _step_server(server, state, mean[kit.DELTA]),
            reconstruct=reconstruct,
            needs=kit.Needs(halves, groups=groups, support_rows=True),
        )

    return kit.Algorithm(model, define, aggregate or kit.mean())


def _check_model(model: kit.Model) -> int:
    """Raise an error unless the model has the parameters of `models.ranking_factorization`; return how many items."""
    shared, local = (kit.flatten(kit.shapes_of(init))[0] for init in (model.init_global, model.init_local))
    if (set(shared), set(local)) != ({ITEMS, GRAM}, {LOCAL}):
        raise ValueError(
            f"federated_ials trains {ITEMS} and {GRAM} and reconstructs {LOCAL}, as models.ranking_factorization has "
            f"them; this model has {', '.join(shared)} and {', '.join(local) or 'nothing local'}"
        )
    return shared[ITEMS].shape[0]


def _init_server(model: kit.Model, server: optax.GradientTransformation, key: Array) -> kit.TrainState:
    params = model.init_global(key)
    return kit.TrainState(params, server.init({ITEMS: params[ITEMS]}))


def _step_server(server: optax.GradientTransformation, state: kit.TrainState, change: Any) -> kit.TrainState:
    """Turn the gradient of the Gram matrix into one of all rows, take a step, and compute the matrix anew."""
    items = state.params[ITEMS]
    whole = change[ITEMS] + items @ (change[GRAM] + change[GRAM].T)
    stepped = kit.step_server(server, kit.TrainState({ITEMS: items}, state.optimizer), {ITEMS: whole})
    new = stepped.params[ITEMS]
    return kit.TrainState({GRAM: new.T @ new, ITEMS: new}, stepped.optimizer)
