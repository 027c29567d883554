"""The default training of ratings in plain numpy, with gradients in closed form, as a reference for the library's runs.

python benchmarks/recipe_reference.py movielens-small
python benchmarks/recipe_reference.py ml-1m.zip --optimizer diagonal --seeds 3
python benchmarks/recipe_reference.py ratings.csv --set prior=50 rounds=100 --division 1
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

import fedrecon as fr


class Settings(NamedTuple):
    dim: int = 16
    rounds: int = 200
    least_cohort: int = 50
    share: float = 0.1
    prior: float = 100.0  # of the item factors, as a ridge on the sum over all clients
    evidence_prior: float = 1.0
    optimizer: str = "adam"  # or "diagonal"
    rate: float = 0.3
    adam_rate: float = 0.01
    momentum: float = 0.9
    init: float = 0.1
    passes: int = 10
    implicit: bool = True
    second: bool = True
    both: bool = True
    known: float = 0.5  # of a client's ratings in each fold
    factor_ridge: float = 1.0  # times v_e
    bias_steps: bool = False  # let item biases go on by gradient
    average: float = 0.0  # share of last rounds that are averaged
    traits: bool = True  # users have coefficients of an item's bias and popularity


class Table(NamedTuple):
    """Ratings one after another, those of a client together: client, item, rating."""

    owner: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    begin: np.ndarray  # (clients + 1,)

    @classmethod
    def of(cls, clients: fr.Clients) -> Table:
        rows = np.concatenate([np.arange(a, b) for a, b in zip(clients.starts, clients.ends, strict=True)])
        owner = np.repeat(np.arange(len(clients)), clients.sizes)
        columns = clients.columns
        return cls(
            owner, columns["item"][rows], columns["rating"][rows].astype(np.float64), np.r_[0, np.cumsum(clients.sizes)]
        )


class Zero(NamedTuple):
    mu: float
    s: float
    bias: np.ndarray
    noise: float
    k_user: float
    k_item: float  # that `bias` was fitted with
    traits: np.ndarray  # (items, traits)
    k_traits: np.ndarray


def round_zero(table: Table, items: int, passes: int) -> Zero:
    mu, s = table.rating.mean(), table.rating.std()
    y = (table.rating - mu) / s
    users = len(table.begin) - 1
    size, count = np.bincount(table.owner, minlength=users), np.bincount(table.item, minlength=items)
    seen, rated = count > 0, size > 0
    bias, v_e, v_i, v_u = np.zeros(items), 0.7, 0.15, 0.15
    for t in range(passes):
        k_i, k_u = v_e / v_i, v_e / v_u
        mine = np.bincount(table.owner, y - bias[table.item], users) / (size + k_u)
        error = y - bias[table.item] - mine[table.owner]
        new = np.bincount(table.item, y - mine[table.owner], items) / (count + k_i)
        new_u = (mine**2 + v_e / (size + k_u))[rated].mean()
        new_i = (new**2 + v_e / (count + k_i))[seen].mean()
        posterior = (size * v_e / (size + k_u)).sum() + (count * v_e / (count + k_i)).sum()
        if t:
            v_e = ((error**2).sum() + posterior) / len(y)
        bias, v_u, v_i = new, new_u, new_i
    return Zero(mu, s, bias, v_e, v_e / v_u, k_i, np.zeros((items, 0)), np.zeros(0))


def with_traits(table: Table, zero: Zero, passes: int = 5) -> Zero:
    """Add what users make of an item's bias and popularity: variances by EM, own ratings left out of both traits."""
    items, users = len(zero.bias), len(table.begin) - 1
    y = (table.rating - zero.mu) / zero.s
    size, count = np.bincount(table.owner, minlength=users), np.bincount(table.item, minlength=items)
    mine = np.bincount(table.owner, y - zero.bias[table.item], users) / (size + zero.k_user)
    n = count[table.item]
    total = zero.bias[table.item] * (n + zero.k_item) - (y - mine[table.owner])
    without = np.where(n > 1, total / (n - 1 + zero.k_item), 0)
    known = np.stack([zero.bias, np.log1p(count)], 1)
    mean, deviation = known[table.item].mean(0), known[table.item].std(0)
    own = (np.stack([without, np.log1p(n - 1)], 1) - mean) / np.where(deviation > 1e-6, deviation, 1)
    x = np.concatenate([own, np.ones((len(y), 1))], 1)
    gram, moment = np.zeros((users, 3, 3)), np.zeros((users, 3))
    np.add.at(gram, table.owner, x[:, :, None] * x[:, None])
    np.add.at(moment, table.owner, x * (y - without)[:, None])
    v, v_e = np.array([0.02, 0.02, zero.noise / zero.k_user]), zero.noise
    for _ in range(passes):
        inverse = np.linalg.inv(gram + np.diag(v_e / v))
        z = (inverse @ moment[..., None])[..., 0]
        error = y - without - (x * z[table.owner]).sum(1)
        new = (z**2 + v_e * inverse.diagonal(0, 1, 2))[size > 0].mean(0)
        v_e = ((error**2).sum() + v_e * (inverse * gram).sum()) / len(y)
        v = np.maximum(new, 1e-4)
    traits = (known - mean) / np.where(deviation > 1e-6, deviation, 1)
    return zero._replace(noise=v_e, k_user=v_e / v[2], traits=traits, k_traits=v_e / v[:2])


