"""Clients: columns of examples and the range of rows that belongs to each client, in memory or memory-mapped.

A client is a range of rows. Subsets of clients and parts of clients are other ranges over the same columns,
so they cost two integers per client and copy nothing. A saved folder opens by mapping its files: a million
clients take no memory until they are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedrecon._src.core.checks import check_column, check_number, check_rules
from fedrecon._src.core.keys import as_number, as_words, mix_hashes, name_hashes
from fedrecon._src.core.tabular import read_csv, read_parquet, to_arrays, to_arrow
from fedrecon._src.storage.arrays import (
    CLIENTS_PER_BLOCK,
    FORMAT,
    MANIFEST,
    QUICK_BYTES,
    ArrayFile,
    ClientStream,
    Columns,
    Totals,
    column_path,
    map_array,
    write_clients_manifest,
)
from fedrecon._src.storage.atomic import atomic_folder
from fedrecon._src.storage.manifest import read_folder_manifest

FINGERPRINT_EXAMPLES = 1 << 20  # up to this size all data is hashed, beyond it a sample of about this size


@dataclass(frozen=True, eq=False, repr=False)
class Clients:
    """Examples of many clients: client `i` owns rows `starts[i]:ends[i]` of every column.

    Attributes:
      columns: arrays with one row per example; all have the same first dimension. May be memory-mapped.
      starts: first row of each client.
      ends: one past the last row of each client.
      names: original id of each client, a number or text; None if clients are named by their index. Everything random
        for a client, and whether it trains or validates, follows from its name.
      totals: number of examples and size of the largest client, if known. Whoever passes them guarantees that the
        ranges are valid; without them the ranges are checked, which reads `starts` and `ends` once.

    Example:
      >>> import fedrecon as fr
      >>> import numpy as np
      >>> columns = {"item": np.array([7, 8, 9]), "rating": np.float32([1, 5, 3])}
      >>> clients = fr.Clients.from_columns(columns, client=["bob", "ann", "bob"])
      >>> clients
      Clients(2 clients, 3 examples: item int64, rating float32)
      >>> clients[clients.index_of("bob")]["item"].tolist()
      [7, 9]
      >>> clients.at_least(2).names.tolist()
      ['bob']
    """

    columns: Columns
    starts: np.ndarray = None  # type: ignore[assignment]  # refused below, with advice
    ends: np.ndarray = None  # type: ignore[assignment]
    names: np.ndarray | None = None
    totals: Totals | None = None

    def __post_init__(self) -> None:
        """Check that columns, ranges and names fit together."""
        if self.starts is None or self.ends is None:
            raise TypeError("`starts` and `ends` are missing; use Clients.from_columns(columns, client=...)")
        starts, ends = np.asarray(self.starts, np.int64), np.asarray(self.ends, np.int64)
        object.__setattr__(self, "columns", {name: _plain(name, values) for name, values in self.columns.items()})
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "ends", ends)
        lengths = {name: len(values) for name, values in self.columns.items()}
        rows, names = min(lengths.values(), default=0), np.size(starts if self.names is None else self.names)
        paired = starts.ndim == 1 and starts.shape == ends.shape
        inside = self.totals is not None or not paired or ((starts >= 0) & (starts <= ends) & (ends <= rows)).all()
        rules = {
            "`columns` must have at least one column of examples": bool(lengths),
            f"`columns` must have the same number of rows (got {lengths})": len(set(lengths.values())) <= 1,
            f"`starts` and `ends` must have one entry per client (got {starts.shape} and {ends.shape})": paired,
            f"`names` must have one entry per client (got {names} for {starts.size})": names == starts.size,
            f"every client needs 0 <= start <= end <= {rows}, the number of rows": inside,
        }
        check_rules(rules)

    def __repr__(self) -> str:
        """Describe the clients in one line, without their data."""
        columns = ", ".join(f"{name} {values.dtype}" for name, values in self.columns.items())
        return f"{type(self).__name__}({len(self)} clients, {self.num_examples} examples: {columns})"

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.starts)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield each client's columns in turn."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return the columns of client `i`, as views."""
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"no client {i}: indices go from 0 to {len(self) - 1}.")
        rows = slice(int(self.starts[i]), int(self.ends[i]))
        return {name: np.asarray(values[rows]) for name, values in self.columns.items()}

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client; reads all ranges once."""
        return self.ends - self.starts

    @cached_property
    def num_examples(self) -> int:
        """Number of examples of all clients together."""
        return self.totals.num_examples if self.totals else int(self.sizes.sum())

    @cached_property
    def max_size(self) -> int:
        """Number of examples of the largest client."""
        return self.totals.max_size if self.totals else int(self.sizes.max(initial=0))

    def index_of(self, name: object) -> int:
        """Return the index of the client with this original id.

        Args:
          name: an id as in `names`; text that spells a number finds a numeric id.

        Raises:
          KeyError: no client has this name.
        """
        names = np.empty(0, int) if self.names is None else self.names
        try:
            return int(np.flatnonzero(names == names.dtype.type(name))[0])
        except (ValueError, OverflowError, IndexError):
            hint = "without names: address them by index" if self.names is None else f"named {names[:3].tolist()}..."
            raise KeyError(f"no client is named {name!r} among {len(self)} clients {hint}") from None

    # ---- constructors ----

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], client: Any, **fields: Any) -> Self:
        """Group rows by client.

        Clients come in ascending order of id, a client's rows in the order given. Rows that are already in that
        order are not copied.

        Args:
          columns: name to array, one row per example.
          client: the client id of each row, or the name of the column that holds it (which is then dropped).
          **fields: further fields of a subclass.

        Returns:
          The clients, named by their ids.

        Example:
          >>> import fedrecon as fr
          >>> clients = fr.Clients.from_columns({"x": [1, 2, 3], "user": [4, 2, 4]}, client="user")
          >>> clients.names.tolist(), clients.sizes.tolist()
          ([2, 4], [1, 2])
        """
        arrays = {name: _plain(name, values) for name, values in columns.items()}
        if isinstance(client, str):
            check_column(client, arrays, "the rows")
            ids = arrays.pop(client)
        else:
            ids = _plain("client", client)
        short = {name: len(values) for name, values in arrays.items() if len(values) != len(ids)}
        rules = {
            f"every column must have one row per client id, {ids.shape} (got {short}).": ids.ndim == 1 and not short,
            "some client ids are NaN: drop those rows or give them an id.": ids.dtype.kind != "f" or (ids == ids).all(),
        }
        check_rules(rules)
        if (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            arrays = {name: values[order] for name, values in arrays.items()}
        names, starts, sizes = np.unique(ids, return_index=True, return_counts=True)
        return cls(columns=arrays, starts=starts, ends=starts + sizes, names=names, **fields)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        client: str = "user",
        columns: Mapping[str, Any] | None = None,
        delimiter: str = ",",
    ) -> Self:
        """Read a text file with a header line and group its rows by client.

        Args:
          path: the file.
          client: header of the column with client ids.
          columns: header to dtype of the columns wanted; None takes all, each as integers, floats or text,
            whichever fits first.
          delimiter: the character between fields.
        """
        dtypes = None if columns is None else {client: None, **columns}
        return cls.from_columns(read_csv(path, delimiter, dtypes), client=client)

    @classmethod
    def from_parquet(cls, path: str | Path, client: str = "user", columns: Sequence[str] | None = None) -> Self:
        """Read a Parquet file and group its rows by client.

        Args:
          path: the file.
          client: name of the column with client ids.
          columns: names of the columns wanted; None takes all.
        """
        names = None if columns is None else list(dict.fromkeys([client, *columns]))
        return cls.from_columns(read_parquet(path, names), client=client)

    @classmethod
    def from_dataframe(cls, frame: Any, client: str = "user", columns: Sequence[str] | None = None) -> Self:
        """Group the rows of a data frame by client.

        Args:
          frame: of pandas or polars, or a table of pyarrow. Dates become seconds since 1970. Client ids may be text;
            what a model reads must be numbers, and ids of items must be numbered from 0:
            `ids, frame["item"] = np.unique(frame["item"], return_inverse=True)`.
          client: name of the column with client ids.
          columns: names of the columns wanted; None takes all.
        """
        names = None if columns is None else list(dict.fromkeys([client, *columns]))
        return cls.from_columns(to_arrays(to_arrow(frame), "the data frame", names), client=client)

    @classmethod
    def from_generator(
        cls, path: str | Path, iterable: Iterable[tuple[object, Mapping[str, Any]]], **fields: Any
    ) -> Self:
        """Stream clients to a folder, one at a time, and open it.

        Only one client is in memory at a time. The first one fixes the columns, their dtypes and shapes.

        Args:
          path: the folder to write; must not exist yet.
          iterable: yields (name, columns) for each client. Names are all integers or all text.
          **fields: further fields of a subclass.
        """
        with atomic_folder(path) as folder:
            with ClientStream(folder) as stream:
                for name, client in iterable:
                    stream.add(name, {column: _plain(column, values) for column, values in client.items()})
            if not stream.columns:
                raise ValueError("`iterable` yielded no clients: expected (name, columns) pairs.")
            write_clients_manifest(folder, cls.__name__, stream.columns, stream.totals, fields)
        return cls.open(path)

    # ---- on disk ----

    def save(self, path: str | Path) -> None:
        """Write these clients, and no other rows of the columns, to a folder that `open` can map.

        Args:
          path: the folder; must not exist yet. It appears under this name only when it is complete.
        """
        with atomic_folder(path) as folder:
            columns = {}
            for name, values in self.columns.items():
                with ArrayFile(column_path(folder, name), values.dtype, values.shape[1:]) as columns[name]:
                    for start in range(0, len(self), CLIENTS_PER_BLOCK):
                        block = slice(start, start + CLIENTS_PER_BLOCK)
                        columns[name].append(values[rows_of(self.starts[block], self.ends[block])])
            np.save(folder / "offsets.npy", np.append(0, np.cumsum(self.sizes)).astype(np.int64))
            if self.names is not None:
                np.save(folder / "names.npy", self.names, allow_pickle=False)
            fields = {name: getattr(self, name) for name in _extra_fields(type(self))}
            totals = Totals(self.num_examples, self.max_size)
            write_clients_manifest(folder, type(self).__name__, columns, totals, fields)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a folder written by `save` or `from_generator`; columns are read only when they are used.

        Args:
          path: the folder.

        Raises:
          ValueError: the folder is missing, incomplete, of another kind, or of a newer version.
        """
        folder = Path(path)
        manifest = read_folder_manifest(folder / MANIFEST, FORMAT, max_hashed=QUICK_BYTES)
        try:
            columns = {name: map_array(column_path(folder, name)) for name in manifest["columns"]}
            offsets = np.asarray(map_array(folder / "offsets.npy"))
            names = np.asarray(map_array(folder / "names.npy")) if (folder / "names.npy").exists() else None
            arrays = {name: map_array(folder / f"field-{name}.npy") for name in manifest["array_fields"]}
            fields = {**manifest["fields"], **arrays}
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is damaged or incomplete: {error}. Write it again.") from error
        totals = Totals(manifest["num_examples"], manifest["max_size"])
        lengths = [totals.num_examples, *(len(values) for values in columns.values())]
        missing = set(_extra_fields(cls, needed=True)) - set(fields)
        if missing or len(set(lengths)) > 1 or len(offsets) != manifest["num_clients"] + 1:
            wrong_kind = f"it holds {manifest['kind']}, not {cls.__name__}: it has no {sorted(missing)}"
            damaged = "it is damaged: its arrays do not have the lengths that manifest.json records"
            raise ValueError(f"{folder}: {wrong_kind if missing else damaged}")
        extra = {name: fields[name] for name in _extra_fields(cls) if name in fields}
        return cls(columns=columns, starts=offsets[:-1], ends=offsets[1:], names=names, totals=totals, **extra)

    # ---- views ----

    def take(self, indices: Any) -> Self:
        """Return some of the clients, sharing the columns.

        Args:
          indices: which clients, or a boolean mask with one entry per client.
        """
        indices = np.asarray(indices)
        if indices.size == 0 and indices.dtype != bool:
            indices = indices.astype(np.int64)
        indices = np.arange(len(self))[indices]  # numpy checks a mask's length and the range of indices
        names = indices if self.names is None else self.names[indices]
        return dataclasses.replace(self, starts=self.starts[indices], ends=self.ends[indices], names=names, totals=None)

    def identities(self, indices: Any = None) -> np.ndarray:
        """Return the identity of clients: a hash of the name as two 32-bit words, wherever a client is stored.

        Args:
          indices: which clients; all by default.
        """
        indices = np.arange(len(self)) if indices is None else indices
        return as_words(name_hashes(np.asarray(indices if self.names is None else self.names[indices])))

    def at_least(self, n: int) -> Self:
        """Return the clients that have at least `n` examples, sharing the columns.

        Args:
          n: the least number of examples.
        """
        return self.take(np.flatnonzero(self.sizes >= n))

    def cap(self, n: int) -> Self:
        """Return all clients with their first `n` examples, sharing the columns.

        Args:
          n: the largest number of examples that a client keeps.
        """
        check_number("n", n)
        return dataclasses.replace(self, ends=np.minimum(self.ends, self.starts + n), totals=None)

    def split_clients(self, *fractions: float, seed: int) -> tuple[Self, ...]:
        """Divide the clients at random into disjoint groups; every group keeps the stored order.

        A client's group follows from the seed and its name alone, so machines that each have some of the clients agree
        on it. The sizes of the groups are therefore approximate.

        Args:
          *fractions: share of each group. Together at most 1; if they are 1, no client is left out.
          seed: decides which client goes to which group.

        Returns:
          One `Clients` per fraction, sharing the columns.
        """
        edges = [float(edge) for edge in _edges(fractions)]
        drawn = mix_hashes(as_number(self.identities()), seed) / 2.0**64
        edges[-1] = 2.0 if edges[-1] == 1 else edges[-1]  # a hash just below 2**64 gives 1.0 after rounding
        return tuple(self.take(np.flatnonzero((drawn >= start) & (drawn < end))) for start, end in pairwise(edges))

    def split_time(self, *fractions: float, column: str = "time") -> tuple[Self, ...]:
        """Divide every client's examples by time: the earliest fraction, the next, and so on. Ties keep stored order.

        Args:
          *fractions: share of each part. Together at most 1; if they are 1, no example is left out.
          column: what to sort by.

        Returns:
          One `Clients` per fraction, all with the same clients, sharing one sorted copy of the columns.
        """
        check_column(column, self.columns)
        edges = _edges(fractions)
        whole = self._reordered_by(self.columns[column][rows_of(self.starts, self.ends)])
        bounds = [whole.starts + edge.numerator * whole.sizes // edge.denominator for edge in edges]
        return tuple(dataclasses.replace(whole, starts=start, ends=end, totals=None) for start, end in pairwise(bounds))

    def shuffle(self, seed: int) -> Self:
        """Return the same clients with each one's examples in a random order, as a copy in memory.

        A client's order follows from the seed and its name.

        Args:
          seed: decides the order.
        """
        owner, number = enumerate_rows(self.sizes)
        salt = mix_hashes(as_number(self.identities()), seed)
        return self._reordered_by(mix_hashes(number.astype(np.uint64), salt[owner]))

    def _reordered_by(self, keys: np.ndarray) -> Self:
        """Copy the examples, those of each client sorted (stably) by their keys."""
        rows = rows_of(self.starts, self.ends)[np.lexsort((keys, enumerate_rows(self.sizes)[0]))]
        columns, ends = {name: values[rows] for name, values in self.columns.items()}, np.cumsum(self.sizes)
        return dataclasses.replace(self, columns=columns, starts=ends - self.sizes, ends=ends, totals=None)

    def fingerprint(self) -> str:
        """Return a short digest of the content, the same in memory and on disk.

        Up to about a million examples, all data is hashed. Of larger data, 4,096 evenly spaced clients are hashed, each
        with its first 256 examples: enough to tell data sets apart, not to notice every single edit.
        """
        sample = self
        if self.num_examples + len(self) > FINGERPRINT_EXAMPLES:
            sample = self.take(np.linspace(0, len(self) - 1, min(len(self), 4096)).astype(np.int64)).cap(256)
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{len(self)} {self.num_examples} {self.max_size}".encode())
        rows = rows_of(sample.starts, sample.ends)
        parts = {f"column {name}": sample.columns[name][rows] for name in sorted(sample.columns)}
        parts |= {"sizes": sample.sizes, **({} if sample.names is None else {"names": sample.names})}
        for label, values in parts.items():
            if values.dtype.kind == "U":  # the width of text is storage, not content
                values = values.astype(f"U{max(1, int(np.strings.str_len(values).max(initial=1)))}")
            digest.update(f"{label} {values.dtype.str} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def check_clients(value: Any, purpose: str) -> None:
    """Raise an error unless these are clients, at least one.

    Args:
      value: what was passed as clients.
      purpose: what they are for.

    Raises:
      TypeError: they are something else; the message says how to make clients.
      ValueError: there are none.
    """
    if not isinstance(value, Clients):
        frame = hasattr(value, "columns") and hasattr(value, "__getitem__")
        how = 'from_dataframe(frame, client="user")' if frame else "from_columns(columns, client=...)"
        raise TypeError(f"`clients` must be fr.Clients, made with fr.Clients.{how} (got {type(value).__name__})")
    if len(value) == 0:
        raise ValueError(f"`clients` must not be empty: there are no clients to {purpose}")


def _plain(name: str, values: Any) -> np.ndarray:
    """Return values as an array that can be mapped from disk: no Python objects, at least one dimension."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype.hasobject or array.dtype.kind == "T":
        raise TypeError(f"column {name!r} must be numbers or fixed-width text, not objects; use astype(str).")
    if array.ndim == 0:
        raise ValueError(f"column {name!r} is a single value: expected one entry per example.")
    return array


def rows_of(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the rows of several ranges, one range after another.

    Args:
      starts: the first row of each range.
      ends: one past the last row of each range.
    """
    sizes = ends - starts
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())


def enumerate_rows(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Enumerate the rows of several ranges: the range of each row, and its number within the range.

    Args:
      sizes: how many rows each range has.
    """
    return np.repeat(np.arange(len(sizes)), sizes), rows_of(np.zeros(len(sizes), np.int64), sizes)


def _edges(fractions: Sequence[float]) -> list[Fraction]:
    """Return 0 and the running sums of the fractions, exact: .8, .1, .1 end at 1, and so do three 1/3."""
    exact = [Fraction(fraction).limit_denominator(1_000_000) for fraction in fractions]
    if not exact or min(exact) < 0 or sum(exact) > 1:
        raise ValueError(f"`fractions` must be at least 0 and sum to at most 1 (got {fractions}).")
    return [sum(exact[:k], Fraction(0)) for k in range(len(exact) + 1)]


def _extra_fields(cls: type[Clients], needed: bool = False) -> list[str]:
    """Name the fields that a kind of clients adds; with `needed`, those without a default."""
    base_fields, none = {field.name for field in dataclasses.fields(Clients)}, dataclasses.MISSING
    added = [field for field in dataclasses.fields(cls) if field.name not in base_fields]
    return [f.name for f in added if not needed or (f.default is none and f.default_factory is none)]


# ---- examples labelled with their client, and pooled: for training with a `client_table` ----


def with_owner(clients: Clients, *, feature: str = "client") -> Clients:
    """Return the same clients with a column that holds, for every example, the index of its client.

    Args:
      clients: whose examples are copied.
      feature: the name of the new column.

    Example:
      >>> clients = fr.data.synthetic_ratings(num_users=2, num_items=9, mean_ratings=5)
      >>> fr.data.with_owner(clients).columns["client"].tolist()
      [0, 0, 0, 1, 1, 1]
    """
    owner, number = enumerate_rows(clients.sizes)
    rows, ends = clients.starts[owner] + number, np.cumsum(clients.sizes)
    columns = {name: values[rows] for name, values in clients.columns.items()}
    return Clients(columns | {feature: owner.astype(np.int32)}, ends - clients.sizes, ends, clients.names)


def pooled(clients: Clients, *, seed: int, feature: str = "client") -> Clients:
    """Return one client that has everybody's examples, shuffled, with a column for the client of each.

    Args:
      clients: whose examples are copied.
      seed: decides the order.
      feature: the name of the new column.

    Example:
      >>> clients = fr.data.synthetic_ratings(num_users=2, num_items=9, mean_ratings=5)
      >>> fr.data.pooled(clients, seed=0)
      Clients(1 clients, 6 examples: ...)
    """
    owned = with_owner(clients, feature=feature)
    order = np.random.default_rng(seed).permutation(owned.num_examples)
    columns = {name: values[order] for name, values in owned.columns.items()}
    return Clients(columns, np.array([0]), np.array([len(order)]))
