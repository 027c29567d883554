"""Small trained-looking models for the tests of bundles, and what JAX makes of a person's examples."""

import dataclasses
import functools

import jax
import numpy as np
import optax

import fedrecon as fr
from fedrecon._src.data.sentences import PAIR_ROWS
from fedrecon._src.device.export import made_up_ratings
from fedrecon._src.recommend.config import DEFAULT, ClicksConfig, Scale
from fedrecon._src.recommend.saved_models import SavedModel
from fedrecon._src.recommend.settings import Ranking
from fedrecon._src.recommend.tasks import RATINGS, Items
from fedrecon.device import Legend, bundle
from fedrecon.models import ranking_params

ITEMS, MOST = 200, 12
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
}
DESCENT = {"learning_rate": 0.1, "batch_size": 5, "epochs": 3, "steps": 8}


def factorization(*, biases=True, default=False, feedback=False):
    model = fr.models.matrix_factorization(ITEMS, 6, biases=biases)
    model = fr.models.learned_default(model) if default else model
    return fr.models.implicit_feedback(model, ITEMS) if feedback else model


def solver_of(name):
    if name == "least-squares":
        return fr.least_squares(1.5), {"solver": name, "ridge": 1.5}
    descent = fr.gradient_descent(OPTIMIZERS[name](), batch_size=5, epochs=3, steps=8)
    return descent, {"solver": "gradient-descent", "optimizer": name, **DESCENT}


def algorithm_of(model, reconstruct):
    update = fr.gradient_descent(optax.sgd(0.1), batch_size=5)
    return fr.federated_reconstruction(model, reconstruct=reconstruct, update=update, server=optax.sgd(1.0))


def trained(model, seed=0):
    """Parameters as large as trained ones, drawn from a seed."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init_global, jax.random.key(0))
    return jax.tree.map(lambda leaf: draw.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)


def roles_of(params):
    from fedrecon._src.core.pytrees import flatten

    return {"/".join(part for part in path.split("/") if part != "shared"): path for path in flatten(params)[0]}


def ratings_bundle(out, model, name, *, quantise=None, params=None, page=None, **more):
    """Bundle a ratings model with a solver; return its algorithm and parameters too."""
    solver, settings = solver_of(name)
    algorithm, params = algorithm_of(model, solver), trained(model) if params is None else params
    items = {
        "ids": list(range(100, 100 + ITEMS)),
        "labels": [f"film {k}" for k in range(ITEMS)],
        "counts": list(range(ITEMS)),
    }
    bundle(
        algorithm,
        params,
        out,
        like=made_up_ratings(ITEMS, (1, 5), MOST),
        most=MOST,
        quantise=quantise,
        legend=Legend("ratings", {"items.json.zlib": items}, (1.0, 5.0), 3, roles_of(params))._replace(
            queries={"item": np.arange(7, dtype=np.int32)}, settings=settings, page=page
        ),
        replace=True,
        **more,
    )
    return algorithm, params


def newest(columns, most=MOST):
    return {name: np.asarray(column)[-most:] for name, column in columns.items()}


WORDS = [
    *[
        "the",
        "a",
        "i",
        "you",
        "we",
        "my",
        "it",
        "is",
        "so",
        "at",
        "to",
        "in",
        "and",
        "on",
        "of",
        "met",
        "told",
        "ate",
        "was",
        "with",
    ],
    ".",
    "!",
    "station",
    "house",
]


def text_algorithm(most_steps=6, local="oov_embedding", head=0):
    sizes = {"embedding": 6, "hidden": 8, "projection": 7}
    if local == "output_bias":
        model = fr.models.next_word(len(WORDS), 5, local=local, pair_rows=PAIR_ROWS, head=head, **sizes)
        return algorithm_of(model, fr.closed_form(batch_size=4)), {"solver": "closed-form", "batch_size": 4}
    model = fr.models.next_word(len(WORDS), 5, **sizes)
    solver = fr.gradient_descent(optax.sgd(1.0), batch_size=4, steps=most_steps)
    return algorithm_of(model, solver), {
        "solver": "gradient-descent",
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "batch_size": 4,
        "epochs": 1,
        "steps": most_steps,
    }


def text_bundle(out, *, max_words=7, most=10, vendor=None, page=True, local="oov_embedding"):
    """Bundle a small model of text; return its algorithm, parameters and vocabulary."""
    from fedrecon._src.data.sentences import prompt_columns
    from fedrecon._src.device.web_page import page_files
    from fedrecon.data import Vocabulary, personal_text

    algorithm, settings = text_algorithm(local=local)
    params, vocabulary = trained(algorithm.model), Vocabulary(tuple(WORDS), 5)
    params["output"]["bias"][-5:] += 2  # buckets are likely, so that a person's own words are among the first
    like = personal_text("the xylophone is in my house\nwe ate quinoa\nit was so !", vocabulary, max_words).columns
    bundle(
        algorithm,
        params,
        out,
        like=like,
        most=most,
        legend=Legend("text", {"words.json.zlib": {"words": WORDS, "buckets": 5, "max_words": max_words}})._replace(
            queries=prompt_columns("we met", vocabulary, max_words)[0],
            settings=settings,
            page=functools.partial(page_files, vendor=vendor) if page else None,
        ),
        replace=True,
    )
    return algorithm, params, vocabulary


NUMBER = 400  # items of a model of the default settings: enough that tables of one are worth quantising


def default_model(transform="none", low=1.0, high=4.1):
    """Return a saved model of the default settings, as if trained; each title is there twice."""
    scale = Scale(
        transform=transform,
        mean=3.2,
        deviation=0.8,
        low=low,
        high=high,
        standardized=True,
        noise=0.6,
        user_ridge=3.0,
        trait_ridges=(20.0, 35.0),
    )
    titles = np.array([f"film {k // 2}" for k in range(NUMBER)])
    return of_defaults(scale, Items(np.arange(1000, 1000 + NUMBER), titles, np.arange(NUMBER) % 40, (1.0, 5.0)))


def counts_model():
    """Return a saved model of how often people listened to artists."""
    scale = Scale(
        transform="log1p",
        mean=4.0,
        deviation=1.5,
        low=0.0,
        high=9.2,
        standardized=True,
        noise=0.6,
        user_ridge=3.0,
        trait_ridges=(20.0, 35.0),
    )
    names = np.array([f"artist {k}" for k in range(60)])
    return of_defaults(scale, Items(np.arange(60), names, np.arange(60) % 40, (0.0, 9896.0)))


def clicks_model(counts="ignore", dim=4):
    """Return a saved model of what people have; `counts` as in the settings."""
    titles = np.array([f"record {k}" for k in range(NUMBER)])
    items = Items(np.arange(1000, 1000 + NUMBER), titles, np.arange(NUMBER) % 40)
    settings = Ranking(dim=dim, counts=counts, least_ratings=5)
    config = dataclasses.replace(ClicksConfig(), model=settings)
    table = np.random.default_rng(0).normal(0, 0.4, (NUMBER, dim)).astype(np.float32)
    params = ranking_params(table, items.counts)
    params["history_offset"] = table[::-1] / 4
    params["popularity_weight"] = np.float32([1, 0.1, 0.1, 0.03, 0, 0])
    return SavedModel(config, params, items)


def of_defaults(scale, items):
    config = dataclasses.replace(DEFAULT, model=dataclasses.replace(DEFAULT.model, dim=3, scale=scale))
    return SavedModel(config, trained(RATINGS.build_model(config, items)), items)
