"""A model whose local parameters are rows of global tables: for central training, or for averaging everything."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from fedrecon._src.client.lookups.tables import prefixed
from fedrecon._src.core.factories import recorded
from fedrecon._src.core.model import AUTO, Batch, Model, Step, predict_in
from fedrecon._src.core.pytrees import Params, path_name


@recorded
def client_table(model: Model, num_clients: int, *, feature: str = "client") -> Model:
    """Make every client's local parameters rows of global tables.

    The global parameters become `{"shared": ..., "locals": ...}`, with the clients first in every leaf of `locals`; a
    batch has each example's client in `feature`. Nothing is local any more, so the model can be trained centrally, on
    all data in one place, or by federated averaging of everything.

    Args:
      model: a partially local model.
      num_clients: rows of the tables.
      feature: the feature with the row of each example's client.
    """

    def init_global(key: Array) -> Params:
        shared_key, local_key = jax.random.split(key)
        locals_ = jax.vmap(model.init_local)(jax.random.split(local_key, num_clients))
        return {"shared": model.init_global(shared_key), "locals": locals_}

    if model.state is not None:
        raise ValueError(
            "`client_table` predicts one example at a time, which a model with batch statistics cannot; "
            "make the model with state='frozen'"
        )

    def each(params: Params, batch: Batch, step: Step | None) -> Any:
        theirs = jax.tree.map(lambda table: table[batch[feature]], params["locals"], is_leaf=_is_table)
        columns = {name: batch[name] for name in batch if name != feature}

        def one(local: Params, example: Batch, step: Step | None) -> Any:
            alone = {name: value[None] for name, value in example.items()}
            step = None if step is None else step._replace(mask=step.mask[None])
            return jax.tree.map(lambda x: x[0], predict_in(model, params["shared"], local, alone, step))

        if step is not None and step.key is not None:
            step = step._replace(key=jax.random.split(step.key, step.mask.shape[0]))
        return jax.vmap(one)(theirs, columns, step)

    tables = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init_local, jax.random.key(0)))
    lookups: Any = prefixed("shared", model.lookups)
    if lookups != AUTO:
        lookups |= {f"locals/{path_name(path)}": feature for path, _ in tables}
    return model._replace(
        init_global=init_global,
        init_local=lambda key: {},
        predict=lambda params, local, batch: each(params, batch, None),
        lookups=lookups,
        fit=None if model.fit is None else lambda params, local, batch, step: each(params, batch, step),
    )


def _is_table(x: Any) -> bool:
    return hasattr(x, "shape")
