"""Federated data sets as TensorFlow Federated publishes them: an SQLite database, one serialized example per row.

Tables: `examples(split_name, client_id, serialized_example_proto)`, with an index over the first two, and
`client_metadata(client_id, split_name, num_examples)`.
"""

import lzma
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedrecon._src.core.progress import Progress
from fedrecon._src.data.dates import seconds
from fedrecon._src.data.downloads import say_who
from fedrecon._src.data.errors import DataError
from fedrecon._src.data.sources import check_expansion
from fedrecon._src.data.text.records import BadRecords, client_name
from fedrecon._src.data.text.runs import Post
from fedrecon._src.data.text.tf_example import decode_example
from fedrecon._src.storage.locks import hold

SPLITS = ("train", "heldout", "test")
SQLITE = b"SQLite format 3\x00"
COMPRESSED = (".lzma", ".xz")
FEATURES = ("creation_date", "tokens")
ROWS_PER_REPORT = 1024
TABLES = ("examples", "client_metadata")
LONGEST_ENTRY = 1 << 26  # bytes
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter from messages of SQLite that quote a damaged schema
IN_ORDER = "SELECT split_name, client_id, rowid, serialized_example_proto FROM examples ORDER BY rowid"
BY_CLIENT = (
    "SELECT rowid, serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid LIMIT ?"
)


def unpacked(path: Path, unpack: bool, progress: Progress) -> Path:
    """Return where the database is, after unpacking it if necessary."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; expected stackoverflow.sqlite. Check the path.")
    if path.suffix not in COMPRESSED:
        return path
    target = path.with_suffix("")
    if target.is_file():
        return target
    if not unpack:
        raise DataError(
            f"{path} is compressed. Unpack it to {target.name} first (xz --decompress --keep --format=auto), or "
            "give unpack=True; the database takes several times the space."
        )
    with hold(target.with_name(f".{target.name}.lock"), str(target), wait=math.inf, on_wait=say_who):
        if not target.is_file():
            _unpack(path, target, progress)
    return target


def _unpack(path: Path, target: Path, progress: Progress) -> None:
    """Unpack a file, which appears under its name when it is complete."""
    temporary = target.with_name(f".{target.name}.partial")
    size, unpacked = path.stat().st_size, 0
    try:
        with (
            path.open("rb") as raw,
            lzma.open(raw) as source,
            temporary.open("wb") as file,
            progress(f"unpacking {path.name} (kB)", size >> 10) as advance,
        ):
            done = 0
            while piece := source.read(1 << 20):
                unpacked += len(piece)
                check_expansion(str(path), unpacked, size)
                file.write(piece)
                advance((raw.tell() >> 10) - done)
                done = raw.tell() >> 10
        temporary.replace(target)
    except (lzma.LZMAError, EOFError) as problem:
        raise DataError(f"{path} is damaged or cut off ({problem}). Get it again.") from problem
    except OSError as problem:
        raise DataError(f"cannot unpack {path} to {target}: {problem.strerror}.") from problem
    finally:
        temporary.unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for reading only, and check that it holds two plain tables.

    A view or a computed column is a program: it could run forever, or make gigabytes out of nothing.
    """
    with path.open("rb") as file:
        if file.read(len(SQLITE)) != SQLITE:
            raise DataError(f"{path} is not an SQLite database; expected stackoverflow.sqlite, unpacked.")
    connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_ENTRY)
        connection.execute("PRAGMA trusted_schema = OFF")
        for table in TABLES:
            _check_table(connection, path, table)
    except UNREADABLE as problem:
        connection.close()
        raise DataError(f"{path} cannot be read as federated Stack Overflow: {problem}.") from problem
    except BaseException:
        connection.close()
        raise
    return connection


def _check_table(connection: sqlite3.Connection, path: Path, table: str) -> None:
    """Refuse anything of this name that is not a plain table."""
    query = "SELECT type, sql FROM sqlite_master WHERE name = ?"
    found = connection.execute(query, (table,)).fetchall()
    kinds = [str(kind) if "virtual" not in str(sql)[:20].lower() else "virtual table" for kind, sql in found]
    if kinds and kinds != ["table"]:
        raise DataError(f"{path}: {table} is a {kinds[0]}; expected a table, as in the published database.")
    computed = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({table})") if row[6] in (2, 3)]
    if computed:
        raise DataError(f"{path}: the column {computed[0]} of {table} is computed; expected plain columns.")


