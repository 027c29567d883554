"""Trained models that serve one person or many: a recommender, and a completer that learns from what they write."""

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
from fedrecon._src.core.display import warn_caller
from fedrecon._src.core.model import Step, predict_in
from fedrecon._src.data import DataError, Ratings, Vocabulary, personal_text, split_text
from fedrecon._src.data.sentences import prompt_columns
from fedrecon._src.recommend.evaluation_table import EvaluationTable, evaluate_saved, personal_predictions
from fedrecon._src.recommend.personal_words import PersonalWords, Suggestion, expected_counts
from fedrecon._src.recommend.ranking import top_items
from fedrecon._src.recommend.saved_models import SavedModel, open_for
from fedrecon._src.recommend.task import Users
from fedrecon._src.recommend.tasks import CLICKS, RATINGS, TEXT, Items
from fedrecon._src.recommend.word_evaluation import predict_sentences
from fedrecon._src.simulation.evaluation import reconstruct
from fedrecon._src.simulation.training import Run

NAMED_IDS = 5  # in a message
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


class _Served:
    """A trained model that serves, with the users that training set aside."""

    def __init__(self, saved: SavedModel[Any], users: Users | None, run: Run | None):
        self.saved, self.run, self._users = saved, run, users
        self.algorithm: Algorithm = saved.algorithm

    def save(self, folder: str | Path) -> None:
        """Save the model to a folder, which `fr.recommend.load` or `load_completer` reads.

        Args:
          folder: one that does not exist, or holds another model, which is replaced.
        """
        self.saved.save(folder)


class Recommender(_Served):
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
        super().__init__(saved, users, run)
        self.items, self.params = saved.legend, jax.tree.map(jnp.asarray, saved.params)
        self._numbers = _number_items(self.items)
        model, num_items = self.algorithm.model, len(self.items)

        def scores(params: Any, local: Any) -> Any:
            every = {"item": jnp.arange(num_items, dtype=jnp.int32)}
            # As in training, not clipped: clipped predictions of the best items are all the same.
            step = Step(jnp.ones(num_items, bool), None)
            return jax.vmap(lambda person: predict_in(model, params, person, every, step).reshape(num_items))(local)

        self._scores = jax.jit(scores)

    def __repr__(self) -> str:
        """Describe the recommender in one line."""
        ends = self.saved.task.ends(self.saved.config, self.items)
        of = self.saved.task.name + (f" from {ends[0]:.6g} to {ends[1]:.6g}" if ends else "")
        return f"Recommender({len(self.items):,} items, trained on {of})"

    def evaluate(self, clients: Clients | None = None) -> EvaluationTable:
        """Measure the model on users that took no part in training, next to baselines.

        Args:
          clients: the users; by default the test users that `train` set aside. `Ratings` have the items of the model
            (`fr.data.load(..., item_ids=recommender.items.ids)`).
        """
        if isinstance(clients, Ratings) and not np.array_equal(clients.item_ids, self.items.ids):
            raise ValueError("`clients` have other items than the model: load them with item_ids=recommender.items.ids")
        return evaluate_saved(self.saved, self._users, clients)

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
        parts = [np.zeros((0, len(self.items))), *(shown for _, _, shown in self._every_score(clients))]
        ratings = np.concatenate([part[:, which] for part in parts])
        return ratings[0] if single else ratings

    def recommend(
        self, people: Person | Sequence[Person] | Clients, n: int = 10, *, least_ratings: int | None = None
    ) -> Any:
        """Recommend what people have not rated: a list of `Recommended` for one person, a list of lists for many.

        Args:
          people: as for `reconstruct`.
          n: how many items; fewer come back if fewer are left. Of equal predictions, those of lower numbers come first.
          least_ratings: only items with at least this many ratings by training users; by default the model's setting.
        """
        check_number("least_ratings", least_ratings)
        least = self.saved.config.model.least_ratings if least_ratings is None else least_ratings
        (clients, single), items = self._clients(people), self.items
        everyone: list[list[Recommended]] = []
        for part, scores, shown in self._every_score(clients):
            if items.counts is not None:
                scores[:, items.counts < least] = -np.inf
            rows = rows_of(part.starts, part.ends)
            scores[np.repeat(np.arange(len(part)), part.sizes), part.columns["item"][rows]] = -np.inf
            everyone += [
                [Recommended(items.ids[k].item(), items.title(k), float(ratings[k])) for k in top_items(row, n)]
                for row, ratings in zip(scores, shown, strict=True)
            ]
        return everyone[0] if single else everyone

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
        rating = np.asarray(clients.columns["rating"])[rows_of(clients.starts, clients.ends)]
        if not np.isfinite(rating).all():
            raise ValueError("ratings must be finite")
        accepted = self.saved.task.limits(self.saved.config, self.items)
        if accepted is not None and len(wrong := rating[~accepted.contains(rating)]):
            raise ValueError(f"{accepted.describe_error(float(wrong[0]))}; give ratings on that scale")
        return self.saved.task.view(self.saved.config, clients), single

    def _number(self, item: Any) -> int:
        if str(item) not in self._numbers:
            raise ValueError(f"the model does not know the item {item!r}")
        return self._numbers[str(item)]

    def _every_score(self, clients: Clients) -> Iterator[tuple[Clients, np.ndarray, np.ndarray]]:
        """Yield some clients at a time, and their predictions for all items: as the model makes and as people see them.

        What people see is within the scale, and a count if the model has learned logarithms.
        """
        for begin in range(0, len(clients), PEOPLE_AT_ONCE):
            part = clients.take(np.arange(begin, min(begin + PEOPLE_AT_ONCE, len(clients))))
            local = reconstruct(self.algorithm, self.params, part, seed=self.saved.config.seed)
            room = max(LEAST_AT_ONCE, 1 << (len(part) - 1).bit_length())  # few sizes are compiled
            padded = jax.tree.map(lambda x, room=room: np.concatenate([x, np.repeat(x[:1], room - len(x), 0)]), local)
            scores = np.array(self._scores(self.params, padded), np.float64)[: len(part)]
            yield part, scores, self.saved.task.restore(self.saved.config, self.items, scores)


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
    without_year = [re.sub(r" \(\d{4}\)$", "", title) for title in titles]
    times = Counter(without_year)
    short = {title: k for k, title in enumerate(without_year) if times[title] == 1}
    return short | {title: k for k, title in enumerate(titles)} | ids


