"""A trained model on disk: the global parameters and all that inference needs, nothing of who trained it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrecon.algorithm import Algorithm
from fedrecon.build import UNTRAINED, build_algorithm, read_ratings
from fedrecon.clients import Clients
from fedrecon.config import Config, ConfigError, Reading, from_json, to_json
from fedrecon.data import Ratings
from fedrecon.folders import whole_folder
from fedrecon.personalize import Recommendation, recommend, reconstruct
from fedrecon.storage import StorageError, load_arrays, read_json, save_arrays, write_json

FORMAT = "fedrecon-model"
VERSION = 1
ARRAYS, DESCRIPTION = "global.safetensors", "model.json"
SETTINGS = ("model", "reconstruct", "split", "seed")  # of a run's config: what inference needs


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A model ready to serve users.

    Attributes:
      config: the settings of model, reconstruction and evaluation; those of training are not kept.
      params: the global parameters.
      item_ids: the original id of item k.
      titles: the title of item k, or None.
    """

    config: Config
    params: Any
    item_ids: np.ndarray
    titles: np.ndarray | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm, for reconstruction and evaluation."""
        return build_algorithm(self.config, len(self.item_ids))

    def title(self, k: int) -> str:
        """Return the title of item `k`, or its original id where there is none."""
        return str(self.item_ids[k] if self.titles is None else self.titles[k])

    def read(self, path: str | Path, reading: Reading) -> Ratings:
        """Read a ratings file with the items numbered as here; `skipped` counts ratings of items not known here."""
        return read_ratings(path, reading, item_ids=self.item_ids)

    def recommend(self, clients: Clients, n: int = 10) -> list[Recommendation]:
        """Rebuild every client's local parameters from all its ratings and recommend what it has not rated."""
        algorithm = self.algorithm
        everyone = reconstruct(algorithm, self.params, clients, seed=self.config.seed)
        return [
            recommend(
                algorithm.model,
                self.params,
                jax.tree.map(lambda leaf, i=i: leaf[i], everyone),
                num_items=len(self.item_ids),
                rated=clients[i]["item"],
                n=n,
            )
            for i in range(len(clients))
        ]


def save_model(
    path: Path, config: Config, params: Any, item_ids: np.ndarray, titles: Sequence[str] | np.ndarray | None
) -> SavedModel:
    """Save a model to a folder, which is replaced as a whole."""
    saved = SavedModel(config, params, np.asarray(item_ids), None if titles is None else np.asarray(titles))
    settings = to_json(config)
    description = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {name: settings[name] for name in SETTINGS},
        "item_ids": saved.item_ids.tolist(),
        "titles": None if saved.titles is None else saved.titles.tolist(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(path, replace=True) as folder:
        save_arrays(folder / ARRAYS, params)
        write_json(folder / DESCRIPTION, description)
    return saved


def open_model(path: str | Path) -> SavedModel:
    """Open a model folder, or the one in a run's folder.

    Raises:
      StorageError: there is none, or it is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StorageError(f"{path} is not a folder; expected the folder of a run or of a saved model")
    if not (folder / DESCRIPTION).exists():
        folder = folder / "model"
    if not folder.is_dir():
        raise StorageError(f"{path} holds no model: train one with fedrecon train DATA --out {path}")
    description = read_json(folder / DESCRIPTION)
    try:
        if description["format"] != FORMAT or description["version"] > VERSION:
            raise StorageError(
                f"{folder / DESCRIPTION} is of format {description['format']} {description['version']}; "
                f"this version of fedrecon reads {FORMAT} up to {VERSION}"
            )
        settings = {**to_json(UNTRAINED), **{name: description["settings"][name] for name in SETTINGS}}
        config = from_json(Config, settings, str(folder / DESCRIPTION))
        item_ids = np.array(description["item_ids"])
        titles = None if description["titles"] is None else np.array(description["titles"], dtype=str)
    except ConfigError as problem:
        raise StorageError(str(problem)) from None
    except (KeyError, TypeError) as problem:
        raise StorageError(f"{folder / DESCRIPTION} is damaged: {problem!r}") from None
    if item_ids.ndim != 1 or not len(item_ids) or (titles is not None and titles.shape != item_ids.shape):
        raise StorageError(f"{folder / DESCRIPTION} is damaged: items and titles do not match")
    model = build_algorithm(config, len(item_ids)).model
    like = jax.eval_shape(model.init_global, jax.random.key(0))
    return SavedModel(config, load_arrays(folder / ARRAYS, like), item_ids, titles)
