"""What a server could learn about people from what they upload: attacks, a table, a picture, plain words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.validation import decide_lookups
from fedrecon._src.client.lookups.lookup_tables import lookup_groups
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.keys import round_key
from fedrecon._src.privacy.attacks import RatingAttack, Victims, cosine, direction, most_changed, observe

GROUPS = (2, 5, 10, 50)


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

    Example:
      >>> import fedrecon as fr
      >>> fr.privacy.Exposure("sum of 10", rows=0.26, local=0.46, ratings=0.58, rank=1.0, first=0.99).kind
      'sum of 10'
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

    Example:
      >>> import fedrecon as fr
      >>> guess = fr.privacy.Exposure("guessing", 0.25, 0.24, 0.93, 26.0, 0.02)
      >>> fr.privacy.Leakage((guess,), people=100, strangers=50, clip=1.0, noise_multiplier=1.0)["guessing"].rank
      26.0
    """

    exposures: tuple[Exposure, ...]
    people: int
    strangers: int
    clip: float
    noise_multiplier: float

    def __getitem__(self, kind: str) -> Exposure:
        """Return one kind of upload."""
        for exposure in self.exposures:
            if exposure.kind == kind:
                return exposure
        raise KeyError(
            f"`kind` must be one of {', '.join(exposure.kind for exposure in self.exposures)} (got {kind!r})"
        )

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
        wide = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)) for row in [columns, *rows]]
        return "\n".join(line.rstrip() for line in lines)

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

    Example:
      >>> import fedrecon as fr
      >>> print(fr.privacy.leakage(algorithm, params, clients, groups=(10,)))  # doctest: +SKIP
    """
    if len(clients) < 2 or most < 2:
        raise ValueError(f"`clients` and `most` must be at least 2 (got {len(clients)} clients, most={most})")
    algorithm = decide_lookups(algorithm, clients)
    if algorithm.method.init_client is not None:
        raise ValueError(
            "`leakage` attacks only methods without client state, but clients of this method keep state between rounds"
        )
    people = clients.take(np.arange(min(len(clients), most)))
    state = algorithm.init(jax.random.key(seed))
    state = state._replace(method=state.method._replace(params=jax.tree.map(jax.numpy.asarray, params)))
    message = algorithm.message(state)
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
            mean = (
                np.nanmean(victims.ratings[other_people])
                if np.isfinite(victims.ratings[other_people]).any()
                else np.nan
            )
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
