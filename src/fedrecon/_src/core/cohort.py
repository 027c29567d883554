"""Cohorts: the clients of a round packed into arrays, with their support, their query and the rows they touch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrecon._src.core.checks import check_column
from fedrecon._src.core.clients import Clients, enumerate_rows, rows_of
from fedrecon._src.core.keys import as_number, mix_hashes
from fedrecon._src.core.split import Split
from fedrecon._src.core.upload import ROW_CHUNK

ABSENT = -1  # the index that stands for an empty slot of a cohort
SCRATCH_ENTRIES = 2**19  # of the table that finds repeated ids: small enough to stay in a core's cache
NAMES_HASHED = 2**17  # up to this many clients, names are hashed once instead of at every packing
PACKED_AT_ONCE = 2**9  # clients of a population that is packed once: what packing needs beside them stays small
ALIGNED = 64  # bytes: arrays that begin at a multiple of this are not copied to the devices of a CPU
LOOKED_THROUGH = 2**22  # up to this many examples, repeated ids are looked for once instead of at every packing


class Examples(NamedTuple):
    """Examples of several clients: features of `(clients, examples, ...)`, and how many of them are a client's own.

    Example:
      >>> import numpy as np
      >>> from fedrecon import kit
      >>> examples = kit.Examples({"x": np.zeros((2, 3))}, count=np.array([3, 1]))  # the second client has one example
    """

    columns: Mapping[str, Any]
    count: Any  # (clients,)


class Cohort(NamedTuple):
    """Clients ready to run. Every leaf has the clients in its first dimension.

    Attributes:
      client: `(clients,)` the index of each client in its population; `ABSENT` for an empty slot.
      identity: `(clients, 2)` a hash of each client's name, the same wherever the client is packed or stored.
      support: the examples that reconstruction sees.
      query: the examples that global parameters are updated or measured on.
      rows: for every group of lookup tables, `(clients, rows)` the ids of the rows that a client touches. Left out, as
        are `slots`, for groups in which no client of the population has an id twice, unless `Packer` was given
        lengths: the rows are then those of the query examples, in their order (`client.lookup_tables.rows_in_order`).
      num_rows: `(clients,)` how many of those rows are in use.
      slots: for every feature that indexes lookup tables, the position in `rows` of each query example's ids.
      support_slots: the same for support examples; empty unless `Needs.support_rows` is set.

    Example:
      >>> from fedrecon import kit
      >>> kit.Cohort._fields[:4]
      ('client', 'identity', 'support', 'query')
    """

    client: Any
    identity: Any
    support: Examples
    query: Examples
    rows: dict[str, Any]
    num_rows: dict[str, Any]
    slots: dict[str, Any]
    support_slots: dict[str, Any]


class Drawn(NamedTuple):
    """Cohorts of several rounds, drawn from clients that are packed once and for all.

    Attributes:
      population: a `Cohort` of all clients, and an empty slot at the end.
      places: `(rounds, clients)` who of them takes part in each round.
    """

    population: Any
    places: Any

    @classmethod
    def from_indices(cls, population: Cohort, indices: np.ndarray) -> Drawn:
        """Return the cohorts of some clients.

        Args:
          population: all clients, and an empty slot at the end.
          indices: `(rounds, clients)`, `ABSENT` for an empty slot.
        """
        return cls(population, np.where(indices < 0, len(population.client) - 1, indices).astype(np.int32))


class Needs(NamedTuple):
    """Which parts of a client's data to pack.

    Attributes:
      split: how examples become support and query.
      support_limit: support examples after this many are never used; None for no limit.
      query_limit: the same for query.
      groups: lookup tables whose rows are listed, as `{group: (number of rows, features)}`.
      support_rows: whether rows that only support examples touch are listed too.
      columns: the features to pack; None for all.

    Example:
      >>> from fedrecon import kit
      >>> kit.Needs(kit.half(), support_limit=10, columns=["item", "rating"]).support_limit
      10
    """

    split: Split
    support_limit: int | None = None
    query_limit: int | None = None
    groups: Mapping[str, tuple[int, Sequence[str]]] = {}
    support_rows: bool = False
    columns: Sequence[str] | None = None


class Lengths(NamedTuple):
    """How many support and query examples of a client the arrays have room for.

    Example:
      >>> import fedrecon as fr
      >>> fr.kit.Lengths(support=10, query=20).query
      20
    """

    support: int
    query: int


def lengths_for(largest: int, needs: Needs) -> Lengths:
    """Return the lengths that clients need.

    Args:
      largest: the number of examples of the largest client.
      needs: how its examples are split, and how many of them are used.
    """
    most = [int(counts.max()) for counts in needs.split.counts(np.arange(largest + 1))]
    limits = zip(most, (needs.support_limit, needs.query_limit), strict=True)
    return Lengths(*(max(1, count if limit is None else min(count, limit)) for count, limit in limits))


class _Side(NamedTuple):
    """The support or query of clients: also the row of the columns and the place (`_places`) of each example."""

    examples: Examples
    source: np.ndarray
    places: np.ndarray


class Packer:
    """Packs clients of one population into cohorts of one shape.

    The shape follows from the population and from `needs`, never from which clients are in a cohort, so code that runs
    on cohorts is compiled once. Hosts with different clients pass the same `lengths` to run the same program.
    """

    def __init__(self, clients: Clients, needs: Needs, lengths: Lengths | None = None):
        """Prepare to pack clients.

        Args:
          clients: the population.
          needs: which parts of their data to pack.
          lengths: room for support and query examples; a client's last examples are left out if they do not fit. By
            default there is room for the largest client.
        """
        self.clients, self._needs = clients, needs
        names = list(clients.columns) if needs.columns is None else list(needs.columns)
        for name in [*names, *([] if needs.split.by is None else [needs.split.by])]:
            check_column(name, clients.columns)
        # Plain views: every operation on a memory-mapped array would run a bit of Python, too.
        self._columns = {name: np.asarray(clients.columns[name]) for name in names}
        self.lengths = lengths or lengths_for(clients.max_size, needs)
        self._scratch = np.empty(0, np.int32)
        self._identities = clients.identities() if len(clients) <= NAMES_HASHED else None
        # Hosts that share `lengths` run one program, so theirs must not depend on whether ids repeat.
        in_order = lengths is None and not needs.support_rows
        self._distinct = {
            group: in_order and _all_distinct(clients, features, rows)
            for group, (rows, features) in needs.groups.items()
        }

    def pack(self, indices: np.ndarray, draws: np.ndarray | None = None) -> Cohort:
        """Pack clients.

        Args:
          indices: of the clients, in the order to pack them; `ABSENT` leaves a slot empty.
          draws: for each client a number from which, with its identity, a redrawn split draws its order: the words of
            the round's key.
        """
        split, present = self._needs.split, indices >= 0
        safe = np.where(present, indices, 0)
        starts = np.where(present, self.clients.starts[safe], 0)
        sizes = np.where(present, self.clients.ends[safe], 0) - starts
        identity = self.clients.identities(safe) if self._identities is None else self._identities[safe]
        ordered = self._ordered(starts, sizes, identity, 0 if draws is None else draws)
        origin = starts if ordered is None else np.cumsum(sizes) - sizes
        support, query = (
            self._side(origin + begin, count, length, ordered)
            for begin, count, length in zip(split.begins(sizes), split.counts(sizes), self.lengths, strict=True)
        )
        cohort = Cohort(indices.astype(np.int32), identity, support.examples, query.examples, {}, {}, {}, {})
        for group, (rows, features) in self._needs.groups.items():
            if self._distinct[group]:  # and `_all_distinct` has checked the ids
                width = sum(math.prod(self._columns[feature].shape[1:]) for feature in features)
                cohort.num_rows[group] = query.examples.count * width
                continue
            sides = [(query, self._ids(query, features), cohort.slots)]
            sides += [(support, self._ids(support, features), cohort.support_slots)]
            for _, ids, _ in sides:
                _check_ids(ids, features, rows)
            listed = sides if self._needs.support_rows else sides[:1]
            cohort.rows[group], cohort.num_rows[group] = self._list_rows(listed, rows, features)
        return cohort

    def pack_everybody(self, most: int) -> Cohort | None:
        """Pack the whole population and an empty slot at the end, if it never changes and is small.

        Args:
          most: how many bytes there may be.

        Returns:
          A cohort whose arrays the devices of a CPU need not copy; None if splits are redrawn, or there are too many
          clients or bytes.
        """
        clients = len(self.clients)
        if self._needs.split.redrawn or clients > NAMES_HASHED:
            return None
        empty = self.pack(np.array([ABSENT]))
        if (clients + 1) * sum(leaf.nbytes for leaf in jax.tree.leaves(empty)) > most:
            return None
        everybody = jax.tree.map(lambda leaf: _aligned((clients + 1, *leaf.shape[1:]), leaf.dtype), empty)
        indices = np.append(np.arange(clients), ABSENT)
        for begin in range(0, len(indices), PACKED_AT_ONCE):
            part = slice(begin, begin + PACKED_AT_ONCE)
            for into, leaf in zip(*map(jax.tree.leaves, (everybody, self.pack(indices[part]))), strict=True):
                into[part] = leaf
        return everybody

    def work(self, indices: np.ndarray) -> np.ndarray:
        """Return how many examples clients go through, as long as the longest may; 0 for empty slots.

        Args:
          indices: of the clients, `ABSENT` allowed.
        """
        safe = np.maximum(indices, 0)
        counts = self._needs.split.counts(self.clients.ends[safe] - self.clients.starts[safe])
        sides = [np.minimum(count, length) for count, length in zip(counts, self.lengths, strict=True)]
        return np.where(indices >= 0, sides[0] + sides[1], 0)

    def _ordered(
        self, starts: np.ndarray, sizes: np.ndarray, identity: np.ndarray, draws: np.ndarray | int
    ) -> np.ndarray | None:
        """List the rows of all examples of the clients in the split's order; None if that is the stored order."""
        split = self._needs.split
        if split.by is None and not split.redrawn:
            return None
        owner, j = enumerate_rows(sizes)
        source = starts[owner] + j
        if split.redrawn or split.by is None:
            keys = mix_hashes(j.astype(np.uint64), mix_hashes(as_number(identity), draws)[owner])
        else:
            keys = self.clients.columns[split.by][source]
        return source[np.lexsort((keys, owner))]

    def _side(self, begins: np.ndarray, counts: np.ndarray, length: int, ordered: np.ndarray | None) -> _Side:
        counts = np.minimum(counts, length)
        pattern = self._needs.split.pattern
        if pattern is None:
            source = rows_of(begins, begins + counts)
        else:
            owner, j = enumerate_rows(counts)
            source = begins[owner] + pattern(np.arange(length))[j]
        source = source if ordered is None else ordered[source]
        places = _places(counts, length)
        columns = {
            name: _spread(np.take(column, source, axis=0), places, (len(counts), length))
            for name, column in self._columns.items()
        }
        return _Side(Examples(columns, counts.astype(np.int32)), source, places)

    def _ids(self, side: _Side, features: Sequence[str]) -> np.ndarray:
        """Return the ids of all examples of a side, `(examples, ids)`."""
        columns = (np.take(self._columns[feature], side.source, axis=0) for feature in features)
        return np.concatenate([_by_example(column) for column in columns], axis=1)

    def _list_rows(
        self, sides: Sequence[tuple[_Side, np.ndarray, dict]], table_rows: int, features: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """List the rows that each client touches, in order of first use; add the slots of each side's ids."""
        counts = np.stack([side.examples.count for side, _, _ in sides]).sum(0, dtype=np.int64)
        # The ids of one client after another, those of the first side before others, without padding.
        ids = np.empty((counts.sum(), sides[0][1].shape[1]), sides[0][1].dtype)
        begins, positions = np.cumsum(counts) - counts, []
        for side, ids_of_side, _ in sides:
            positions.append(rows_of(begins, begins + side.examples.count))
            ids[positions[-1]] = ids_of_side
            begins = begins + side.examples.count
        lengths = [side.examples.columns[features[0]].shape[1] for side, _, _ in sides]
        capacity = row_capacity(ids.shape[1] * sum(lengths), table_rows)
        rows, num_rows, numbers = self._number(ids.ravel(), ids.shape[1] * counts, table_rows, capacity)
        ends = np.cumsum([math.prod(self._columns[feature].shape[1:]) for feature in features])[:-1]
        for (side, _, slots), length, position in zip(sides, lengths, positions, strict=True):
            by_feature = np.split(numbers.reshape(ids.shape)[position], ends, axis=1)
            for feature, values in zip(features, by_feature, strict=True):
                shaped = values.reshape(len(values), *self._columns[feature].shape[1:])
                slots[feature] = _spread(shaped, side.places, (len(counts), length))
        return rows, num_rows

    def _number(
        self, flat: np.ndarray, counts: np.ndarray, table_rows: int, capacity: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number each client's distinct ids from 0 in order of first use, given `counts[i]` ids of each client i.

        A table indexed by (client, id) records where an id was first seen: two passes over the ids and no sort.
        It is never cleared, since only entries written in the same call are read. Clients share the table in groups
        small enough for it to stay in cache; one at a time if a single client's part is larger.
        """
        clients = len(counts)
        group = max(1, min(clients, SCRATCH_ENTRIES // table_rows))
        if self._scratch.size < group * table_rows:
            self._scratch = np.empty(group * table_rows, np.int32)
        key = np.repeat(np.arange(clients) % group * table_rows, counts) + flat
        seen = np.arange(flat.size, dtype=np.int32)
        first = np.empty(flat.size, np.int32)
        bounds = np.append(0, np.cumsum(counts))[np.append(np.arange(0, clients, group), clients)]
        for begin, end in itertools.pairwise(bounds):
            block_keys = key[begin:end]
            # If a key repeats, the last write wins: its first use.
            self._scratch[block_keys[::-1]] = seen[begin:end][::-1]
            first[begin:end] = self._scratch[block_keys]
        new = first == seen
        num_rows = np.bincount(np.repeat(np.arange(clients), counts)[new], minlength=clients)
        rank = (np.cumsum(new) - np.repeat(np.cumsum(num_rows) - num_rows + 1, counts))[first]
        rows = _spread(flat[new].astype(np.int32), _places(num_rows, capacity), (clients, capacity))
        return rows, num_rows.astype(np.int32), rank.astype(np.int32)


def row_capacity(ids: int, table_rows: int) -> int:
    """Return how long a client's list of rows is.

    Args:
      ids: how many ids a client has room for.
      table_rows: how many rows there are in all.
    """
    capacity = min(ids, table_rows)
    return capacity + -capacity % ROW_CHUNK


def _check_ids(ids: np.ndarray, features: Sequence[str], table_rows: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= table_rows):
        bad = int(ids[(ids < 0) | (ids >= table_rows)][0])
        raise ValueError(f"feature {'/'.join(features)} holds id {bad}; the table has rows 0 to {table_rows - 1}")


def _all_distinct(clients: Clients, features: Sequence[str], table_rows: int) -> bool:
    """Say whether no client has an id twice in some columns, if that is quickly found out; else say no."""
    ids = [clients.columns[feature] for feature in features]
    if sum(column.size for column in ids) > LOOKED_THROUGH or len(clients) * table_rows >= 2**63:
        return False
    owner, j = enumerate_rows(clients.ends - clients.starts)
    source = clients.starts[owner] + j
    flat = np.concatenate([_by_example(column)[source] for column in ids], axis=1)
    _check_ids(flat, features, table_rows)
    keys = np.sort((owner[:, None] * table_rows + flat).ravel())
    return bool((keys[1:] != keys[:-1]).all())


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array, to be filled, that begins at a multiple of `ALIGNED` bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + ALIGNED, np.uint8)
    begin = -room.ctypes.data % ALIGNED
    return room[begin : begin + size].view(dtype).reshape(shape)


def _by_example(values: np.ndarray) -> np.ndarray:
    """Return `(examples, ...)` as `(examples, ids)`, also if there are no examples."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _places(counts: np.ndarray, length: int) -> np.ndarray:
    """Return where `counts` values of each client are in an array with room for `length` of each, as one dimension."""
    begins = length * np.arange(len(counts))
    return rows_of(begins, begins + counts)


def _spread(values: np.ndarray, places: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Arrange `(values, ...)`, those of one client after another, as `(clients, length, ...)`, padded with zeros."""
    padded = np.zeros((math.prod(shape), *values.shape[1:]), values.dtype)
    padded[places] = values
    return padded.reshape(*shape, *values.shape[1:])


def arrange(indices: np.ndarray, sizes: np.ndarray, devices: int, block: int) -> np.ndarray:
    """Put clients in the order they run in: similar sizes together in blocks, blocks dealt evenly to devices.

    Args:
      indices: of the clients, `ABSENT` allowed.
      sizes: how much work each client is.
      devices: how many devices share the cohort, in equal consecutive parts.
      block: how many clients run side by side.

    Returns:
      The indices in order, padded with `ABSENT` to a multiple of `devices * block`.
    """
    work = np.where(indices >= 0, sizes, -1)
    order = np.lexsort((indices, -work))
    short = -len(order) % (devices * block)
    blocks = np.append(indices[order], np.full(short, ABSENT, indices.dtype)).reshape(-1, block)
    longest = np.append(work[order], np.zeros(short, work.dtype))[::block]  # of each block: its steps follow from it
    return blocks[np.argsort(_deal(longest.tolist(), devices), kind="stable")].reshape(-1)


def _deal(work: Sequence[float], devices: int) -> list[int]:
    """Return the device of each block. All get equally many; in each lap, who has least so far gets the largest.

    Args:
      work: of the blocks, the largest first.
      devices: how many there are.
    """
    loads, device = [0.0] * devices, []
    for lap in range(0, len(work), devices):
        order = sorted(range(devices), key=loads.__getitem__)
        for who, more in zip(order, work[lap : lap + devices], strict=True):
            loads[who] += more
        device += order
    return device
