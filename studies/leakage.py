"""What a server could learn about people from what they upload: attacks, a table, a picture, plain words.

python -m studies.leakage runs/first --picture leakage.png

In Python: `leakage(algorithm, params, clients)`, with any model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm, RoundMessage, with_params
from fedrecon._src.algorithms.rounds import client_update
from fedrecon._src.algorithms.validation import decide_lookups, features_of
from fedrecon._src.app.experiment import users_of_run
from fedrecon._src.client.lookup_tables import lookup_groups
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import Cohort, Examples, Packer
from fedrecon._src.core.display import bars, lay_out
from fedrecon._src.core.keys import as_number, client_keys, round_key, words_of
from fedrecon._src.core.pytrees import flatten, unflatten
from fedrecon._src.core.split import query_only
from fedrecon._src.core.upload import RowChanges
from fedrecon._src.recommend.saved_models import open_model
from fedrecon._src.recommend.tasks import build_algorithm
from fedrecon._src.simulation.multihost import start_jax_devices
from fedrecon._src.storage.atomic import StorageError, open_regular, without_nan


class Victims(NamedTuple):
    """People whose uploads are attacked, and the truth about them.

    Attributes:
      uploads: `(people, entries)` what each uploads, whole, in one row.
      places: `{path: (begin, end, shape)}` where a leaf is in a row of `uploads`.
      rows: for the attacked table, `(people, rows)` which rows a person's upload may change: those of its query, and of
        its support where the method learns from that too; None without a table.
      table: path of that table.
      local: `(people, numbers)` the local parameters of the round.
      vector: `(people, width)` the local vector that multiplies rows of the table; None if there is none.
      vector_path: its path among the local parameters.
      ratings: `(people, rows)` what the query says about each row; NaN elsewhere. None if there are no ratings.
    """

    uploads: np.ndarray
    places: dict[str, tuple[int, int, tuple[int, ...]]]
    rows: np.ndarray | None
    table: str | None
    local: np.ndarray
    vector: np.ndarray | None
    vector_path: str | None
    ratings: np.ndarray | None


def observe(
    algorithm: Algorithm, message: RoundMessage, clients: Clients, key: Any, *, rating: str
) -> tuple[Victims, Cohort]:
    """Run a round on clients, and record what each uploads and the truth about it.

    Args:
      algorithm: what is trained.
      message: of the round.
      clients: whose uploads are attacked.
      key: of the round.
      rating: the feature that the attacker wants to know of each row.
    """
    upload = client_update(algorithm, message, clients, key)
    flat, places, begin = [], {}, 0
    for path, change in upload.delta.items():
        whole = np.asarray(change.whole() if isinstance(change, RowChanges) else change)
        flat.append(whole.reshape(len(whole), -1))
        places[path] = (begin, begin + flat[-1].shape[1], whole.shape[1:])
        begin += flat[-1].shape[1]
    cohort = _cohort(algorithm, clients, key)
    keys = client_keys(key, jnp.asarray(cohort.identity))
    local = jax.jit(algorithm.method.reconstruct)(message.method, (), cohort.support, keys)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(local)[0].items()}
    table, vector = _pair(algorithm, places, leaves)
    rows = ratings = None
    if table is not None:
        feature = lookup_groups(algorithm.model)[table]
        size = places[table][2][0]
        sides = (cohort.query, cohort.support) if algorithm.method.needs.support_rows else (cohort.query,)
        rows = _rows(sides, feature, size)
        ratings = _ratings(cohort, feature, size, rating)
    width = [leaf.reshape(len(clients), -1) for leaf in leaves.values()]
    return Victims(
        np.concatenate(flat, 1),
        places,
        rows,
        table,
        np.concatenate(width, 1) if width else np.zeros((len(clients), 0)),
        None if vector is None else leaves[vector],
        vector,
        ratings,
    ), cohort


def _cohort(algorithm: Algorithm, clients: Clients, key: Any) -> Cohort:
    """Pack clients as `client_update` does, so that a split that is drawn anew in every round is that of the round."""
    needs = algorithm.method.needs._replace(columns=features_of(algorithm, clients))
    draws = np.full(len(clients), as_number(words_of(key)))
    return Packer(clients, needs).pack(np.arange(len(clients)), draws)


def _pair(algorithm: Algorithm, places: dict[str, Any], local: dict[str, Any]) -> tuple[str | None, str | None]:
    """Choose the table to attack: one whose rows are as wide as a local vector if there is any, else the largest."""
    tables = [path for path in lookup_groups(algorithm.model) if path in places]
    for table in tables:
        for path, leaf in local.items():
            if leaf.ndim == 2 and leaf.shape[1] > 1 and places[table][2][1:] == leaf.shape[1:]:
                return table, path
    return max(tables, key=lambda path: places[path][1] - places[path][0], default=None), None


def _by_client(side: Examples, feature: str) -> list[np.ndarray]:
    column = np.asarray(side.columns[feature])
    return [column[i, :count] for i, count in enumerate(np.asarray(side.count))]


def _rows(sides: Sequence[Examples], features: tuple[str, ...], size: int) -> np.ndarray:
    result = np.zeros((len(sides[0].count), size), bool)
    for side, feature in itertools.product(sides, features):
        for i, ids in enumerate(_by_client(side, feature)):
            result[i, ids.reshape(-1)] = True
    return result


def _ratings(cohort: Cohort, features: tuple[str, ...], size: int, rating: str) -> np.ndarray | None:
    if len(features) != 1 or rating not in cohort.query.columns:
        return None
    if np.ndim(cohort.query.columns[features[0]]) != 2 or np.ndim(cohort.query.columns[rating]) != 2:
        return None
    result = np.full((len(cohort.client), size), np.nan)
    sides = _by_client(cohort.query, features[0]), _by_client(cohort.query, rating)
    for i, (ids, values) in enumerate(zip(*sides, strict=True)):
        result[i, ids] = values
    return result


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values other than 0, up to the rounding of single precision."""
    close = np.round(values, 4)
    return np.array([np.median(values[close == level]) for level in np.unique(close) if level])


