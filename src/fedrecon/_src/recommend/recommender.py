"""A trained recommender in Python: reconstructs, predicts and recommends for one person or many, compiled once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.core.model import Step, predict_in
from fedrecon._src.recommend.config import RatingsConfig
from fedrecon._src.recommend.people import as_people, known_items
from fedrecon._src.recommend.ranking import Recommendation, top_items
from fedrecon._src.recommend.rating_model import accepted_ratings, scale_ends
from fedrecon._src.recommend.saved_models import SavedModel, open_for
from fedrecon._src.recommend.tasks import CLICKS, RATINGS, Items
from fedrecon._src.simulation.personalization import reconstruct

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
    """

    item: Any
    title: str
    rating: float


class Recommender:
    """A saved model of ratings or clicks, ready to serve."""

    def __init__(self, saved: SavedModel[Items]):
        """Serve with a model; nothing is compiled before it is needed."""
        self.saved, self.items = saved, saved.legend
        self._algorithm = saved.algorithm
        self._params = jax.tree.map(jnp.asarray, saved.params)
        self._numbers = {str(own): k for k, own in enumerate(self.items.ids.tolist())}
        model, num_items = self._algorithm.model, len(self.items)

        def scores(params: Any, local: Any) -> Any:
            every = {"item": jnp.arange(num_items, dtype=jnp.int32)}
            # As in training, not clipped: clipped predictions of the best items are all the same.
            step = Step(jnp.ones(num_items, bool), None)
            return jax.vmap(lambda mine: predict_in(model, params, mine, every, step).reshape(num_items))(local)

        self._scores = jax.jit(scores)

    def __repr__(self) -> str:
        """Describe the recommender in one line."""
        ends = shown_scale(self.saved) if self.saved.task is RATINGS else None
        of = self.saved.task.name + (f" from {ends[0]:.6g} to {ends[1]:.6g}" if ends else "")
        return f"Recommender({len(self.items):,} items, trained on {of})"

    def reconstruct(self, people: Person | Sequence[Person] | Clients) -> Any:
        """Reconstruct the local parameters of one person, or of many with the people first in every leaf.

        Args:
          people: `{item id: rating}` of one person, a list of them, or `Clients` with columns `item` (numbers of this
            model's items) and `rating`. Items that the model does not know are left out with a warning. For a model of
            clicks, give counts instead of ratings, or 1 if there are none; a list, set or array of item ids is one
            person, too.

        Raises:
          ValueError: the model knows no item of a person, or a rating is far outside the scale of training.
        """
        clients, alone = self._clients(people)
        local = reconstruct(self._algorithm, self._params, clients, seed=self.saved.config.seed)
        return jax.tree.map(lambda leaf: leaf[0], local) if alone else local

    def predict(self, people: Person | Sequence[Person] | Clients, items: Sequence[Any] | None = None) -> np.ndarray:
        """Predict ratings, within the scale: `(items,)` for one person, `(people, items)` for many.

        Args:
          people: as for `reconstruct`.
          items: ids of items; all that the model knows, in the order of `items.ids`, by default.
        """
        which = slice(None) if items is None else np.array([self._number(item) for item in items], np.int64)
        clients, alone = self._clients(people)
        nobody = np.zeros((0, len(self.items)))
        found = np.concatenate([part[:, which] for part in (nobody, *map(self._shown, self._scores_of(clients)))])
        return found[0] if alone else found

    def recommend(
        self, people: Person | Sequence[Person] | Clients, n: int = 10, *, least_ratings: int | None = None
    ) -> Any:
        """Recommend what people have not rated: a list of `Recommended` for one person, a list of lists for many.

        Args:
          people: as for `reconstruct`.
          n: how many items; fewer come back if fewer are left.
          least_ratings: only items with at least this many ratings by training users; by default the model's setting.
        """
        clients, alone = self._clients(people)
        everyone = [
            [
                Recommended(self.items.ids[k].item(), self.items.title(k), float(score))
                for k, score in zip(found.items, found.scores, strict=True)
            ]
            for found in self.recommend_numbers(clients, n, least_ratings)
        ]
        return everyone[0] if alone else everyone

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
        if least_ratings is not None and least_ratings < 0:
            raise ValueError(f"`least_ratings` is {least_ratings}; it must be at least 0")
        out = self._rarely_rated(least_ratings)
        found = []
        for part, scores in self._every_score(clients):
            shown = self._shown(scores)
            scores[:, out] = -np.inf
            rows = rows_of(part.starts, part.ends)
            scores[np.repeat(np.arange(len(part)), part.sizes), part.columns["item"][rows]] = -np.inf
            for row, predictions in zip(scores, shown, strict=True):
                best = top_items(row, n)
                found.append(Recommendation(best, predictions[best]))
        return found

    # ---- inside ----

    def _clients(self, people: Person | Sequence[Person] | Clients) -> tuple[Clients, bool]:
        """Return people as clients that the model understands, and whether one person was given."""
        if isinstance(people, Clients):
            clients, alone = people, False
        else:
            many, alone = as_people(people, clicks=self.saved.task is CLICKS)
            known = known_items(many, self._numbers)
            sizes = np.array([len(one) for one in known], np.int64)
            ends = np.cumsum(sizes)
            item = np.array([item for one in known for item in one], np.int32)
            rating = np.array([rating for one in known for rating in one.values()], np.float32)
            clients = Clients({"item": item, "rating": rating}, ends - sizes, ends)
        self._check_ratings(clients)
        return self.saved.task.view(self.saved.config, clients), alone

    def _check_ratings(self, clients: Clients) -> None:
        """Refuse ratings that are no numbers, or that the scale of training is far from."""
        rating = np.asarray(clients.columns["rating"])[rows_of(clients.starts, clients.ends)]
        if not np.isfinite(rating).all():
            raise ValueError("some ratings are not finite numbers")
        config = self.saved.config
        accepted = accepted_ratings(config, self.items) if isinstance(config, RatingsConfig) else None
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
            local = reconstruct(self._algorithm, self._params, part, seed=self.saved.config.seed)
            room = max(LEAST_AT_ONCE, 1 << (len(part) - 1).bit_length())  # few sizes are compiled
            padded = jax.tree.map(lambda x, room=room: np.concatenate([x, np.repeat(x[:1], room - len(x), 0)]), local)
            yield part, np.array(self._scores(self._params, padded), np.float64)[: len(part)]

    def _scores_of(self, clients: Clients) -> Iterator[np.ndarray]:
        return (scores for _, scores in self._every_score(clients))

    def _shown(self, scores: np.ndarray) -> np.ndarray:
        """Return predictions within the scale, and as counts if the model has learned their logarithms."""
        if self.saved.task is not RATINGS:
            return scores.copy()
        scale, ends = self.saved.config.model.scale, shown_scale(self.saved)
        if scale is not None and scale.transform == "log1p":
            scores = np.expm1(np.minimum(scores, scale.high))
        return scores.copy() if ends is None else np.clip(scores, *ends)

    def _rarely_rated(self, least: int | None) -> np.ndarray:
        least = self.saved.config.model.least_ratings if least is None else least
        counts = self.items.counts
        return np.zeros(len(self.items), bool) if counts is None else counts < least


def shown_scale(saved: SavedModel[Items]) -> tuple[float, float] | None:
    """Return the lowest and the highest rating that is shown, in the data's own scale; None if they are not known."""
    return scale_ends(saved.config.model, saved.legend)


def load(folder: str | Path) -> Recommender:
    """Load a trained recommender, ready to serve.

    Args:
      folder: a run of ratings or clicks, or its saved model.

    Raises:
      StorageError: the folder holds no such model, it is damaged, its training failed, or it is of text; the
        message says what to do.
    """
    return Recommender(open_for(RATINGS, folder, CLICKS))
