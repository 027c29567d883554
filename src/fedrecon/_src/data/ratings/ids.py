"""Ids of users and items: every row holds a number, and every different id is stored once.

So one long id among millions costs its own length and no more, and whether ids are numbers or text is decided by the
different ones alone: a single `007` does not turn millions of rows into text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedrecon._src.data.errors import DataError

LONGEST_ID = 200  # characters
MOST_BYTES = 1 << 31  # of all different ids of a column as text of fixed width

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


class Coded(NamedTuple):
    """A column of ids: `values` are the different ones in ascending order, `codes` their numbers row by row."""

    codes: np.ndarray
    values: np.ndarray


def code(ids: np.ndarray) -> Coded:
    """Number the ids of an array."""
    values, codes = np.unique(ids, return_inverse=True)
    return Coded(codes.astype(np.int32), values)


def check_id(role: str, text: str) -> None:
    """Raise ValueError with what is wrong with an id, if anything is."""
    if not text:
        raise ValueError(f"{role} is empty")
    if len(text) > LONGEST_ID:
        raise ValueError(f"{role} {text[:30] + '...'!r} has {len(text)} characters, more than {LONGEST_ID}")
    if "\0" in text:
        raise ValueError(f"{role} {text!r} has a zero character")


class _Numbers(dict[str, int]):
    """Number every id in the order in which they are first asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number

    def of(self, ids: Iterable[str], count: int) -> np.ndarray:
        """Return the numbers of ids."""
        return np.fromiter(map(self.__getitem__, ids), np.int32, count)


class IdColumn:
    """Collects the ids of a column piece by piece: as text, as integers, or as dictionary arrays of pyarrow."""

    def __init__(self, source: str, role: str, numbers: bool = True) -> None:
        """Begin with none; `source` and `role` are for messages, `numbers` allows text to become integers."""
        self.source, self.role, self.numbers = source, role, numbers
        self._numbers = _Numbers()
        self._parts: list[Any] = []

    def add_texts(self, ids: Sequence[str]) -> None:
        """Add the next rows."""
        self._parts.append(self._numbers.of(ids, len(ids)))

    def add_coded(self, codes: np.ndarray, values: Sequence[str]) -> None:
        """Add the next rows, which are coded already."""
        self._parts.append(self._numbers.of(values, len(values))[codes])

    def add_integers(self, ids: np.ndarray) -> None:
        """Add the next rows, of type int64."""
        self._parts.append(ids)

    def add_dictionary(self, ids: Any) -> None:
        """Add the next rows, a `pyarrow.DictionaryArray` of text."""
        self._parts.append(ids)

    def finish(self) -> Coded:
        """Return all rows; the pieces are forgotten."""
        parts, self._parts = self._parts, []
        integers = [k for k, part in enumerate(parts) if isinstance(part, np.ndarray) and part.dtype == np.int64]
        if integers:
            values, codes = np.unique(np.concatenate([parts[k] for k in integers]), return_inverse=True)
            codes = self._numbers.of(map(str, values.tolist()), len(values))[codes]
            for k, part in zip(integers, np.split(codes, np.cumsum([len(parts[k]) for k in integers])), strict=False):
                parts[k] = part
        arrays = [k for k, part in enumerate(parts) if not isinstance(part, np.ndarray)]
        if arrays:
            import pyarrow as pa

            together = pa.chunked_array([parts[k] for k in arrays]).unify_dictionaries()
            values = together.chunk(0).dictionary.to_pylist()
            new = self._numbers.of(values, len(values))
            for k, chunk in zip(arrays, together.chunks, strict=True):
                parts[k] = new[chunk.indices.to_numpy(zero_copy_only=False)]
        codes = np.concatenate([np.empty(0, np.int32), *parts])
        values = self._typed(list(self._numbers))
        order = np.argsort(values, kind="stable")
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return Coded(rank[codes], values[order])

    def _typed(self, texts: list[str]) -> np.ndarray:
        """Return ids as integers if that loses nothing, else as text."""
        if self.numbers and all(map(_INTEGER.fullmatch, texts)):
            try:
                return np.array(list(map(int, texts)), np.int64)
            except OverflowError:
                pass
        longest = max(texts, key=len, default="")
        if len(longest) * 4 * len(texts) > MOST_BYTES:
            raise DataError(
                f"{self.source} has {len(texts):,} different {self.role} ids, the longest of {len(longest)} characters "
                f"({longest[:30]!r}): {len(longest) * 4 * len(texts) / 1e9:.1f} GB as text. Shorten the longest."
            )
        return np.array(texts, dtype=str)