def choose_clients(
    connection: sqlite3.Connection, path: Path, numbers: Mapping[str, int], seed: int
) -> dict[tuple[str, str], int]:
    """Return how many examples each chosen client has, by split and id, in alphabetical order."""
    query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
    chosen: dict[tuple[str, str], int] = {}
    for split in SPLITS:
        sizes = {str(name): _count(path, name, size) for name, size in connection.execute(query, (split,))}
        names = sorted(sizes)
        if split in numbers and numbers[split] < len(names):
            picked = np.random.default_rng(seed).permutation(len(names))[: numbers[split]]
            names = [names[k] for k in np.sort(picked)]
        chosen |= {(split, name): sizes[name] for name in names}
    return chosen


def _count(path: Path, client: object, size: object) -> int:
    if not isinstance(size, int) or size < 0:
        whose = f"{path}: num_examples of client {str(client)[:50]!r}"
        raise DataError(f"{whose} in client_metadata is {str(size)[:50]!r}, not a count.")
    return size


def read_examples(
    connection: sqlite3.Connection,
    path: Path,
    chosen: Mapping[tuple[str, str], int],
    max_sentences: int,
    bad: BadRecords,
    progress: Progress,
) -> Iterator[Post]:
    """Yield the first sentences of the chosen clients, each as a post of its own."""
    bad.skipped["sentences_over_maximum"] += sum(max(0, size - max_sentences) for size in chosen.values())
    rows = _rows_by_client if _has_index(connection) else _rows_in_order
    most_rows = path.stat().st_size
    with progress("reading sentences", sum(min(size, max_sentences) for size in chosen.values())) as advance:
        for done, (split, client, row, blob) in enumerate(rows(connection, chosen, max_sentences), 1):
            if done % ROWS_PER_REPORT == 0:
                advance(ROWS_PER_REPORT)
            if done > most_rows:
                raise DataError(f"{path} gives more rows than it has bytes: it is damaged. Get it again.")
            try:
                post = _parse_example(blob, client, SPLITS.index(split))
            except (ValueError, OverflowError) as problem:
                bad.found(f"{path} examples row {row} (client {client})", problem)
                continue
            if not post.sentences:
                bad.skipped["sentences_without_words"] += 1
            yield post


def _has_index(connection: sqlite3.Connection) -> bool:
    """Tell whether the examples of a client can be found without reading all examples, as in the published file."""
    return any("client_id=?" in step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {BY_CLIENT}", ("", "", 0)))


def _rows_by_client(
    connection: sqlite3.Connection, chosen: Mapping[tuple[str, str], int], most: int
) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield the first examples of every client in turn, with split, client and row."""
    for split, client in chosen:
        for row, blob in connection.execute(BY_CLIENT, (split, client, most)):
            yield split, client, row, blob


def _rows_in_order(
    connection: sqlite3.Connection, chosen: Mapping[tuple[str, str], int], most: int
) -> Iterator[tuple[str, str, int, bytes]]:
    """Yield the same in the order of the table, which is read once as a whole."""
    seen: Counter[tuple[str, str]] = Counter()
    for split, client, row, blob in connection.execute(IN_ORDER):
        key = (split, str(client))
        if key in chosen and seen[key] < most:
            seen[key] += 1
            yield *key, row, blob


def _parse_example(blob: bytes, client: str, split: int) -> Post:
    """Return the sentence that an example holds, or raise ValueError with what is wrong."""
    if not isinstance(blob, bytes):
        raise ValueError(f"serialized_example_proto is {type(blob).__name__}, not a blob")
    features = decode_example(blob, FEATURES)
    texts = {}
    for name in FEATURES:
        match features.get(name):
            case [bytes(value)]:
                texts[name] = value.decode("utf-8")
            case other:
                raise ValueError(f"{name} should be one text, but is {str(other)[:50]}")
    words = texts["tokens"].split()
    time = seconds(texts["creation_date"].removesuffix(" UTC"))
    return Post(client_name(client), time, [words] if words else [], split)