# ---- one observed sum ----


def changed_rows(victims: Victims, seen: np.ndarray) -> np.ndarray:
    """Return the change of each row of the table in what was seen, `(rows, width)`."""
    assert victims.table is not None
    begin, end, shape = victims.places[victims.table]
    return seen[begin:end].reshape(shape[0], -1)


def most_changed(victims: Victims, seen: np.ndarray, count: int) -> np.ndarray:
    """Guess which `count` rows a person has: those that changed most."""
    norms = np.linalg.norm(changed_rows(victims, seen), axis=1)
    return np.argsort(-norms, kind="stable")[:count]


def direction(victims: Victims, seen: np.ndarray) -> np.ndarray:
    """Guess the direction of a person's local vector: the first singular vector of the changes."""
    change = changed_rows(victims, seen).astype(np.float64)
    return np.linalg.eigh(change.T @ change)[1][:, -1]


def cosine(first: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors, without its sign."""
    scale = np.linalg.norm(first) * np.linalg.norm(other)
    return float(abs(first @ other) / scale) if scale > 0 else 0.0


class RatingAttack:
    """Solves for ratings: given the local vector, a change is a linear function of the rating.

    The server knows its own settings, so it runs its own client function on a made-up person who has the guessed
    vector and the rows that changed, with ratings of 0 and of 1. The slope is one number for all rows of full batches
    and another for those of the last, shorter one; of two possible ratings it takes the one nearer to a rating that
    people give.
    """

    def __init__(
        self, algorithm: Algorithm, message: RoundMessage, clients: Clients, victims: Victims, rating: str, feature: str
    ):
        """Prepare to attack ratings of rows that `feature` names."""
        self._algorithm, self._message, self._victims = algorithm, message, victims
        self._rating, self._feature = rating, feature
        self._levels = np.unique(clients.columns[rating])
        self._clients = clients
        needs = algorithm.method.needs
        self._needs = needs._replace(split=query_only(), columns=features_of(algorithm, clients))
        self._packer = Packer(clients, self._needs)

    @property
    def possible(self) -> bool:
        """Whether a made-up person needs no more than rows and ratings."""
        return set(self._needs.columns or ()) <= {self._feature, self._rating}

    def solve(self, seen: np.ndarray, rows: np.ndarray, guess: np.ndarray) -> np.ndarray:
        """Return the ratings of rows, given a guess of the local vector with its length and sign."""
        unit = guess / max(np.linalg.norm(guess), 1e-30)
        order = np.sort(rows)
        none, first = (self._simulate(order, guess, level) for level in (0.0, 1.0))
        slopes = _distinct((first - none) @ unit)
        if not len(slopes):
            return np.full(len(rows), np.nan)
        change = changed_rows(self._victims, seen)[rows] @ unit
        base = self._predict(rows, guess)
        options = base[None] + change[None] / slopes[:, None]  # (slopes, rows)
        far = np.abs(options[..., None] - self._levels).min(-1)
        return np.clip(options[far.argmin(0), np.arange(len(rows))], self._levels[0], self._levels[-1])

    def _simulate(self, rows: np.ndarray, guess: np.ndarray, level: float) -> np.ndarray:
        rows = rows[: self._packer.lengths.query]
        columns = {self._feature: rows.astype(self._clients.columns[self._feature].dtype)}
        columns[self._rating] = np.full(len(rows), level, self._clients.columns[self._rating].dtype)
        made_up = Clients(columns, np.array([0]), np.array([len(rows)]), np.array(["made up"]))
        cohort = Packer(made_up, self._needs, self._packer.lengths).pack(np.array([0]))
        change = self._client(self._message.method, jnp.asarray(guess, jnp.float32), cohort)
        return np.asarray(change).reshape(len(change), -1)[rows]

    @functools.cached_property
    def _client(self) -> Any:
        algorithm, table, vector = self._algorithm, self._victims.table, self._victims.vector_path
        assert table is not None
        assert vector is not None
        structure = flatten(jax.eval_shape(lambda: algorithm.model.init_local(jax.random.key(0))))[1]

        def run(params: Any, guess: Any, cohort: Cohort) -> Any:
            def local(key: Any) -> Any:
                leaves = flatten(algorithm.model.init_local(key))[0]
                return unflatten(structure, {**leaves, vector: guess})

            # With no support nothing is reconstructed: local parameters stay as they begin.
            model = algorithm.model._replace(init_local=local, default_local=None, evidence=None)
            method = algorithm.define(model)
            change = method.client(params, (), cohort, jax.random.key(0))[0].delta[table]
            return (change.whole() if isinstance(change, RowChanges) else change)[0]

        return jax.jit(run)

    def _predict(self, rows: np.ndarray, guess: np.ndarray) -> np.ndarray:
        return np.asarray(self._predictions(self._message.method, jnp.asarray(guess, jnp.float32)))[rows]

    @functools.cached_property
    def _predictions(self) -> Any:
        """Compile predictions of all rows: for some rows, each number of rows would be compiled separately."""
        model, vector, table = self._algorithm.model, self._victims.vector_path, self._victims.table
        assert vector is not None
        assert table is not None
        size = self._victims.places[table][2][0]

        def run(params: Any, guess: Any) -> Any:
            leaves, structure = flatten(model.init_local(jax.random.key(0)))
            local = unflatten(structure, {**leaves, vector: guess})
            return model.predict(params, local, {self._feature: jnp.arange(size)})

        return jax.jit(run)


# ---- a table, a picture, plain words ----


GROUPS = (2, 5, 10, 50)
PNG = b"\x89PNG\r\n\x1a\n"


class Exposure(NamedTuple):
    """How much one kind of upload gives away, on average over the people attacked. NaN where it does not apply.

    Attributes:
      kind: what the server sees, such as `sum of 10`.
      rows: share of a person's rows (the films they rated, say) among as many rows that changed most.
      local: cosine between a person's local parameters and the attacker's guess; 1 is the same direction.
      ratings: mean absolute error of the guessed ratings of a person's rows; the length of the local vector is taken
        as known.
      rank: the person's rank, by how well it fits, among known people who did not take part, the same number of them
        (`Leakage.strangers`) for every kind; 1 is first.
      first: share of people who fit better than all of these.
    """

    kind: str
    rows: float
    local: float
    ratings: float
    rank: float
    first: float


@dataclasses.dataclass(frozen=True)
class Leakage:
    """What attacks found.

    Attributes:
      exposures: by kind of upload, plain ones first; `guessing`, which looks at no upload, is the last.
      people: how many were attacked, and are known to the attacker.
      strangers: how many people who did not take part each was compared with.
      clip: the norm that uploads were clipped to where noise was added.
      noise_multiplier: of that noise.
    """

    exposures: tuple[Exposure, ...]
    people: int
    strangers: int
    clip: float
    noise_multiplier: float

    def __getitem__(self, kind: str) -> Exposure:
        """Return one kind of upload."""
        kinds = {exposure.kind: exposure for exposure in self.exposures}
        if kind not in kinds:
            raise KeyError(f"`kind` must be one of {', '.join(kinds)} (got {kind!r})")
        return kinds[kind]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles of columns, and rows of text."""
        columns = ["the server sees", "rows found", "local, cosine", "ratings off by", "mean rank", "who it is"]
        return columns, [
            [e.kind, _share(e.rows), _number(e.local), _number(e.ratings), _number(e.rank, 1), _share(e.first)]
            for e in self.exposures
        ]

    def summary(self) -> str:
        """Describe in a few sentences what the server learns from a plain upload."""
        plain, guess = self.exposures[0], self.exposures[-1]
        sentences = []
        if np.isfinite(plain.rows):
            sentences.append(f"{plain.rows:.0%} of what they have rated or used (guessing finds {guess.rows:.0%})")
        if np.isfinite(plain.local):
            sentences.append(f"their local parameters with a cosine of {plain.local:.3f}")
        if np.isfinite(plain.ratings):
            sentences.append(f"their ratings to {plain.ratings:.2g}")
        sentences.append(f"which of {self.strangers + 1} known people they are in {plain.first:.0%} of cases")
        last = self.exposures[-2]
        return (
            f"From one plain upload a server learns about a person {'; '.join(sentences)}. About one in a {last.kind}: "
            f"{_share(last.rows)} of rows, cosine {_number(last.local)}, and who they are in {_share(last.first)}. "
            "These are known attacks only: a failed attack does not prove privacy."
        )

    def __str__(self) -> str:
        """Return the table as text."""
        columns, rows = self.table()
        return "\n".join(lay_out([columns, *rows]))

    def plot(self, path: str | Path) -> None:
        """Draw what is found against what the server sees, to a PNG file.

        Args:
          path: of the file.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        names = [exposure.kind for exposure in self.exposures]
        for name, title in (("rows", "rows found"), ("local", "local parameters, cosine"), ("first", "who it is")):
            values = [getattr(exposure, name) for exposure in self.exposures]
            if np.isfinite(values).any():
                axes.plot(names, values, marker="o", label=title)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("what the server sees")
        axes.set_title(f"What attacks find out about {self.people} people")
        axes.tick_params(axis="x", rotation=20)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120, format="png")


def leakage(
    algorithm: Algorithm,
    params: Any,
    clients: Clients,
    *,
    groups: Sequence[int] = GROUPS,
    clip: float | None = None,
    noise_multiplier: float = 1.0,
    most: int = 100,
    rating: str = "rating",
    seed: int = 0,
) -> Leakage:
    """Attack uploads as a curious server would, and report what it learns.

    The attacker knows the model, the settings and what was sent to clients. To say whose upload it is, it also knows
    all the data of these people, and asks which of them took part. Uploads are attacked as they are, in sums of several
    people, and in sums of clipped uploads with noise.

    Args:
      algorithm: what is trained; its aggregator does not matter.
      params: the global parameters that people start from.
      clients: people to attack.
      groups: sizes of the sums to attack; those with all people or more are left out.
      clip: the norm for the sum with noise; by default the median of the uploads'.
      noise_multiplier: the noise there, in units of the norm.
      most: attack at most this many people, the first ones.
      rating: the feature that the attacker wants to know of each row, if the model has it.
      seed: of the round, of who is summed up with whom, and of the noise.

    Returns:
      A `Leakage`.
    """
    check_number("noise_multiplier", noise_multiplier, most=1e6)
    check_number("clip", clip, above=True)
    if len(clients) < 2 or most < 2:
        raise ValueError(f"`clients` and `most` must be at least 2 (got {len(clients)} clients, most={most})")
    algorithm = decide_lookups(algorithm, clients)
    if algorithm.method.init_client is not None:
        raise ValueError("`leakage` attacks only methods without client state, and this one has some")
    people = clients.take(np.arange(min(len(clients), most)))
    message = algorithm.message(with_params(algorithm.init(jax.random.key(seed)), params))
    victims, _ = observe(algorithm, message, people, round_key(seed, 0), rating=rating)
    if not np.isfinite(victims.uploads).all():
        wild = int((~np.isfinite(victims.uploads).all(1)).sum())
        raise ValueError(f"{wild} of {len(people)} uploads are not finite: the model has diverged")
    attack = None
    if victims.ratings is not None and victims.vector is not None and victims.table is not None:
        feature = lookup_groups(algorithm.model)[victims.table][0]
        attack = RatingAttack(algorithm, message, people, victims, rating, feature)
        attack = attack if attack.possible else None
    lengths = np.linalg.norm(victims.uploads.astype(np.float64), axis=1)
    norm = float(np.median(lengths)) if clip is None else clip
    rng = np.random.default_rng(seed)
    sizes = [size for size in groups if 2 <= size < len(people)]
    largest = max(sizes, default=1)
    strangers = len(people) - largest
    expose = functools.partial(_expose, strangers=strangers, rng=rng, attack=attack)
    results = [expose("plain upload", victims, 1)]
    results += [expose(f"sum of {size}", victims, size) for size in sizes]
    clipped = victims._replace(uploads=victims.uploads * np.minimum(1, norm / np.maximum(lengths, 1e-30))[:, None])
    noised = f"sum of {largest}, clipped, noised"
    results.append(expose(noised, clipped, largest, noise=noise_multiplier * norm))
    return Leakage((*results, _guess(victims, strangers)), len(people), strangers, norm, noise_multiplier)


def _expose(
    kind: str,
    victims: Victims,
    size: int,
    *,
    strangers: int,
    rng: np.random.Generator,
    attack: RatingAttack | None,
    noise: float = 0.0,
) -> Exposure:
    """Attack a sum with every person in it once."""
    people = len(victims.uploads)
    units = victims.uploads / np.maximum(np.linalg.norm(victims.uploads, axis=1), 1e-30)[:, None]
    scores: list[list[float]] = []
    for person in range(people):
        other_people = rng.permutation(np.delete(np.arange(people), person))[: size - 1]
        members = np.append(other_people, person)
        seen = victims.uploads[members].sum(0)
        if noise:
            seen = seen + (noise * rng.standard_normal(len(seen), np.float32))
        other_people = rng.permutation(np.delete(np.arange(people), members))[:strangers]
        scores.append(_attack_one(victims, person, other_people, seen, units, attack))
    rows, local, ratings, rank, first = np.array(scores).T
    return Exposure(kind, _mean(rows), _mean(local), _mean(ratings), _mean(rank), _mean(first))


def _attack_one(
    victims: Victims,
    person: int,
    strangers: np.ndarray,
    seen: np.ndarray,
    units: np.ndarray,
    attack: RatingAttack | None,
) -> list[float]:
    fits = units @ seen
    rank = 1 + int((fits[strangers] >= fits[person]).sum())
    rows = local = ratings = float("nan")
    if victims.rows is not None and victims.rows[person].any():
        true = np.flatnonzero(victims.rows[person])
        guessed = most_changed(victims, seen, len(true))
        rows = float(np.isin(guessed, true).mean())
    if victims.vector is not None:
        truth = victims.vector[person]
        guess = direction(victims, seen)
        local = cosine(guess, truth)
        if attack is not None and victims.ratings is not None:
            true = np.flatnonzero(np.isfinite(victims.ratings[person]))
            scaled = guess * np.sign(guess @ truth) * np.linalg.norm(truth)
            if len(true):
                wrong = np.abs(attack.solve(seen, true, scaled) - victims.ratings[person, true])
                ratings = float(np.nanmean(wrong)) if np.isfinite(wrong).any() else float("nan")
    elif victims.local.shape[1]:
        local = cosine(victims.local[int(fits.argmax())], victims.local[person])
    return [rows, local, ratings, float(rank), float(rank == 1)]


def _guess(victims: Victims, strangers: int) -> Exposure:
    """Guess without looking: the rows, local parameters and ratings that others have."""
    people = len(victims.uploads)
    rows, local, ratings = [], [], []
    vectors = victims.local if victims.vector is None else victims.vector
    for person in range(people):
        other_people = np.delete(np.arange(people), person)
        if victims.rows is not None and victims.rows[person].any():
            popular = np.argsort(-victims.rows[other_people].sum(0), kind="stable")[: victims.rows[person].sum()]
            rows.append(victims.rows[person][popular].mean())
        if vectors.shape[1]:
            local.append(cosine(vectors[other_people].mean(0), vectors[person]))
        if victims.ratings is not None:
            mean = _mean(victims.ratings[other_people])
            truth = victims.ratings[person][np.isfinite(victims.ratings[person])]
            ratings += [np.abs(truth - mean).mean()] if len(truth) else []
    return Exposure("guessing", _mean(rows), _mean(local), _mean(ratings), strangers / 2 + 1, 1 / (strangers + 1))


def _mean(values: Any) -> float:
    array = np.asarray(values, float)
    return float(array[np.isfinite(array)].mean()) if np.isfinite(array).any() else float("nan")


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.0%}"


def _number(value: float, digits: int = 3) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 10.0**-digits else f"{value:.{digits}f}"


# ---- the command ----


def check_overwritable(path: Path, beginning: bytes, what: str) -> None:
    """Raise `StorageError` unless a file does not exist, is empty, or begins as one of the same kind.

    Args:
      path: the file.
      beginning: how files of its kind begin.
      what: it is, for the message.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        if file.read(len(beginning)) not in (b"", beginning):
            raise StorageError(f"{path} already exists and is not {what}; choose another name")


def main(argv: Sequence[str] | None = None) -> int:
    """Attack the uploads of a run's clients as a curious server would, and report what leaks."""
    parser = argparse.ArgumentParser("python -m studies.leakage", description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument(
        "--people",
        type=int,
        default=100,
        help="how many test clients to attack; validation clients, if there are none",
    )
    parser.add_argument(
        "--noise-multiplier", type=float, default=1.0, help="noise in the last row, in units of the clipping norm"
    )
    parser.add_argument(
        "--clip-norm", type=float, help="clipping norm in that row; by default the median of the uploads"
    )
    parser.add_argument("--picture", type=Path, help="also plot the result to this PNG file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        if args.picture is not None:  # before all the work
            check_overwritable(args.picture, PNG, "a PNG picture")
        start_jax_devices(None)
        model = open_model(args.run)
        config, users = users_of_run(args.run, bars)
        measured = leakage(
            build_algorithm(config, model.algorithm.model),
            model.params,
            users.test if len(users.test) else users.valid,
            most=args.people,
            clip=args.clip_norm,
            noise_multiplier=args.noise_multiplier,
        )
        if args.picture is not None:
            measured.plot(args.picture)
    except (ValueError, OSError) as error:
        print(f"studies.leakage: {error}", file=sys.stderr)
        return 1
    if args.json:
        kinds = [exposure._asdict() for exposure in measured.exposures]
        print(json.dumps(without_nan({"people": measured.people, "strangers": measured.strangers, "kinds": kinds})))
    else:
        print(f"What attacks find out about {measured.people} {model.task.people} of {args.run}")
        print(measured, measured.summary(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
