"""A trained recommender: reconstructs, predicts and recommends for one person or many, and evaluates itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.core.checks import check_number
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import Step, predict_in
from fedrecon._src.core.progress import warn_caller
from fedrecon._src.data import Ratings
from fedrecon._src.recommend.evaluation_table import EvaluationTable, evaluate_saved
from fedrecon._src.recommend.ranking import Recommendation, top_items
from fedrecon._src.recommend.saved_models import SavedModel, open_for
from fedrecon._src.recommend.task import Users
from fedrecon._src.recommend.tasks import CLICKS, RATINGS, Items
from fedrecon._src.simulation.personalization import reconstruct
from fedrecon._src.simulation.training import Run

NAMED_IDS = 5  # in a message
YEAR = re.compile(r" \(\d{4}\)$")
RATED = "a dict {item: rating}, such as {1: 5.0, 7: 2.0}, or a list of such dicts"
CLICKED = "items, such as [1, 7], a dict {item: count}, or a list of such people"

LEAST_AT_ONCE = 16
PEOPLE_AT_ONCE = 256  # whose predictions for all items are in memory together

# {item id as in the training data: rating, or count of clicks}; of clicks, the ids alone will do
Person = Mapping[Any, float] | Collection[Any]


class Recommended(NamedTuple):
    """An item for a person.

    Attributes:
      item: its id, as in the training data.
      title: what it is called; its id if it has no title.
      rating: the predicted rating, within the scale; for clicks, a score: about 1 is likely, 0 is not.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.Recommended(item=1214, title="Alien (1979)", rating=4.5).title
      'Alien (1979)'
    """

    item: Any
    title: str
    rating: float


class Recommender:
    """A trained model of ratings or clicks, ready to serve.

    Attributes:
      algorithm: what was trained.
      params: its global parameters.
      items: ids and titles of the items, and how many training users have each.
      run: the history of the training; None for a model that was loaded.

    Example:
      >>> import fedrecon as fr
      >>> ratings = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)  # doctest: +SKIP
      >>> recommender = fr.recommend.train(ratings, rounds=2)  # doctest: +SKIP
      >>> [item] = recommender.recommend({0: 5.0, 1: 2.0}, n=1)  # doctest: +SKIP
      >>> item.item in range(2, 20)  # doctest: +SKIP
      True
    """

    def __init__(self, saved: SavedModel[Items], users: Users | None = None, run: Run | None = None):
        """Serve with a model; nothing is compiled before it is needed."""
        self.saved, self.items, self.run = saved, saved.legend, run
        self.algorithm: Algorithm = saved.algorithm
        self.params = jax.tree.map(jnp.asarray, saved.params)
        self._users = users
        self._numbers = _number_items(self.items)
        model, num_items = self.algorithm.model, len(self.items)

        def scores(params: Any, local: Any) -> Any:
            every = {"item": jnp.arange(num_items, dtype=jnp.int32)}
            # As in training, not clipped: clipped predictions of the best items are all the same.
            step = Step(jnp.ones(num_items, bool), None)
            return jax.vmap(lambda mine: predict_in(model, params, mine, every, step).reshape(num_items))(local)

        self._scores = jax.jit(scores)

    def __repr__(self) -> str:
        """Describe the recommender in one line."""
        ends = self.saved.ends
        of = self.saved.task.name + (f" from {ends[0]:.6g} to {ends[1]:.6g}" if ends else "")
        return f"Recommender({len(self.items):,} items, trained on {of})"

    def save(self, folder: str | Path) -> None:
        """Save the model to a folder, which `fr.recommend.load` reads.

        Args:
          folder: one that does not exist, or holds another model, which is replaced.
        """
        self.saved.save(folder)

    def evaluate(self, clients: Clients | None = None) -> EvaluationTable:
        """Measure the model on users that took no part in training, next to baselines.

        Args:
          clients: the users; by default the test users that `train` set aside. `Ratings` have the items of the model
            (`fr.data.load(..., item_ids=recommender.items.ids)`).
        """
        if clients is None and self._users is None:
            raise ValueError("`clients` must be given: a model that was loaded has no test users")
        if isinstance(clients, Ratings) and not np.array_equal(clients.item_ids, self.items.ids):
            raise ValueError("`clients` have other items than the model: load them with item_ids=recommender.items.ids")
        viewed = None if clients is None else self.saved.task.view(self.saved.config, clients)
        return evaluate_saved(self.saved, self.algorithm, self._users, viewed)

    def reconstruct(self, people: Person | Sequence[Person] | Clients) -> Any:
        """Reconstruct the local parameters of one person, or of many with the people first in every leaf.

        Args:
          people: `{item: rating}` of one person, a list of them, or `Clients` with columns `item` (numbers of this
            model's items) and `rating`. Items are ids or titles; a title may leave out its year. Items that the model
            does not know are left out with a warning. For a model of clicks, give counts instead of ratings, or 1 if
            there are none; a list, set or array of item ids is one person, too.

        Raises:
          ValueError: the model knows no item of a person, or a rating is far outside the scale of training.
        """
        clients, single = self._clients(people)
        local = reconstruct(self.algorithm, self.params, clients, seed=self.saved.config.seed)
        return jax.tree.map(lambda leaf: leaf[0], local) if single else local

    def predict(self, people: Person | Sequence[Person] | Clients, items: Sequence[Any] | None = None) -> np.ndarray:
        """Predict ratings, within the scale: `(items,)` for one person, `(people, items)` for many.

        Args:
          people: as for `reconstruct`.
          items: ids or titles of items; all that the model knows, in the order of `items.ids`, by default.
        """
        which = slice(None) if items is None else np.array([self._number(item) for item in items], np.int64)
        clients, single = self._clients(people)
        nobody = np.zeros((0, len(self.items)))
        ratings = np.concatenate([part[:, which] for part in (nobody, *map(self._shown, self._scores_of(clients)))])
        return ratings[0] if single else ratings

    def recommend(
        self, people: Person | Sequence[Person] | Clients, n: int = 10, *, least_ratings: int | None = None
    ) -> Any:
        """Recommend what people have not rated: a list of `Recommended` for one person, a list of lists for many.

        Args:
          people: as for `reconstruct`.
          n: how many items; fewer come back if fewer are left.
          least_ratings: only items with at least this many ratings by training users; by default the model's setting.
        """
        clients, single = self._clients(people)
        everyone = [
            [
                Recommended(self.items.ids[k].item(), self.items.title(k), float(score))
                for k, score in zip(best.items, best.scores, strict=True)
            ]
            for best in self.recommend_numbers(clients, n, least_ratings)
        ]
        return everyone[0] if single else everyone

    def recommend_numbers(
        self, clients: Clients, n: int = 10, least_ratings: int | None = None
    ) -> list[Recommendation]:
        """Recommend items to clients, by the items' numbers.

        If predictions are equal, the item with the lower number comes first.

        Args:
          clients: with columns `item` and `rating`, which are logarithms if the model has learned those.
          n: how many items.
          least_ratings: as for `recommend`.
        """
        check_number("least_ratings", least_ratings)
        out = self._rarely_rated(least_ratings)
        recommendations = []
        for part, scores in self._every_score(clients):
            shown = self._shown(scores)
            scores[:, out] = -np.inf
            rows = rows_of(part.starts, part.ends)
            scores[np.repeat(np.arange(len(part)), part.sizes), part.columns["item"][rows]] = -np.inf
            for row, predictions in zip(scores, shown, strict=True):
                best = top_items(row, n)
                recommendations.append(Recommendation(best, predictions[best]))
        return recommendations

    # ---- inside ----

    def _clients(self, people: Person | Sequence[Person] | Clients) -> tuple[Clients, bool]:
        """Return people as clients that the model understands, and whether one person was given."""
        if isinstance(people, Clients):
            clients, single = people, False
        else:
            listed, single = _list_people(people, self.saved.task.items_alone)
            numbered = _number_people(listed, self._numbers)
            sizes = np.array([len(person) for person in numbered], np.int64)
            ends = np.cumsum(sizes)
            item = np.array([item for person in numbered for item in person], np.int32)
            rating = np.array([rating for person in numbered for rating in person.values()], np.float32)
            clients = Clients({"item": item, "rating": rating}, ends - sizes, ends)
        self._check_ratings(clients)
        return self.saved.task.view(self.saved.config, clients), single

    def _check_ratings(self, clients: Clients) -> None:
        """Refuse ratings that are no numbers, or that the scale of training is far from."""
        rating = np.asarray(clients.columns["rating"])[rows_of(clients.starts, clients.ends)]
        if not np.isfinite(rating).all():
            raise ValueError("ratings must be finite")
        accepted = self.saved.task.limits(self.saved.config, self.items)
        if accepted is not None and len(wrong := rating[~accepted.contains(rating)]):
            raise ValueError(f"{accepted.describe_error(float(wrong[0]))}; give ratings on that scale")

    def _number(self, item: Any) -> int:
        if str(item) not in self._numbers:
            raise ValueError(f"the model does not know the item {item!r}")
        return self._numbers[str(item)]

    def _every_score(self, clients: Clients) -> Any:
        """Yield some clients at a time, and their predictions for all items, neither clipped nor restored."""
        for begin in range(0, len(clients), PEOPLE_AT_ONCE):
            part = clients.take(np.arange(begin, min(begin + PEOPLE_AT_ONCE, len(clients))))
            local = reconstruct(self.algorithm, self.params, part, seed=self.saved.config.seed)
            room = max(LEAST_AT_ONCE, 1 << (len(part) - 1).bit_length())  # few sizes are compiled
            padded = jax.tree.map(lambda x, room=room: np.concatenate([x, np.repeat(x[:1], room - len(x), 0)]), local)
            yield part, np.array(self._scores(self.params, padded), np.float64)[: len(part)]

    def _scores_of(self, clients: Clients) -> Iterator[np.ndarray]:
        return (scores for _, scores in self._every_score(clients))

    def _shown(self, scores: np.ndarray) -> np.ndarray:
        """Return predictions within the scale, and as counts if the model has learned their logarithms."""
        return self.saved.task.restore(self.saved.config, self.items, scores)

    def _rarely_rated(self, least: int | None) -> np.ndarray:
        least = self.saved.config.model.least_ratings if least is None else least
        counts = self.items.counts
        return np.zeros(len(self.items), bool) if counts is None else counts < least


def load(folder: str | Path) -> Recommender:
    """Load a trained recommender, ready to serve.

    Args:
      folder: a run of ratings or clicks, or its saved model.

    Raises:
      StorageError: the folder holds no such model, it is damaged, its training failed, or it is of text; the
        message says what to do.

    Example:
      >>> fr.recommend.load("runs/mine").recommend({"Alien": 5, "Brazil": 4}, n=10)  # doctest: +SKIP
    """
    return Recommender(open_for(RATINGS, folder, CLICKS))


# ---- people as Python has them ----


def _number_items(items: Items) -> dict[str, int]:
    """Return the numbers of items by their ids as text, and by titles, with or without a year, that name one item."""
    ids = {str(item): k for k, item in enumerate(items.ids.tolist())}
    titles = [] if items.titles is None else items.titles.tolist()
    without_year = [YEAR.sub("", title) for title in titles]
    times = Counter(without_year)
    short = {title: k for k, title in enumerate(without_year) if times[title] == 1}
    return short | {title: k for k, title in enumerate(titles)} | ids


def _list_people(people: Any, items_alone: bool) -> tuple[list[Mapping[Any, float]], bool]:
    """Return the items of each person, and whether there is one person rather than a list."""
    entries = [] if isinstance(people, Mapping) or not _is_collection(people) else _to_list(people)
    # An empty list is nobody; an empty set or array is one person.
    single = not _is_collection(entries[0]) if entries else not isinstance(people, list | tuple)
    persons = [_as_person(person, items_alone) for person in ([entries or people] if single else entries)]
    if None in persons:
        raise TypeError(f"`people` must be {CLICKED if items_alone else RATED} (got {people!r:.60})")
    return [person for person in persons if person is not None], single


def _as_person(person: Any, items_alone: bool) -> Mapping[Any, float] | None:
    """Return the items of a person; None if these are none."""
    if isinstance(person, Mapping):
        return person
    items = _to_list(person) if items_alone and _is_collection(person) else [()]
    return None if any(map(_is_collection, items)) else Counter(items)


def _to_list(values: Iterable[Any]) -> list[Any]:
    """Return values in their order; those of a set, whose order is chance, sorted, so that results repeat."""
    return sorted(values, key=str) if isinstance(values, Set) else list(values)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _number_people(people: Sequence[Mapping[Any, float]], numbers: Mapping[str, int]) -> list[dict[int, float]]:
    """Return what each person has by the numbers of items, and warn of items that the model does not know."""
    missing: list[Any] = []
    for k, person in enumerate(people):
        unknown = [item for item in person if str(item) not in numbers]
        if unknown and len(unknown) == len(person):
            raise ValueError(
                f"the model knows none of the items of person {k}: {_name_ids(unknown)}. Items are named by the ids or "
                f"titles of the training data, such as {', '.join(list(numbers)[-3:])}"
            )
        missing += unknown
    if missing:
        total = sum(map(len, people))
        warn_caller(f"left out {len(missing)} of {total} items, which the model does not know: {_name_ids(missing)}")
    return [{numbers[str(item)]: value for item, value in p.items() if str(item) in numbers} for p in people]


def _name_ids(ids: Sequence[Any]) -> str:
    return ", ".join(map(str, ids[:NAMED_IDS])) + (f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else "")
