"""Baselines of ratings that see all training users at once, tuned on the validation users, beside `fedrecon train`.

python benchmarks/central_baselines.py ratings.csv other.csv
python benchmarks/central_baselines.py ratings.csv --divisions 0 1 2 --without-model

All of them know the same half of a test user's ratings and predict the other: damped biases of items and users, biases
and singular vectors of what they leave over, and alternating least squares. A newcomer's part is a ridge regression.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fedrecon as fr
from fedrecon._src.app.experiment import run_experiment
from fedrecon._src.core.display import silent
from fedrecon._src.recommend.config import DEFAULT
from fedrecon._src.recommend.tasks import Users, task_of
from fedrecon._src.storage.run_folder import RunFolder

DAMPING = (0.3, 1, 3, 10, 30)
RANKS = (1, 2, 4, 8, 16)
RIDGES = (0.1, 0.3, 1, 3, 10, 30, 100)
ALS_RANKS, ALS_RIDGES, ALS_PASSES = (2, 8, 16), (1, 4, 16, 64), 12


class Table(NamedTuple):
    """Ratings one after another, those of a user together; `known` marks the half that a newcomer is known by."""

    owner: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, clients: fr.Clients) -> Table:
        rows = np.concatenate([np.arange(0), *map(np.arange, clients.starts, clients.ends)]).astype(int)
        size = clients.sizes
        place = np.arange(len(rows)) - np.repeat(np.cumsum(size) - size, size)
        known = place < np.repeat(fr.split.half().counts(size)[0], size)
        columns = clients.columns
        owner = np.repeat(np.arange(len(size)), size)
        return cls(owner, np.asarray(columns["item"])[rows], np.asarray(columns["rating"], float)[rows], known)

    @property
    def users(self) -> int:
        return int(self.owner.max(initial=-1)) + 1


class Fit(NamedTuple):
    """An item model: mean, biases, factors `(items, rank)`, and the ridges on a newcomer's factors and bias."""

    mean: float
    bias: np.ndarray
    factors: np.ndarray
    ridge: float
    user_ridge: float


