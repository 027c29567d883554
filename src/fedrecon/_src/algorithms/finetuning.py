"""Finetuning: after training, a client adapts its own copy of global parameters."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax import Array

from fedrecon._src.algorithms.algorithm import Algorithm, Method, averaged_paths
from fedrecon._src.client.lookup_tables import lookup_groups
from fedrecon._src.client.objectives import Objective, Problem, Solver
from fedrecon._src.core.checks import check_selection
from fedrecon._src.core.cohort import Examples
from fedrecon._src.core.factories import register_factory
from fedrecon._src.core.model import Batch, Model, shapes_of
from fedrecon._src.core.pytrees import Params, Which, copy_params, flatten, select_paths, unflatten


@register_factory
def with_finetuning(algorithm: Algorithm, finetune: Solver, *, which: Which = "*") -> Algorithm:
    """Finetune global parameters on a client's support, after its local parameters are reconstructed.

    Training and uploads do not change, only serving and evaluation do: `reconstruct` now returns
    `{"local": ..., "finetuned": {path: ...}}`, with the client's own version of some global parameters, and the model
    predicts with these. For a model without local parameters this is plain finetuning. With Federated Reconstruction,
    the local parameters are fixed while global ones are finetuned on the same support.

    Running statistics and other state are fixed too, and used as in serving.

    Every client has its own copy of what is finetuned. If that is all of a large model, run few clients side by side,
    as `layout(model=...)` does.

    Args:
      algorithm: what was trained, and how its local parameters are reconstructed.
      finetune: how a client finetunes, on the same support.
      which: the global parameters to finetune, as for `partition`: a pattern such as `"oov_embedding"`, several, or a
        predicate.

    Returns:
      An `Algorithm` for `evaluate`, `reconstruct` and `predict`; its `model` is the one that predicts.

    Example:
      >>> import fedrecon as fr
      >>> import optax
      >>> descend = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
      >>> model = fr.models.matrix_factorization(num_items=10, biases=True)
      >>> trained = fr.federated_reconstruction(model, reconstruct=descend, update=descend, server=optax.sgd(1.0))
      >>> finetuned = fr.with_finetuning(trained, descend, which="item_bias")  # for `fr.evaluate`
    """
    model = algorithm.model
    shapes = flatten(shapes_of(model.init_global))[0]
    paths = [path for path in select_paths(which, "which", shapes) if path not in averaged_paths(model)]
    check_selection("which", which, paths, shapes)

    def predict(params: Params, finetuned: dict[str, Any], local: Params, batch: Batch) -> Any:
        leaves, structure = flatten(params)
        return model.predict(unflatten(structure, {**leaves, **finetuned}), local, batch)

    def init_local(key: Array) -> Params:
        leaves = flatten(model.init_global(key))[0]
        return {"local": model.init_local(key), "finetuned": {path: leaves[path] for path in paths}}

    def objective(params: Params) -> Objective:
        return Objective(model, functools.partial(predict, params))

    def reconstruct(params: Params, client_state: Any, support: Examples, keys: Array) -> Params:
        local = algorithm.method.reconstruct(params, client_state, support, keys)
        leaves = flatten(params)[0]
        start = copy_params({path: leaves[path] for path in paths}, keys)
        solution = finetune.solve(Problem(objective(params), start, local, support, measured=False))
        return {"local": local, "finetuned": solution.params}

    def check(params: Params, local: Params, batch: Batch, mask: Array) -> None:
        algorithm.method.check(params, local["local"], batch, mask)
        finetune.check(objective(params), local["finetuned"], local["local"], batch, mask)

    def define(serving: Model) -> Method:
        method = algorithm.method
        if serving.init_local is not init_local:  # a start that was drawn elsewhere is that of training, too
            method = algorithm.define(model._replace(init_local=lambda key: serving.init_local(key)["local"]))
        limits = (method.support_limit, finetune.limit)
        limit = None if None in limits else max(limit or 0 for limit in limits)
        return method._replace(reconstruct=reconstruct, check=check, support_limit=limit)

    # Ids are renumbered for all tables that they index, and a client's own tables are whole.
    own_features = {feature for path in paths for feature in lookup_groups(model).get(path, ())}
    serving_model = model._replace(
        init_local=init_local,
        predict=lambda params, local, batch: predict(params, local["finetuned"], local["local"], batch),
        default_local=None,
        evidence=None,
        predict_train=None,
        state=None,
        lookups={path: ids for path, ids in lookup_groups(model).items() if not own_features & set(ids)},
    )
    return dataclasses.replace(algorithm, model=serving_model, define=define)