def _list_people(people: Any, items_alone: bool) -> tuple[list[Mapping[Any, float]], bool]:
    """Return the items of each person, and whether there is one person rather than a list."""

    def items_of(person: Any) -> Mapping[Any, float]:
        if isinstance(person, Mapping):
            return person
        items = _to_list(person) if items_alone and _is_collection(person) else [()]
        if any(map(_is_collection, items)):
            raise TypeError(f"`people` must be {CLICKED if items_alone else RATED} (got {people!r:.60})")
        return Counter(items)

    entries = [] if isinstance(people, Mapping) or not _is_collection(people) else _to_list(people)
    # An empty list is nobody; an empty set or array is one person.
    single = not _is_collection(entries[0]) if entries else not isinstance(people, list | tuple)
    return [items_of(person) for person in ([entries or people] if single else entries)], single


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


# ---- next words ----


class Completer(_Served):
    """A trained model of the next word, ready to serve.

    Attributes:
      algorithm: what was trained.
      params: its global parameters.
      vocabulary: the words that it knows.
      run: the history of the training; None for a model that was loaded.

    Example:
      >>> import fedrecon as fr
      >>> completer = fr.recommend.load_completer("runs/words")  # doctest: +SKIP
      >>> completer.suggest("see you", text=["See you at the Zyzzyva."], n=3)  # doctest: +SKIP
    """

    def __init__(self, saved: SavedModel[Vocabulary], users: Users | None = None, run: Run | None = None):
        """Serve with a model; nothing is compiled before it is needed."""
        super().__init__(saved, users, run)
        self.vocabulary, self.params = saved.legend, saved.params

    def __repr__(self) -> str:
        """Describe the completer in one line."""
        return f"Completer({len(self.vocabulary):,} words)"

    def evaluate(self, clients: Clients | None = None) -> EvaluationTable:
        """Measure the model on clients that took no part in training, next to baselines.

        Args:
          clients: with sentences in the words of the model; by default the test clients that `train_text` set aside.
        """
        return evaluate_saved(self.saved, self._users, clients)

    def person(self, text: str | Sequence[str] = ()) -> PersonalCompleter:
        """Return what serves one person, and learns from what they write.

        Args:
          text: anything the person wrote before.

        Example:
          >>> import fedrecon as fr
          >>> person = fr.recommend.load_completer("runs/words").person("See you at the Zyzzyva.")  # doctest: +SKIP
          >>> person.learn("The Zyzzyva is closed.")  # doctest: +SKIP
          >>> person.suggest("see you at the", n=3)  # doctest: +SKIP
        """
        return PersonalCompleter(self, text if isinstance(text, str) else "\n".join(text))

    def suggest(self, prompt: str, text: str | Sequence[str] = (), n: int = 5) -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Args:
          prompt: the beginning of a sentence.
          text: anything the person wrote; without it, suggestions are the same for everybody.
          n: how many suggestions.
        """
        return self.person(text).suggest(prompt, n)


class PersonalCompleter:
    """A model of the next word for one person, who goes on writing.

    Attributes:
      words: what has been learned about the person.
      sentences: from how many sentences.

    Example:
      >>> import fedrecon as fr
      >>> person = fr.recommend.load_completer("runs/words").person()  # doctest: +SKIP
      >>> person.learn("See you at the Zyzzyva.")  # doctest: +SKIP
      >>> person.suggest("see you at the", prefix="z")  # doctest: +SKIP
    """

    def __init__(self, completer: Completer, text: str):
        """Learn a person's text; embeddings of their own words, if the model has such, are reconstructed from it."""
        self._saved, settings = completer.saved, completer.saved.config.model
        self.words, self.sentences = PersonalWords(completer.vocabulary, biased=settings.local == "output_bias"), 0
        columns = personal_text(text, completer.vocabulary, settings.max_words).columns
        newest = slice(-(completer.algorithm.method.support_limit or 0), None)
        self._predict = personal_predictions(self._saved, {name: column[newest] for name, column in columns.items()})
        self.learn(text)

    def learn(self, text: str) -> None:
        """Learn what the person has written.

        Args:
          text: whole sentences.
        """
        vocabulary, max_words = self.words.vocabulary, self._saved.config.model.max_words
        sentences = [words[:max_words] for words in split_text(text)]
        columns = personal_text(text, vocabulary, max_words).columns
        for words, probabilities in zip(sentences, predict_sentences(columns, self._predict), strict=True):
            self.words.learn(words, expected_counts(probabilities, vocabulary.first_oov), ended=len(words) < max_words)
        self.sentences += len(sentences)

    def suggest(self, prompt: str | Sequence[str], n: int = 5, *, prefix: str = "") -> list[Suggestion]:
        """Suggest the `n` most probable next words.

        Args:
          prompt: the beginning of a sentence, as text or as words.
          n: how many suggestions.
          prefix: the letters of the next word that are typed already.
        """
        check_number("n", n, least=1)
        max_words = self._saved.config.model.max_words
        words = read_prompt(prompt, max_words) if isinstance(prompt, str) else prompt
        columns, position = prompt_columns(words, self.words.vocabulary, max_words)
        return self.words.suggest(self._predict(columns)[:, position], words, n, prefix)


def load_completer(folder: str | Path) -> Completer:
    """Load a trained model of the next word, ready to serve.

    Args:
      folder: a run of text, or its saved model.

    Raises:
      StorageError: the folder holds no such model, it is damaged, its training failed, or it is of something else.

    Example:
      >>> import fedrecon as fr
      >>> fr.recommend.load_completer("runs/words").suggest("see you")  # doctest: +SKIP
    """
    return Completer(open_for(TEXT, folder))


def read_prompt(prompt: str, max_words: int) -> list[str]:
    """Return the words of a prompt that a model reads; the mark that begins a sentence takes one place."""
    sentences = split_text(prompt)
    if not sentences:
        raise DataError(f"the prompt {prompt!r} has no words: give the beginning of a sentence")
    return sentences[-1][max(0, len(sentences[-1]) - max_words + 1) :]