class Block(NamedTuple):
    """Clients of similar size side by side: (clients, ratings), padded with weight 0."""

    item: np.ndarray
    target: np.ndarray
    mask: np.ndarray
    half: np.ndarray  # true for the first fold


def blocks(table: Table, clients: np.ndarray, target: np.ndarray, half: np.ndarray, dim: int, dtype: type) -> list:
    size = np.diff(table.begin)[clients]
    order = np.argsort(-size, kind="stable")
    clients, size = clients[order], size[order]
    made, at = [], 0
    while at < len(clients) and size[at] > 0:
        length = size[at]
        many = int(np.clip(60_000 // length, 1, 256))
        part, sizes = clients[at : at + many], size[at : at + many]
        j = np.arange(length)
        mask = j < sizes[:, None]
        rows = np.where(mask, table.begin[part][:, None] + j, table.begin[part][:, None])
        made.append(Block(table.item[rows], (target[rows] * mask).astype(dtype), mask, half[rows] & mask))
        at += many
    return made


class Parameters(NamedTuple):
    V: np.ndarray
    Y: np.ndarray
    bias: np.ndarray
    traits: np.ndarray


def solve(X, t, p, support, ridge):
    """Return z, A^-1 applied to anything, and support residuals: all clients of a block at once."""
    Xs = X * support[..., None]
    A = Xs.transpose(0, 2, 1) @ Xs + np.diag(ridge)
    inverse = np.linalg.inv(A)
    residual = t - (X @ p[..., None])[..., 0]
    z = p + (inverse @ (Xs.transpose(0, 2, 1) @ (residual * support)[..., None]))[..., 0]
    return z, inverse, Xs


def start_of(params, item, support, settings):
    n = support.sum(1)
    if not settings.implicit:
        return np.zeros((len(item), params.Y.shape[1]), params.Y.dtype), n
    total = (support[:, None, :].astype(params.Y.dtype) @ params.Y[item])[:, 0]
    return total / np.sqrt(1 + n)[:, None].astype(params.Y.dtype), n


def features(params, item):
    V = params.V[item]
    return np.concatenate([V, params.traits[item], np.ones((*V.shape[:2], 1), V.dtype)], 2)


def gradient(params, block, ridge, settings, sums):
    dV, dY, db, count = sums
    X = features(params, block.item)
    flat = []
    for support in [block.half, block.mask & ~block.half][: 2 if settings.both else 1]:
        query = block.mask & ~support
        p, n = start_of(params, block.item, support, settings)
        t = block.target - params.bias[block.item]
        z, inverse, Xs = solve(X, t, p, support, ridge)
        error = ((X @ z[..., None])[..., 0] - t) * block.mask
        e = error * query
        w = (inverse @ (X.transpose(0, 2, 1) @ e[..., None]))[..., 0]
        dX = e[..., None] * z[:, None]
        if settings.second:
            r = -error * support
            dX = dX + r[..., None] * w[:, None] - (Xs @ w[..., None]) * z[:, None]
        flat.append((dX, support, ridge * w / np.sqrt(1 + n)[:, None], e, support * (-(Xs @ w[..., None])[..., 0])))
    at = block.mask
    items = block.item[at]
    dX = sum(f[0] for f in flat)[at][:, : settings.dim]
    for c in range(settings.dim):
        dV[:, c] += np.bincount(items, dX[:, c], len(dV))
    if settings.implicit:
        for _, support, move, _, _ in flat:
            rows = np.broadcast_to(move[:, None], (*support.shape, move.shape[1]))[support]
            for c in range(rows.shape[1]):
                dY[:, c] += np.bincount(block.item[support], rows[:, c], len(dY))
    db += np.bincount(items, sum(f[3] + (f[4] if settings.second else 0) for f in flat)[at], len(db))
    count += np.bincount(items, minlength=len(count))


def train(table: Table, items: int, zero: Zero, settings: Settings, seed: int, watch=None):
    rng = np.random.default_rng(seed)
    dtype = np.float32
    users, d, q = len(table.begin) - 1, settings.dim, zero.traits.shape[1]
    params = Parameters(
        rng.normal(0, settings.init, (items, d)).astype(dtype),
        np.zeros((items, d + q + 1), dtype),
        zero.bias.astype(dtype),
        zero.traits.astype(dtype),
    )
    ridge = np.r_[np.full(d, zero.noise * settings.factor_ridge), zero.k_traits, zero.k_user].astype(dtype)
    target = (table.rating - zero.mu) / zero.s
    all_count = np.bincount(table.item, minlength=items)[:, None]
    K = min(users, max(settings.least_cohort, round(users * settings.share)))
    scale = users / K
    moments = [np.zeros_like(x) for x in params[:3]], [np.zeros_like(x) for x in params[:3]]
    mean = None
    for t in range(settings.rounds):
        cohort = rng.choice(users, K, replace=False)
        half = shuffled_half(table, cohort, settings.known, rng)
        sums = (np.zeros((items, d)), np.zeros((items, d + q + 1)), np.zeros(items), np.zeros(items))
        for block in blocks(table, cohort, target, half, d, dtype):
            gradient(params, block, ridge, settings, sums)
        sums[1][:, d : d + q] = 0  # evidence moves the embedding and the bias
        G = [
            scale * sums[0] + settings.prior * params.V,
            scale * sums[1] + settings.evidence_prior * params.Y,
            scale * sums[2] + 5 * (params.bias - zero.bias),
        ]
        left = 1 - t / settings.rounds
        if settings.optimizer == "adam":
            step = adam(G, moments, t, settings.adam_rate * left)
        else:
            divisor = [
                all_count + scale + settings.prior,
                (all_count + scale) * ridge / 4 + settings.evidence_prior,
                all_count[:, 0] + scale + 5,
            ]
            rate = settings.rate * min(1, np.sqrt(10 * K / users)) * left
            step = diagonal(G, divisor, moments[0], settings.momentum, rate)
        params = Parameters(
            (params.V - step[0]).astype(dtype),
            (params.Y - step[1] * settings.implicit).astype(dtype),
            (params.bias - step[2]).astype(dtype) if settings.bias_steps else params.bias,
            params.traits,
        )
        if settings.average and t >= settings.rounds * (1 - settings.average):
            mean = [a + b for a, b in zip(mean, params, strict=True)] if mean else list(params)
        if watch:
            watch(t, params)
    if mean:
        params = Parameters(*[a / round(settings.rounds * settings.average) for a in mean])
    return params, ridge


def shuffled_half(table, cohort, known, rng):
    """Mark a random half of every client's ratings."""
    half = np.zeros(len(table.item), bool)
    rows = np.concatenate([np.arange(table.begin[c], table.begin[c + 1]) for c in cohort])
    owner = table.owner[rows]
    order = np.lexsort((rng.random(len(rows)), owner))
    rows, owner = rows[order], owner[order]
    first = np.r_[0, np.flatnonzero(np.diff(owner)) + 1]
    size = np.diff(np.r_[first, len(rows)])
    rank = np.arange(len(rows)) - np.repeat(first, size)
    half[rows[rank < np.repeat(np.floor(size * known + rng.random(len(size))), size)]] = True
    return half


def adam(G, moments, t, rate):
    steps = []
    for g, m, v in zip(G, *moments, strict=True):
        m *= 0.9
        m += 0.1 * g
        v *= 0.999
        v += 0.001 * g**2
        steps.append(rate * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8))
    return steps


def diagonal(G, divisor, velocity, momentum, rate):
    for g, d, v in zip(G, divisor, velocity, strict=True):
        v *= momentum
        v += (1 - momentum) * g / d
    return [rate * v for v in velocity]


def predictions(table, params, ridge, zero, settings, keep=None):
    """Return what is predicted of every client's second half, and what it is; `keep` support ratings at most."""
    size = np.diff(table.begin)
    j = np.arange(len(table.item)) - np.repeat(table.begin[:-1], size)
    known = fr.split.half().counts(size)[0]
    half = j < np.repeat(known if keep is None else np.minimum(known, keep), size)
    asked = j >= np.repeat(known, size)
    found = np.full(len(table.item), np.nan)
    clients = np.arange(len(size))
    place = np.arange(len(table.item)).astype(np.float64)
    target = (table.rating - zero.mu) / zero.s
    both = zip(
        blocks(table, clients, target, half, settings.dim, np.float32),
        blocks(table, clients, place, half, settings.dim, np.float64),
        strict=True,
    )
    for block, where in both:
        X = features(params, block.item)
        p, _ = start_of(params, block.item, block.half, settings)
        bias = params.bias[block.item]
        z, _, _ = solve(X, block.target - bias, p, block.half, ridge)
        guess = zero.mu + zero.s * (bias + (X @ z[..., None])[..., 0])
        found[where.target[block.mask].astype(int)] = guess[block.mask]
    return found[asked], table.rating[asked]


def rmse(guess, truth):
    return float(np.sqrt(np.mean((guess - truth) ** 2)))


def biases_alone(table, zero):
    size = np.diff(table.begin)
    j = np.arange(len(table.item)) - np.repeat(table.begin[:-1], size)
    known = j < np.repeat(fr.split.half().counts(size)[0], size)
    t = ((table.rating - zero.mu) / zero.s - zero.bias[table.item]) * known
    mine = np.bincount(table.owner, t, len(size)) / (np.bincount(table.owner, known, len(size)) + zero.k_user)
    guess = zero.mu + zero.s * (zero.bias[table.item] + mine[table.owner])
    return rmse(guess[~known], table.rating[~known])


def load(source: str, division: int, cap: int | None = 300):
    """Return training, validation and test users as the command line divides them (division 0)."""
    ratings = fr.data.load(source).shuffle(division)
    ratings = ratings if cap is None else ratings.cap(cap)
    parts = ratings.split_clients(0.8, 0.1, 0.1, seed=division)
    return [Table.of(part) for part in parts], ratings.num_items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--division", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--log1p", action="store_true")
    parser.add_argument("--cap", type=int, default=300)
    parser.add_argument("--part", choices=["valid", "test"], default="test")
    parser.add_argument("--optimizer", default="adam", choices=["adam", "diagonal"])
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    fields = Settings._field_defaults
    changed = {k: type(fields[k])(float(v)) for k, v in (pair.split("=") for pair in options.set)}
    settings = Settings(optimizer=options.optimizer)._replace(**changed)
    (training, valid, test), items = load(options.source, options.division, options.cap or None)
    if options.log1p:
        training, valid, test = (t._replace(rating=np.log1p(t.rating)) for t in (training, valid, test))
    measured = test if options.part == "test" else valid
    zero = round_zero(training, items, settings.passes)
    alone = biases_alone(measured, zero)
    zero = with_traits(training, zero) if settings.traits else zero
    print(f"{len(training.begin) - 1} clients, {items} items, {len(training.item)} ratings; ", end="")
    print(f"mean {zero.mu:.3f}, deviation {zero.s:.3f}, noise {zero.noise:.3f}, user ridge {zero.k_user:.2f}")
    print(f"biases alone {alone:.4f}")
    low, high = training.rating.min(), training.rating.max()
    for seed in range(options.seeds):
        began = time.perf_counter()
        params, ridge = train(training, items, zero, settings, seed)
        took = time.perf_counter() - began
        guess, truth = predictions(measured, params, ridge, zero, settings)
        few = [rmse(*predictions(measured, params, ridge, zero, settings, keep)) for keep in (0, 1, 2, 5)]
        print(f"seed {seed}: {rmse(guess, truth):.4f}, clipped {rmse(np.clip(guess, low, high), truth):.4f}; ", end="")
        print(f"0, 1, 2, 5 known: {', '.join(f'{x:.3f}' for x in few)}; {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
