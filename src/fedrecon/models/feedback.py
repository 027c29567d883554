"""Implicit feedback: which ids a client's support has, whatever it says of them, moves where reconstruction starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrecon.lookups.tables import prefixed
from fedrecon.model import AUTO, Batch, Model
from fedrecon.models.starts import state_within_shared, within_shared
from fedrecon.trees import Params, path_name


def implicit_feedback(model: Model, num_ids: int, *, feature: str = "item") -> Model:
    """Let every id in a client's support add something learned to the start of its local parameters.

    What people choose to rate says something about them beside how they rate it. The global parameters become
    `{"shared": ..., "evidence": ...}`, with one row an id in every leaf of `evidence`, shaped as the local parameters
    are and zero at first; reconstruction starts from where it did plus the sum of the support's rows, divided by the
    square root of one more than their number.

    Where it is trained, a client's upload changes rows of its support examples too, not only of its query examples.

    Args:
      model: one that has local parameters and takes no evidence yet.
      num_ids: ids are 0 to `num_ids - 1`.
      feature: the feature that holds one id an example.

    References:
      Koren, Factorization Meets the Neighborhood, KDD 2008.
    """
    if model.evidence is not None:
        raise ValueError("the model takes evidence from support already")
    local = jax.eval_shape(model.init_local, jax.random.key(0))
    if not jax.tree.leaves(local):
        raise ValueError("the model has no local parameters, so there is nothing that evidence could move")

    def init_global(key: Array) -> Params:
        zeros = jax.tree.map(lambda leaf: jnp.zeros((num_ids, *leaf.shape), leaf.dtype), local)
        return {"shared": model.init_global(key), "evidence": zeros}

    def evidence(params: Params, support: Batch, mask: Array) -> Params:
        weight = mask / jnp.sqrt(1.0 + jnp.sum(mask))
        return jax.tree.map(
            lambda table: jnp.tensordot(weight, table[support[feature]], 1),
            params["evidence"],
            is_leaf=lambda x: hasattr(x, "shape"),
        )

    tables = jax.tree_util.tree_leaves_with_path(local)
    lookups: Any = prefixed("shared", model.lookups)
    if lookups != AUTO:
        lookups |= {f"evidence/{path_name(path)}": feature for path, _ in tables}
    return model._replace(
        init_global=init_global,
        predict=lambda params, local, batch: model.predict(params["shared"], local, batch),
        lookups=lookups,
        default_local=within_shared(model.default_local),
        evidence=evidence,
        fit=within_shared(model.fit),
        state=state_within_shared(model.state),
    )