def sums(index: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """Add up rows of `values` by index, a column at a time."""
    flat = values.reshape(len(values), -1)
    columns = [np.bincount(index, flat[:, c], length) for c in range(flat.shape[1])]
    return np.stack(columns, 1).reshape(length, *values.shape[1:])


def solve(index: np.ndarray, x: np.ndarray, y: np.ndarray, length: int, ridge: np.ndarray) -> np.ndarray:
    """Return the ridge regression of `y` on rows `x`, for every index: (length, columns)."""
    d = x.shape[1]
    gram, moment = np.zeros((length, d, d)), sums(index, x * y[:, None], length)
    for a in range(d):
        for b in range(a, d):
            gram[:, a, b] = gram[:, b, a] = np.bincount(index, x[:, a] * x[:, b], length)
    return np.linalg.solve(gram + np.diag(ridge), moment[..., None])[..., 0]


def predict(fit: Fit, table: Table, low: float, high: float) -> np.ndarray:
    """Return what is predicted of every rating from each user's known half."""
    x = np.concatenate([fit.factors[table.item], np.ones((len(table.item), 1))], 1)
    left = table.rating - fit.mean - fit.bias[table.item]
    ridge = np.r_[np.full(fit.factors.shape[1], fit.ridge), fit.user_ridge]
    known = table.known
    z = solve(table.owner[known], x[known], left[known], table.users, ridge)
    guess = fit.mean + fit.bias[table.item] + (x * z[table.owner]).sum(1)
    return np.clip(guess, low, high)


def rmse(fit: Fit, table: Table, low: float, high: float) -> float:
    """Return the error on the halves that are not known."""
    error = (predict(fit, table, low, high) - table.rating)[~table.known]
    return float(np.sqrt(np.mean(error**2))) if len(error) else float("nan")


def fit_biases(table: Table, items: int, item_ridge: float, user_ridge: float, passes: int = 10) -> Fit:
    mean, bias = table.rating.mean(), np.zeros(items)
    size, count = np.bincount(table.owner, minlength=table.users), np.bincount(table.item, minlength=items)
    for _ in range(passes):
        left = table.rating - mean - bias[table.item]
        mine = np.bincount(table.owner, left, table.users) / (size + user_ridge)
        bias = np.bincount(table.item, table.rating - mean - mine[table.owner], items) / (count + item_ridge)
    return Fit(mean, bias, np.zeros((items, 0)), 1.0, user_ridge)


def biases(table: Table, items: int) -> Iterator[Fit]:
    for item_ridge, user_ridge in itertools.product(DAMPING, DAMPING):
        yield fit_biases(table, items, item_ridge, user_ridge)


def left_over(fit: Fit, table: Table) -> np.ndarray:
    left = table.rating - fit.mean - fit.bias[table.item]
    size = np.bincount(table.owner, minlength=table.users)
    return left - (np.bincount(table.owner, left, table.users) / (size + fit.user_ridge))[table.owner]


def with_singular_vectors(base: Fit, table: Table, items: int) -> Iterator[Fit]:
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import svds

    left = left_over(base, table)
    matrix = csr_matrix((left, (table.owner, table.item)), shape=(table.users, items))
    most = min(max(RANKS), min(matrix.shape) - 1)
    if most < 1:
        return
    _, values, vectors = svds(matrix, k=most, random_state=0)
    order = np.argsort(-values)
    seen = np.maximum(np.bincount(table.item, minlength=items), 1)
    # Scaled such that a user of ordinary taste has coefficients of about 1, whatever share of the items is rated.
    share = len(table.item) / (table.users * items)
    factors = (vectors[order] * values[order, None]).T / np.sqrt(table.users) / max(share, seen.mean() / table.users)
    noise = left.var()
    for rank, ridge in itertools.product([r for r in RANKS if r <= most], RIDGES):
        yield base._replace(factors=factors[:, :rank], ridge=ridge * noise)


def with_least_squares(base: Fit, table: Table, items: int) -> Iterator[Fit]:
    left, rng = left_over(base, table), np.random.default_rng(0)
    deviation = max(left.std(), 1e-9)
    left = left / deviation
    for rank, ridge in itertools.product(ALS_RANKS, ALS_RIDGES):
        V = rng.normal(0, 0.1, (items, rank))
        for _ in range(ALS_PASSES):
            U = solve(table.owner, V[table.item], left, table.users, np.full(rank, float(ridge)))
            V = solve(table.item, U[table.owner], left, items, np.full(rank, float(ridge)))
        for times in (0.5, 1, 2, 4):
            yield base._replace(factors=V * deviation, ridge=ridge * times * deviation**2)


def best(fits: Iterator[Fit], valid: Table, low: float, high: float) -> tuple[float, Fit] | None:
    scored = ((rmse(fit, valid, low, high), fit) for fit in fits)
    return min(scored, key=lambda pair: pair[0], default=None)


def baselines(users: Users, items: int) -> dict[str, float]:
    """Return the test error of every baseline; settings by validation users, or by training users without any."""
    train, valid, test = map(Table.of, users)
    valid = valid if len(valid.item) else train
    low, high = train.rating.min(), train.rating.max()
    found = best(biases(train, items), valid, low, high)
    assert found is not None
    base = found[1]
    errors = {"biases": rmse(base, test, low, high)}
    more: dict[str, Callable[[Fit, Table, int], Iterator[Fit]]] = {
        "svd": with_singular_vectors,
        "als": with_least_squares,
    }
    for name, fits in more.items():
        chosen = best(fits(base, train, items), valid, low, high)
        errors[name] = rmse(chosen[1], test, low, high) if chosen else errors["biases"]
    return errors


def compare(source: str, division: int, model: bool, devices: int | None = None) -> dict[str, float]:
    data = dataclasses.replace(DEFAULT.data, source=source, split_seed=division)
    config = dataclasses.replace(DEFAULT, data=data, jax_devices=devices)
    task, began = task_of(config), time.perf_counter()
    if model:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_experiment(config, RunFolder(Path(folder) / "run"))
        assert outcome.test is not None
        errors, users, items = {"fedrecon": outcome.test.micro["rmse"]}, outcome.users, len(outcome.model.legend)
        errors["round"] = outcome.run.rounds if outcome.run.best is None else outcome.run.best
    else:
        loaded = task.load(config, silent)
        ready = task.prepare(config, loaded, task.divide(config, loaded, silent), task.legend(config, loaded))
        errors, users, items = {}, ready.users, len(ready.legend)
    errors["seconds"] = time.perf_counter() - began
    return errors | baselines(users, items) | {"test": len(users.test)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--divisions", nargs="+", type=int, default=[0])
    parser.add_argument("--devices", type=int)
    parser.add_argument("--without-model", action="store_true")
    options = parser.parse_args()
    for source, division in itertools.product(options.sources, options.divisions):
        line = compare(source, division, not options.without_model, options.devices)
        print(json.dumps({"source": Path(source).stem, "division": division} | line), flush=True)


if __name__ == "__main__":
    main()
