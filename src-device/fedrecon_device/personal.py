"""One person on one device: their examples, their local parameters, and what a model says to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrecon_device import words as text_words
from fedrecon_device.bundle import ITEMS, WORDS, Bundle
from fedrecon_device.errors import BundleError, StoreError
from fedrecon_device.ranking import clipped, nearest, rank
from fedrecon_device.store import Store


class Added(NamedTuple):
    """What happened to examples: how many are kept, and the ids that the model does not know."""

    kept: int
    unknown: list[int | str]


class Recommended(NamedTuple):
    """An item for a person.

    Attributes:
      item: its id in the data.
      label: what it is called; no two items have the same label.
      score: the predicted rating, within the scale; for a model of clicks about 1 where it is likely, 0 where not.
      because: labels of the nearest items among those that the person rated at least as high as their mean, or has.
    """

    item: int | str
    label: str
    score: float
    because: list[str]


class Personal:
    """A person's model: it grows with their examples, and all of it is in one file of theirs."""

    def __init__(self, bundle: Bundle | str | Path, store: str | Path):
        """Open a bundle for a person.

        Args:
          bundle: the bundle, or its folder.
          store: the person's file; made by the first `add`, readable by its owner alone. Delete it, or call `forget`,
            and nothing about the person is left.
        """
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        self._store = Store(store)

    # ---- what is kept ----

    def kept(self) -> dict[str, Any]:
        """Return all that is kept about the person, as the file holds it; empty if there is no file.

        Raises:
          StoreError: the file is damaged, or holds examples of another kind of model.
        """
        found = self._store.read() or {}
        if found and not _fits(self.bundle, found.get("examples")):
            raise StoreError(
                f"{self._store.path} holds no examples for a model of {self.bundle.task}; delete it to start over"
            )
        return found

    def forget(self) -> None:
        """Delete the person's file."""
        self._store.delete()

    def add(
        self, columns: Mapping[str, Sequence[Any]] | None = None, *, text: str | None = None, **named: Sequence[Any]
    ) -> Added:
        """Add examples, newest last; local parameters are reconstructed when they are next needed.

        Args:
          columns: one sequence per feature, all of the same length. For ratings: `item`, with the ids of the data, and
            `rating`; a second rating of an item replaces the first, and items that the model does not know are left
            out. For clicks: `item`, and how often in `rating` if that is known.
          text: for a model of text, what the person wrote.
          **named: the columns, each by its name.
        """
        kept = self.kept()
        if self.bundle.task == "text":
            if text is None:
                raise ValueError("this is a model of text: give `text`")
            sentences = text_words.split_text(text)
            examples: Any = [*kept.get("examples", []), *sentences]
            added = Added(len(sentences), [])
        else:
            given = {**(columns or {}), **named}
            if self.bundle.ranks:
                examples, added = self._rated(kept.get("examples", []), given)
            else:
                examples, added = self._plain(kept.get("examples", {}), given)
        self._store.write({"examples": examples, "model": None, "local": None, "before": _before(kept)})
        return added

    def _rated(self, old: list[list[Any]], given: Mapping[str, Sequence[Any]]) -> tuple[list[list[Any]], Added]:
        if self.bundle.task == "clicks" and set(given) == {"item"}:
            given = {**given, "rating": [1] * len(given["item"])}
        if set(given) != {"item", "rating"} or len(given["item"]) != len(given["rating"]):
            raise ValueError(f"{self.bundle.task} need `item` and `rating`, of the same length; got {sorted(given)}")
        pairs = [[_plain(item), float(rating)] for item, rating in zip(given["item"], given["rating"], strict=True)]
        unknown = [item for item, _ in pairs if item not in self.bundle.items.index]
        bad = next((rating for _, rating in pairs if not np.isfinite(rating)), None)
        if bad is not None:
            raise ValueError(f"a rating is {bad}; it must be a number")
        new = {item: rating for item, rating in pairs if item in self.bundle.items.index}  # the last one is used
        again = [pair for pair in old if pair[0] not in new]
        return [*again, *map(list, new.items())], Added(len(new), unknown)

    def _plain(
        self, old: Mapping[str, Sequence[Any]], given: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, list[Any]], Added]:
        lengths = {name: len(column) for name, column in given.items()}
        if set(given) != set(self.bundle.columns) or len(set(lengths.values())) != 1:
            raise ValueError(f"examples need {list(self.bundle.columns)} of the same length; got {lengths}")
        found = {name: [*old.get(name, []), *np.asarray(column).tolist()] for name, column in given.items()}
        return found, Added(next(iter(lengths.values())), [])

    # ---- what the model makes of it ----

    def refresh(self, *, warm: bool | None = None) -> dict[str, np.ndarray]:
        """Reconstruct the local parameters from the newest examples and keep them with the digest of the model.

        Args:
          warm: continue from the local parameters that this model had before, on all examples; by default where the
            bundle says that it helps: a few more steps of gradient descent, not least squares.

        Returns:
          The local parameters by path.
        """
        kept = self.kept()
        before = _before(kept)
        wanted = self.bundle.warm_start if warm is None else warm
        start = None
        if wanted and before and before["model"] == self.bundle.model_digest:
            start = _arrays(before["local"], self.bundle.start)
        local = self.bundle.reconstruct(self._columns(kept), start)
        if kept:
            numbers = {path: leaf.tolist() for path, leaf in local.items()}
            after = {"model": self.bundle.model_digest, "local": numbers}
            self._store.write({"examples": kept["examples"], **after, "before": None})
        return local

    def local(self) -> dict[str, np.ndarray]:
        """Return the local parameters: the kept ones if they are for this model and all examples, or new ones."""
        kept = self.kept()
        if kept.get("local") is not None and kept.get("model") == self.bundle.model_digest:
            found = _arrays(kept["local"], self.bundle.start)
            if found is not None:
                return found
        return self.refresh()

    def _columns(self, kept: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the examples as the graph takes them."""
        if self.bundle.ranks:
            index = self.bundle.items.index  # of this bundle: a new one may know other items
            pairs = [(index[item], rating) for item, rating in kept.get("examples", []) if item in index]
            return {
                "item": np.array([item for item, _ in pairs], np.int32),
                "rating": np.array([rating for _, rating in pairs], np.float32),
            }
        if self.bundle.task == "text":
            return self._vocabulary.columns(kept.get("examples", [])[-self.bundle.most :])
        examples = kept.get("examples", {})
        return {
            name: np.asarray(examples.get(name, []), about["dtype"]).reshape(-1, *about["shape"])
            for name, about in self.bundle.columns.items()
        }

    def predict(self, asked: Any) -> np.ndarray:
        """Predict for this person.

        Args:
          asked: for ratings and clicks, ids of items, to get their ratings, within the scale, or scores. Otherwise
            columns of examples.

        Raises:
          ValueError: the model does not know an item.
        """
        if not self.bundle.ranks:
            return self.bundle.predict(self.local(), asked)
        ids = [_plain(item) for item in asked]
        unknown = next((item for item in ids if item not in self.bundle.items.index), None)
        if unknown is not None:
            raise ValueError(f"the model does not know item {unknown!r}; see {ITEMS} for those it knows")
        items = np.array([self.bundle.items.index[item] for item in ids], np.int32)
        return clipped(self.bundle.predict(self.local(), {"item": items}), self.bundle.scale)

    def recommend(self, n: int = 10) -> list[Recommended]:
        """Recommend items that the person has not rated or chosen, and that enough others have, best first.

        Args:
          n: how many; fewer come back if there are fewer.
        """
        if not self.bundle.ranks:
            raise ValueError(f"this is a model of {self.bundle.task}, which recommends nothing")
        if n < 1:
            raise ValueError(f"`n` is {n}; it must be at least 1")
        items = self.bundle.items
        local = self.local()
        scores = self.bundle.predict(local, {"item": np.arange(len(items), dtype=np.int32)})
        columns = self._columns(self.kept())
        rated = columns["item"].tolist()
        liked = columns["item"][columns["rating"] >= columns["rating"].mean()].tolist() if rated else []
        best = rank(scores, n, left_out=rated, counts=items.counts, least=self.bundle.least_count)
        shown = clipped(scores, self.bundle.scale)
        table = self.bundle.item_table
        found = []
        for k in best.tolist():
            near = [] if table is None else nearest(table, k, liked)
            found.append(Recommended(items.ids[k], items.labels[k], float(shown[k]), [items.labels[j] for j in near]))
        return found

    def complete(self, prompt: str, n: int = 5) -> list[text_words.Suggestion]:
        """Suggest the `n` most probable next words after the beginning of a sentence, the person's own among them.

        Args:
          prompt: the beginning of a sentence.
          n: how many; fewer come back if there are fewer words.
        """
        if self.bundle.task != "text":
            raise ValueError(f"this is a model of {self.bundle.task}, which completes nothing")
        if n < 1:
            raise ValueError(f"`n` is {n}; it must be at least 1")
        columns, position = self._vocabulary.prompt(prompt)
        logits = self.bundle.predict(self.local(), columns)[0, position]
        own = self._vocabulary.own_words(self.kept().get("examples", []))
        return self._vocabulary.suggest(logits, own, n)

    @property
    def _vocabulary(self) -> text_words.Vocabulary:
        if not hasattr(self, "_words"):
            content = self.bundle.read_json(WORDS)
            try:
                self._words = text_words.Vocabulary(content["words"], content["buckets"], content["max_words"])
            except (KeyError, TypeError, ValueError) as problem:
                raise BundleError(f"{WORDS} is damaged: {problem!r}") from None
        return self._words


def _fits(bundle: Bundle, examples: Any) -> bool:
    """Say whether what a file holds are examples for a bundle."""
    if bundle.ranks:
        return isinstance(examples, list) and all(
            isinstance(one, list)
            and len(one) == 2
            and isinstance(one[0], (int, str))
            and isinstance(one[1], (int, float))
            for one in examples
        )
    if bundle.task == "text":
        return isinstance(examples, list) and all(
            isinstance(words, list) and all(isinstance(word, str) for word in words) for words in examples
        )
    return isinstance(examples, dict) and all(isinstance(column, list) for column in examples.values())


def _before(kept: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest local parameters that are kept, with the digest of their model, to continue from."""
    if kept.get("local") is not None:
        return {"model": kept.get("model"), "local": kept["local"]}
    before = kept.get("before")
    return before if isinstance(before, dict) and {"model", "local"} <= set(before) else None


def _arrays(local: Any, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Return kept local parameters as arrays; None if they do not fit the bundle."""
    try:
        found = {path: np.asarray(local[path], leaf.dtype) for path, leaf in like.items()}
    except (KeyError, TypeError, ValueError):
        return None
    return found if all(found[path].shape == leaf.shape for path, leaf in like.items()) else None


def _plain(value: Any) -> Any:
    """Return a number or text as a JSON value."""
    return value.item() if isinstance(value, np.generic) else value
