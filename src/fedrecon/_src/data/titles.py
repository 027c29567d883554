"""Titles of items: a table of ids and titles, and labels that tell items with the same title apart."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Unpack

import pyarrow as pa

from fedrecon._src.data.columns import LONGEST_ID, Column, check_id, find_columns
from fedrecon._src.data.sources import BadRows, RowErrors
from fedrecon._src.data.tables import Table, TextOptions, open_table

LONGEST_TITLE = 500  # characters


def load_titles(
    source: Any,
    item: Column = "item",
    title: Column = "title",
    bad_rows: BadRows = "error",
    **text: Unpack[TextOptions],
) -> dict[str, str]:
    """Read what items are called.

    Args:
      source: the path of a text or Parquet file or a pipe, "-" for standard input, or a data frame.
      item: header of the column with item ids, or its position counted from 0.
      title: the same for titles.
      bad_rows: "error" refuses rows that cannot be read and names the first; "skip" leaves them out.
      **text: delimiter, header, encoding and skip_lines of a text file; see `TextOptions`.

    Returns:
      Title by item id, as text. If an item has several, the last counts; items without one are left out.

    Raises:
      DataError: the table is missing or malformed; the message names the line.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.load_titles({"movieId": [1, 2], "title": ["Alien", "Brazil"]})
      {'1': 'Alien', '2': 'Brazil'}
    """
    text.setdefault("header", True)
    with open_table(source, **text) as table:
        return read_titles(table, item, title, RowErrors(bad_rows))


def read_titles(table: Table, item: Column, title: Column, errors: RowErrors) -> dict[str, str]:
    """Read titles by item id."""
    positions = find_columns(table, {"item": item, "title": title}).positions
    titles: dict[str, str] = {}
    done = 0
    for batch in table.batches(positions, {"item": "text", "title": "text"}, errors):
        ids, names = (_to_texts(batch.columns[role]) for role in ("item", "title"))
        if batch.reread is not None and not all(0 < len(key) <= LONGEST_ID for key in ids):
            batch = batch.reread()
            ids, names = (_to_texts(batch.columns[role]) for role in ("item", "title"))
        for row, (key, name) in enumerate(zip(ids, names, strict=True)):
            try:
                check_id("item", key)
            except ValueError as problem:
                errors.add(f"{table.source} {batch.describe_row(row, done)}", problem)
            else:
                titles |= {key: name[:LONGEST_TITLE]} if name else {}
        done += len(ids)
    return titles


def _to_texts(column: pa.Array) -> list[str]:
    return ["" if value is None else str(value).strip() for value in column.to_pylist()]


def unique_labels(titles: Sequence[str], ids: Sequence[Any]) -> list[str]:
    """Return a label for every item: its title, followed by its id where several items share the title.

    Args:
      titles: the title of every item; an empty one is replaced by the id.
      ids: the id of every item, each different.

    Example:
      >>> import fedrecon as fr
      >>> fr.data.unique_labels(["Hamlet", "Brazil", "Hamlet"], [1, 2, 3])
      ['Hamlet [1]', 'Brazil', 'Hamlet [3]']
    """
    if len(titles) != len(ids):
        raise ValueError(f"`titles` and `ids` must have the same length (got {len(titles)} and {len(ids)}).")
    if len(set(map(str, ids))) < len(ids):
        raise ValueError("`ids` must be distinct.")
    names = [title or str(id_) for title, id_ in zip(titles, ids, strict=True)]
    while clash := {name for name, count in Counter(names).items() if count > 1}:  # a title may look like a label
        names = [f"{name} [{id_}]" if name in clash else name for name, id_ in zip(names, ids, strict=True)]
    return names
