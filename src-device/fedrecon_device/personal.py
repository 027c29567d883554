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
    """The result of `add`: how many examples were stored, and the ids that the model does not know."""

    stored: int
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
    """A person's model, reconstructed from their examples, which are stored in one file."""

    def __init__(self, bundle: Bundle | str | Path, store: str | Path):
        """Open a bundle for a person.

        Args:
          bundle: the bundle, or its folder.
          store: the person's file; made by the first `add`, readable by its owner alone. Delete it, or call `forget`,
            and nothing about the person is left.
        """
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        self.store = Store(store)

    # ---- storage ----

    def stored(self) -> dict[str, Any]:
        """Return everything stored about the person, as in the file; empty if there is no file.

        Raises:
          StoreError: the file is damaged, or holds examples of another kind of model.
        """
        saved = self.store.read() or {}
        if saved and not _fits(self.bundle, saved.get("examples")):
            raise StoreError(
                f"{self.store.path} holds no examples for a model of {self.bundle.task}; delete it to start over"
            )
        return saved

    def forget(self) -> None:
        """Delete the person's file."""
        self.store.delete()

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
        saved = self.stored()
        if self.bundle.task == "text":
            if text is None:
                raise ValueError("`text` must be given: this is a model of text")
            sentences = text_words.split_text(text)
            examples: Any = [*saved.get("examples", []), *sentences]
            added = Added(len(sentences), [])
        else:
            new_columns = {**(columns or {}), **named}
            if self.bundle.ranks:
                examples, added = self._rated(saved.get("examples", []), new_columns)
            else:
                examples, added = self._plain(saved.get("examples", {}), new_columns)
        self.store.write({**saved, "examples": examples, "model": None, "local": None, "before": _before(saved)})
        return added

    def _rated(self, old: list[list[Any]], columns: Mapping[str, Sequence[Any]]) -> tuple[list[list[Any]], Added]:
        if self.bundle.task == "clicks" and set(columns) == {"item"}:
            columns = {**columns, "rating": [1] * len(columns["item"])}
        if set(columns) != {"item", "rating"} or len(columns["item"]) != len(columns["rating"]):
            raise ValueError(f"{self.bundle.task} need `item` and `rating`, of the same length; got {sorted(columns)}")
        pairs = [[_plain(item), float(rating)] for item, rating in zip(columns["item"], columns["rating"], strict=True)]
        unknown = [item for item, _ in pairs if item not in self.bundle.items.index]
        bad = next((rating for _, rating in pairs if not np.isfinite(rating)), None)
        if bad is not None:
            raise ValueError(f"`rating` must be a number (got {bad})")
        new = {item: rating for item, rating in pairs if item in self.bundle.items.index}  # the last one is used
        again = [pair for pair in old if pair[0] not in new]
        return [*again, *map(list, new.items())], Added(len(new), unknown)

    def _plain(
        self, old: Mapping[str, Sequence[Any]], columns: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, list[Any]], Added]:
        lengths = {name: len(column) for name, column in columns.items()}
        if set(columns) != set(self.bundle.columns) or len(set(lengths.values())) != 1:
            raise ValueError(f"examples need {list(self.bundle.columns)} of the same length; got {lengths}")
        merged = {name: [*old.get(name, []), *np.asarray(column).tolist()] for name, column in columns.items()}
        return merged, Added(next(iter(lengths.values())), [])

    # ---- what the model makes of it ----

    def refresh(self, *, warm: bool | None = None) -> dict[str, np.ndarray]:
        """Reconstruct the local parameters from the newest examples and keep them with the digest of the model.

        Args:
          warm: continue from the local parameters that this model had before, on all examples; by default where the
            bundle says that it helps: a few more steps of gradient descent, not least squares.

        Returns:
          The local parameters by path.
        """
        saved = self.stored()
        before = _before(saved)
        continues = self.bundle.warm_start if warm is None else warm
        start = None
        if continues and before and before["model"] == self.bundle.model_digest:
            start = _arrays(before["local"], self.bundle.start)
        local = self.bundle.reconstruct(self._columns(saved), start)
        if saved:
            numbers = {path: leaf.tolist() for path, leaf in local.items()}
            after = {"model": self.bundle.model_digest, "local": numbers}
            self.store.write({**saved, **after, "before": None})
        return local

    def local(self) -> dict[str, np.ndarray]:
        """Return the local parameters: the stored ones if they are for this model and all examples, or new ones."""
        saved = self.stored()
        if saved.get("local") is not None and saved.get("model") == self.bundle.model_digest:
            arrays = _arrays(saved["local"], self.bundle.start)
            if arrays is not None:
                return arrays
        return self.refresh()

    def columns(self) -> dict[str, np.ndarray]:
        """Return the person's examples as graphs take them, oldest first."""
        return self._columns(self.stored())

    def _columns(self, saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the examples as the graph takes them."""
        if self.bundle.ranks:
            index = self.bundle.items.index  # of this bundle: a new one may know other items
            pairs = [(index[item], rating) for item, rating in saved.get("examples", []) if item in index]
            return {
                "item": np.array([item for item, _ in pairs], np.int32),
                "rating": np.array([rating for _, rating in pairs], np.float32),
            }
        if self.bundle.task == "text":
            return self._vocabulary.columns(saved.get("examples", [])[-self.bundle.most :])
        examples = saved.get("examples", {})
        return {
            name: np.asarray(examples.get(name, []), about["dtype"]).reshape(-1, *about["shape"])
            for name, about in self.bundle.columns.items()
        }

    def predict(self, examples: Any) -> np.ndarray:
        """Predict for this person.

        Args:
          examples: for ratings and clicks, item ids: returns their ratings, within the scale, or scores. Otherwise
            columns of examples.

        Raises:
          ValueError: the model does not know an item.
        """
        if not self.bundle.ranks:
            return self.bundle.predict(self.local(), examples)
        ids = [_plain(item) for item in examples]
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
            raise ValueError(f"`recommend` needs a model of ratings or clicks (got {self.bundle.task})")
        if n < 1:
            raise ValueError(f"`n` must be at least 1 (got {n})")
        items = self.bundle.items
        local = self.local()
        scores = self.bundle.predict(local, {"item": np.arange(len(items), dtype=np.int32)})
        columns = self._columns(self.stored())
        rated = columns["item"].tolist()
        liked = columns["item"][columns["rating"] >= columns["rating"].mean()].tolist() if rated else []
        best = rank(scores, n, left_out=rated, counts=items.counts, least=self.bundle.least_count)
        shown = clipped(scores, self.bundle.scale)
        table = self.bundle.item_table
        recommended = []
        for k in best.tolist():
            near = [] if table is None else nearest(table, k, liked)
            recommended.append(
                Recommended(items.ids[k], items.labels[k], float(shown[k]), [items.labels[j] for j in near])
            )
        return recommended

    def complete(self, prompt: str, n: int = 5, *, prefix: str = "") -> list[text_words.Suggestion]:
        """Suggest the `n` most probable next words after the beginning of a sentence, the person's own among them.

        Args:
          prompt: the beginning of a sentence.
          n: how many; fewer come back if there are fewer words.
          prefix: the letters of the next word that are typed already.
        """
        if self.bundle.task != "text":
            raise ValueError(f"`complete` needs a model of text (got {self.bundle.task})")
        if n < 1:
            raise ValueError(f"`n` must be at least 1 (got {n})")
        columns, words = self._vocabulary.prompt(prompt)
        logits = self.bundle.predict(self.local(), columns)[0, len(words)]
        person = text_words.PersonalWords(self._vocabulary, self.stored().get("examples", []))
        return person.suggest(logits, words, n, prefix)

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
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], (int, str))
            and isinstance(pair[1], (int, float))
            for pair in examples
        )
    if bundle.task == "text":
        return isinstance(examples, list) and all(
            isinstance(words, list) and all(isinstance(word, str) for word in words) for words in examples
        )
    return isinstance(examples, dict) and all(isinstance(column, list) for column in examples.values())


def _before(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest stored local parameters, with the digest of their model, to continue from."""
    if saved.get("local") is not None:
        return {"model": saved.get("model"), "local": saved["local"]}
    before = saved.get("before")
    return before if isinstance(before, dict) and {"model", "local"} <= set(before) else None


def _arrays(local: Any, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Return stored local parameters as arrays; None if they do not fit the bundle."""
    try:
        arrays = {path: np.asarray(local[path], leaf.dtype) for path, leaf in like.items()}
    except (KeyError, TypeError, ValueError):
        return None
    return arrays if all(arrays[path].shape == leaf.shape for path, leaf in like.items()) else None


def _plain(value: Any) -> Any:
    """Return a number or text as a JSON value."""
    return value.item() if isinstance(value, np.generic) else value
