"""An open bundle: its tables, graphs and legend, read once and checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedrecon_device.contents import content_of
from fedrecon_device.errors import BundleError
from fedrecon_device.files import read_checked, read_manifest
from fedrecon_device.graphs import Graph
from fedrecon_device.manifest import described
from fedrecon_device.tensors import GLOBAL, START, as_float32, read_tensors

MOST_ITEMS = 1 << 24
ITEM_TASKS = ("ratings", "clicks")  # tasks that rank items for a person
TABLES, ITEMS, WORDS = "global.safetensors", "items.json.zlib", "words.json.zlib"


class Bundle:
    """What a device needs to reconstruct and predict, from a folder that `fedrecon bundle` made."""

    def __init__(self, folder: str | Path):
        """Open a bundle; each of its files is read when it is first needed, and compared with its digest.

        Args:
          folder: where it is.

        Raises:
          BundleError: it is damaged or hostile, or of a version that this runtime does not read.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        about = described(self.manifest, TABLES)
        self.task, self.most, self.columns, self.scale = about.task, about.most, about.columns, about.scale
        self.ranks = about.task in ITEM_TASKS
        self.least_count, self.warm_start = about.least_count, about.warm_start
        self.model_digest, self.roles, self._about = about.model_digest, about.roles, about

    def read_json(self, name: str) -> Any:
        """Read one of its JSON files."""
        return content_of(name, read_checked(self.folder, self.manifest, name))

    @cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        return read_tensors(read_checked(self.folder, self.manifest, TABLES), TABLES)

    @cached_property
    def tables(self) -> dict[str, np.ndarray]:
        """The global parameters by path, in float32."""
        return as_float32(self._tensors, GLOBAL)

    @cached_property
    def start(self) -> dict[str, np.ndarray]:
        """Where the local parameters start, by path."""
        return as_float32(self._tensors, START)

    @cached_property
    def items(self) -> Items:
        """What the items that a model ranks are called."""
        return Items(self.read_json(ITEMS))

    @cached_property
    def item_table(self) -> np.ndarray | None:
        """The embeddings of items, one row each; None if there are none.

        Raises:
          BundleError: the table that the manifest names does not have one row per item.
        """
        table = self.tables.get(self.roles.get("item_embedding", ""))
        if table is not None and (table.ndim != 2 or len(table) != len(self.items)):
            raise BundleError(f"{TABLES}: embeddings of {len(self.items)} items have the shape {list(table.shape)}")
        return table

    def graph(self, name: str) -> Graph:
        """Return a graph, `reconstruct` or `predict`.

        Raises:
          BundleError: the bundle has none; the message says why.
        """
        if name not in self._graphs:
            about = self._about.graphs.get(name, {"missing": "it was not exported"})
            if "missing" in about:
                raise BundleError(f"{self.folder} has no {name} graph: {about['missing']}")
            data = read_checked(self.folder, self.manifest, about["file"])
            self._graphs[name] = Graph(about["file"], data, about)
        return self._graphs[name]

    @cached_property
    def _graphs(self) -> dict[str, Graph]:
        return {}

    def reconstruct(
        self, columns: Mapping[str, Any], start: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Reconstruct local parameters from the last `most` examples.

        Args:
          columns: one array per feature, all of the same length, oldest example first.
          start: local parameters to start from; the bundle's own start by default.

        Returns:
          The local parameters by path.
        """
        columns = newest(self.columns, columns, self.most)
        count = len(next(iter(columns.values())))
        inputs = {f"example/{name}": padded(column, self.most) for name, column in columns.items()}
        inputs |= {f"global/{path}": table for path, table in self.tables.items()}
        inputs |= {f"start/{path}": leaf for path, leaf in (start or self.start).items()}
        outputs = self.graph("reconstruct").run({**inputs, "count": np.int32(count)})
        return {name.removeprefix("local/"): value for name, value in outputs.items()}

    def predict(self, local: Mapping[str, np.ndarray], columns: Mapping[str, Any]) -> np.ndarray:
        """Predict for some examples, with local parameters.

        Args:
          local: as `reconstruct` returns them.
          columns: the features that predictions read, one array each.
        """
        inputs = {f"example/{name}": column for name, column in columns.items()}
        inputs |= {f"global/{path}": table for path, table in self.tables.items()}
        inputs |= {f"local/{path}": leaf for path, leaf in local.items()}
        return self.graph("predict").run(inputs)["prediction"]


def newest(about: Mapping[str, Any], columns: Mapping[str, Any], most: int) -> dict[str, np.ndarray]:
    """Return the newest examples in the types that graphs take.

    Raises:
      BundleError: a column is missing, or columns have different lengths or shapes.
    """
    lengths = {name: len(columns[name]) for name in about if name in columns}
    if set(lengths) != set(about) or len(set(lengths.values())) > 1:
        raise BundleError(f"examples need {list(about)} of the same length; got {lengths}")
    result = {}
    for name, column in about.items():
        try:
            values = np.asarray(columns[name])[max(0, lengths[name] - most) :].astype(column["dtype"])
        except (ValueError, TypeError, OverflowError) as problem:
            raise BundleError(f"column {name!r} must be {column['dtype']}: {problem}") from None
        if len(values) and list(values.shape[1:]) != column["shape"]:
            raise BundleError(f"examples of {name!r} have shape {list(values.shape[1:])}; expected {column['shape']}")
        result[name] = values.reshape(len(values), *column["shape"])
    return result


def padded(values: np.ndarray, length: int) -> np.ndarray:
    """Add zeros to a column of examples, up to a length."""
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


class Items:
    """What items are called: their ids in the data, unique labels, and how often each was rated."""

    def __init__(self, content: Mapping[str, Any]):
        """Take the content of the file."""
        try:
            self.ids: list[int | str] = _listed(content["ids"])
            labels, counts = content["labels"], content["counts"]
            self.labels: list[str] = [str(label) for label in (self.ids if labels is None else labels)]
            self.counts = None if counts is None else np.array([int(count) for count in counts], np.int64)
            self.index = {item: k for k, item in enumerate(self.ids)}
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise BundleError(f"{ITEMS} is damaged: {problem!r}") from None
        number_of_counts = len(self.ids) if self.counts is None else len(self.counts)
        if not len(self.ids) == len(self.index) == len(self.labels) == number_of_counts:
            raise BundleError(
                f"{ITEMS} has {len(self.ids)} ids, {len(self.index)} of them different, {len(self.labels)} labels "
                f"and {number_of_counts} counts; expected the same number of each"
            )

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.ids)


def _listed(ids: Any) -> list[int | str]:
    """Return ids, which may be given as a range: the first, and how many."""
    if isinstance(ids, Mapping):
        first, count = int(ids["first"]), int(ids["count"])
        if not 0 <= count <= MOST_ITEMS:
            raise ValueError(f"{count} items; at most {MOST_ITEMS} are expected")
        return list(range(first, first + count))
    return list(ids)
