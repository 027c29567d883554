"""What ids stand for, read for a plan: a catalogue of items, or a list of words."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fedrecon._src.data import Vocabulary, unique_labels
from fedrecon._src.data.sources import DataError
from fedrecon._src.recommend.tasks import Items


def read_items(path: Path, item: str = "item", title: str = "title") -> Items:
    """Read a catalogue: a CSV file with a header, one item per line.

    Items are numbered in the order of their ids, whatever the order of the file.

    Args:
      path: the file.
      item: header of the column with ids.
      title: header of the column with titles, which is optional.

    Raises:
      DataError: the file is not a catalogue; the message says why.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if item not in (rows.fieldnames or ()):
                header = ", ".join(rows.fieldnames or ()) or "nothing"
                raise DataError(f"{path} has no column {item!r}; its first line names: {header}. Use --item-column.")
            titles: dict[str, str] = {}
            for row in rows:
                if not (item_id := (row[item] or "").strip()):
                    continue
                name = (row.get(title) or "").strip()
                if titles.setdefault(item_id, name) != name:
                    raise DataError(
                        f"{path} line {rows.line_num}: item {item_id[:40]!r} has the title {name[:40]!r}, but "
                        f"{titles[item_id][:40]!r} above; give every item one title"
                    )
            named = title in (rows.fieldnames or ())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from None
    if not titles:
        raise DataError(f"{path} lists no items")
    if all(text.isascii() and text.isdigit() and str(int(text)) == text and len(text) < 19 for text in titles):
        ids = np.array(sorted(map(int, titles)))
    else:
        ids = np.array(sorted(titles))
    labels = [titles[str(item_id)] or str(item_id) for item_id in ids.tolist()]
    return Items(ids, np.array(unique_labels(labels, ids.tolist())) if named else None)


def read_words(path: Path, most: int, buckets: int) -> Vocabulary:
    """Read a vocabulary: one word per line, the most used first.

    Args:
      path: the file.
      most: take at most this many words, the first ones.
      buckets: how many buckets hold all other words.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise DataError(f"{path} lists no words")
    return Vocabulary(tuple(words[:most]), buckets)
