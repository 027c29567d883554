"""Titles of your own items: a file of ids and titles, and labels that tell items with the same title apart."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrecon._src.data.errors import DataError
from fedrecon._src.data.ratings.columns import Column, find_columns
from fedrecon._src.data.ratings.ids import check_id
from fedrecon._src.data.ratings.layout import check_delimiter
from fedrecon._src.data.sources import is_readable, open_bytes, read_text

LONGEST_TITLE = 500  # characters


def load_titles(
    path: str | Path,
    item: Column = "item",
    title: Column = "title",
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> dict[str, str]:
    """Read what items are called.

    Args:
      path: a text file with a header line, a pipe, or "-" for standard input; quoted fields may have commas.
      item: header of the column with item ids, or its position counted from 0.
      title: the same for titles.
      delimiter: what separates fields; None looks for tab, comma, semicolon or `::` in the first line.
      encoding: the encoding of the file.

    Returns:
      Title by item id, as text. If an item has several, the last counts; items without one are left out.

    Raises:
      DataError: the file is missing or malformed; the message names the line.
    """
    if not is_readable(path):
        raise DataError(f"{path} is not a file; expected item ids and their titles. Check the path.")
    check_delimiter(delimiter)
    source = "standard input" if str(path) == "-" else str(path)
    titles: dict[str, str] = {}
    with open_bytes(path) as stream:
        lines = (line for piece in read_text(stream, source, encoding) for line in io.StringIO(piece))
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise DataError(f"{source} is empty; expected a header line and one item per line.")
        mark = delimiter or max(("::", "\t", ",", ";"), key=lambda mark: first.count(mark) * len(mark))
        split = (line.split(mark) for line in lines)
        rows = split if len(mark) > 1 else csv.reader(lines, delimiter=mark, skipinitialspace=mark != " ")
        try:
            header = first.split(mark) if len(mark) > 1 else next(csv.reader([first], delimiter=mark))
            names = [name.strip() for name in header]
            places = find_columns(names, len(names), source, {"item": item, "title": title}).positions
            for number, row in enumerate(rows, 2):
                fields = [field.strip() for field in row]
                if not any(fields):
                    continue
                if len(fields) <= max(places.values()):
                    raise DataError(f"{source} row {number}: expected {len(names)} fields, but there are {len(fields)}")
                try:
                    check_id("item", fields[places["item"]])
                except ValueError as problem:
                    raise DataError(f"{source} row {number}: {problem}") from None
                if fields[places["title"]]:
                    titles[fields[places["item"]]] = fields[places["title"]][:LONGEST_TITLE]
        except csv.Error as problem:
            raise DataError(f"{source}: {problem}; is a quote left open?") from None
    return titles


def unique_labels(titles: Sequence[str], ids: Sequence[Any]) -> list[str]:
    """Return a label for every item: its title, followed by its id where several items share the title.

    Args:
      titles: the title of every item; an empty one is replaced by the id.
      ids: the id of every item, each different.
    """
    if len(titles) != len(ids):
        raise ValueError(f"there are {len(titles)} titles for {len(ids)} items: give one for each.")
    if len(set(map(str, ids))) < len(ids):
        raise ValueError("some ids occur twice: give a different one for each item.")
    names = [title or str(own) for title, own in zip(titles, ids, strict=True)]
    while clash := {name for name, count in Counter(names).items() if count > 1}:  # a title may look like a label
        names = [f"{name} [{own}]" if name in clash else name for name, own in zip(names, ids, strict=True)]
    return names
