"""A model whose local parameters are all in one global table: for training in one place, or averaging everything."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from fedrecon.model import Batch, Model, Params, path_name


def client_table(model: Model, num_clients: int, *, feature: str = "client") -> Model:
    """Make every client's local parameters rows of global tables.

    The global parameters become `{"shared": ..., "locals": ...}`, with the clients first in every leaf of `locals`; a
    batch names each example's client in `feature`. There is nothing local left, so that the model can be trained where
    all data is in one place, or by federated averaging of everything.

    Args:
      model: a partially local model.
      num_clients: rows of the tables.
      feature: the feature with the row of each example's client.
    """

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        locals_ = jax.vmap(model.init_local)(jax.random.split(local_key, num_clients))
        return {"shared": model.init_global(shared_key), "locals": locals_}

    def predict(params: Params, local: Params, batch: Batch) -> Any:
        del local
        theirs = jax.tree.map(lambda table: table[batch[feature]], params["locals"], is_leaf=_is_table)

        def one(local: Params, example: Batch) -> Any:
            alone = {name: value[None] for name, value in example.items()}
            return jax.tree.map(lambda x: x[0], model.predict(params["shared"], local, alone))

        return jax.vmap(one)(theirs, {name: batch[name] for name in batch if name != feature})

    tables = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init_local, jax.random.key(0)))
    lookups: dict[str, Any] = {f"shared/{path}": features for path, features in model.lookups.items()}
    return model._replace(
        init_global=init_global,
        init_local=lambda key: {},
        predict=predict,
        lookups=lookups | {f"locals/{path_name(path)}": feature for path, _ in tables},
    )


def _is_table(x: Any) -> bool:
    return hasattr(x, "shape")
