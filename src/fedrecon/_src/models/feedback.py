"""Implicit feedback: the ids in a client's support, whatever their labels, shift where reconstruction starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon._src.client.lookups.tables import prefixed
from fedrecon._src.core.factories import recorded
from fedrecon._src.core.model import AUTO, Batch, Model
from fedrecon._src.core.pytrees import Params, Which, flatten, matcher, unflatten
from fedrecon._src.models.starts import state_within_shared, within_shared


@recorded
def implicit_feedback(model: Model, num_ids: int, *, feature: str = "item", moves: Which = "*") -> Model:
    """Learn, for every id in a client's support, a shift of where its local parameters start.

    What people choose to rate says something about them, however they rate it. The global parameters become
    `{"shared": ..., "evidence": ...}`. Every leaf of `evidence` has one row per id, in the shape of a local parameter,
    and starts at zero. Reconstruction starts where it did before plus the sum of the support's rows, divided by the
    square root of one plus their number.

    In training, a client's upload then has rows of its support examples too, not only of its query examples.

    Args:
      model: one that has local parameters and takes no evidence yet.
      num_ids: ids are 0 to `num_ids - 1`.
      feature: the feature that holds one id per example.
      moves: which local parameters are shifted, as a pattern on their paths; all by default.

    References:
      Koren, Factorization Meets the Neighborhood, KDD 2008.
    """
    if model.evidence is not None:
        raise ValueError("the model already takes evidence from support")
    local = jax.eval_shape(model.init_local, jax.random.key(0))
    if not jax.tree.leaves(local):
        raise ValueError("the model has no local parameters, so there is nothing that evidence could shift")

    leaves, structure = flatten(local)
    matches = matcher(moves, "moves", leaves)
    moved = [path for path, leaf in leaves.items() if matches(path, leaf)]

    def init_global(key: Array) -> Params:
        zeros = {path: jnp.zeros((num_ids, *leaves[path].shape), leaves[path].dtype) for path in moved}
        whole = len(moved) == len(leaves)
        return {"shared": model.init_global(key), "evidence": unflatten(structure, zeros) if whole else zeros}

    def evidence(params: Params, support: Batch, mask: Array) -> Params:
        weight = mask / jnp.sqrt(1.0 + jnp.sum(mask))
        tables, _ = flatten(params["evidence"])
        start = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        start |= {path: jnp.tensordot(weight, table[support[feature]], 1) for path, table in tables.items()}
        return unflatten(structure, start)

    lookups: Any = prefixed("shared", model.lookups)
    if lookups != AUTO:
        lookups |= {f"evidence/{path}": feature for path in moved}
    return model._replace(
        init_global=init_global,
        predict=lambda params, local, batch: model.predict(params["shared"], local, batch),
        lookups=lookups,
        default_local=within_shared(model.default_local),
        evidence=evidence,
        fit=within_shared(model.fit),
        state=state_within_shared(model.state),
    )
