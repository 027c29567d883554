"""Federated Stack Overflow, as TensorFlow Federated publishes it: an SQLite database, one serialized example per row.

Tables: `examples(split_name, client_id, serialized_example_proto)`, with an index over the first two, and
`client_metadata(client_id, split_name, num_examples)`. The database is not downloaded: docs/data.md says where to get
it. Examples are read without TensorFlow.
"""

import lzma
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Unpack
from urllib.parse import quote

import numpy as np

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.corpus import Corpus
from fedrecon._src.data.corpus_writer import (
    KEPT_WORDS,
    CorpusOptions,
    CorpusSettings,
    Post,
    check_client_name,
    prepare_corpus,
)
from fedrecon._src.data.sources import BadRows, DataError, RowErrors, check_expansion, report_wait, seconds
from fedrecon._src.storage.lock import file_lock

SPLITS = ("train", "heldout", "test")
SQLITE = b"SQLite format 3\x00"
COMPRESSED = (".lzma", ".xz")
FEATURES = ("creation_date", "tokens")
ROWS_PER_REPORT = 1024
TABLES = ("examples", "client_metadata")
LONGEST_ENTRY = 1 << 26  # bytes
LONGEST_WORD = 10_000  # characters of a line of the word count
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter from messages of SQLite that quote a damaged schema
IN_ORDER = "SELECT split_name, client_id, rowid, serialized_example_proto FROM examples ORDER BY rowid"
BY_CLIENT = (
    "SELECT rowid, serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid LIMIT ?"
)
VARINT, BYTES = 0, 2  # wire types of protocol buffers
SIZES = {1: 8, 5: 4}  # of wire types of a fixed size


def prepare_stackoverflow(
    database: str | Path,
    folder: str | Path,
    *,
    word_count: str | Path | None = None,
    clients: Mapping[str, int] | None = None,
    unpack: bool = False,
    bad_rows: BadRows = "error",
    progress: Progress = silent,
    **options: Unpack[CorpusOptions],
) -> Corpus:
    """Prepare a corpus from federated Stack Overflow, client by client.

    The corpus has the splits of the data set: `train`, `heldout` (other users) and `test` (later sentences of users
    in `train`). A user in both becomes two clients with the same name.

    Args:
      database: `stackoverflow.sqlite`; or `stackoverflow.sqlite.lzma` with `unpack`.
      folder: where the corpus goes; must not exist yet.
      word_count: `stackoverflow.word_count`, whose first words become the vocabulary; None counts the words of
        the training clients that are taken.
      clients: how many clients to draw at random from each split; all from a split that is not named.
      unpack: whether a compressed database may be unpacked to a file next to it, which then stays.
      bad_rows: "error" refuses examples that cannot be read and names the first; "skip" counts them.
      progress: a progress display.
      **options: seed, kept_words, max_sentences and words_in_memory; see `CorpusOptions`.

    Raises:
      DataError: a file is missing or not what it should be.

    Example:
      >>> import fedrecon as fr
      >>> try:
      ...     fr.data.prepare_stackoverflow("stackoverflow.sqlite", "corpus", clients={"train": 10_000, "test": 0})
      ... except fr.data.DataError as error:
      ...     print(error)
      stackoverflow.sqlite is not a file; expected stackoverflow.sqlite. Check the path.
    """
    errors = RowErrors(bad_rows)
    numbers = dict(clients or {})
    if not set(numbers) <= set(SPLITS) or min(numbers.values(), default=0) < 0:
        raise ValueError(f"`clients` must map {', '.join(SPLITS)} to numbers that are not negative (got {clients}).")
    words = None if word_count is None else read_word_count(word_count, options.get("kept_words", KEPT_WORDS))
    settings = CorpusSettings(splits=SPLITS, **{**options, "fractions": None, "words": words})  # type: ignore[arg-type]
    path = _unpack_once(Path(database), unpack, progress)
    with _connect(path) as connection:
        sizes = _draw_clients(connection, path, numbers, settings.seed)
        posts = _read_examples(connection, path, sizes, settings.max_sentences, errors, progress)
        return prepare_corpus(posts, folder, settings, str(database), errors.skipped, progress)


def read_word_count(path: str | Path, limit: int = KEPT_WORDS) -> list[str]:
    """Return the first words of `stackoverflow.word_count`: lines of a word and its count, most used first.

    Raises:
      DataError: the file is missing or has other lines.
    """
    words: dict[str, None] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_WORD), ""), 1):
                fields = line.split()
                if len(fields) != 2 or not fields[1].isdigit():
                    raise DataError(f"{path} line {number}: {line[:50]!r} is not a word and its count.")
                if fields[0] in words:
                    raise DataError(f"{path} line {number}: {fields[0]!r} is listed twice.")
                words[fields[0]] = None
                if len(words) == limit:
                    break
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {path}: {problem}. Expected stackoverflow.word_count, unpacked.") from problem
    if not words:
        raise DataError(f"{path} is empty; expected a word and its count on each line.")
    return list(words)


# ---- the database ----


def _unpack_once(path: Path, unpack: bool, progress: Progress) -> Path:
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
    with file_lock(target.with_name(f".{target.name}.lock"), str(target), wait=math.inf, on_wait=report_wait):
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


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading only, and check that it holds two plain tables.

    A view or a computed column is a program: it could run forever, or make gigabytes out of nothing.
    """
    with path.open("rb") as file:
        if file.read(len(SQLITE)) != SQLITE:
            raise DataError(f"{path} is not an SQLite database; expected stackoverflow.sqlite, unpacked.")
    with closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as connection:
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_ENTRY)
            connection.execute("PRAGMA trusted_schema = OFF")
            for table in TABLES:
                _check_table(connection, path, table)
            yield connection
        except UNREADABLE as problem:
            raise DataError(f"{path} cannot be read as federated Stack Overflow: {problem}.") from problem


def _check_table(connection: sqlite3.Connection, path: Path, table: str) -> None:
    """Refuse anything of this name that is not a plain table."""
    query = "SELECT type, sql FROM sqlite_master WHERE name = ?"
    entries = connection.execute(query, (table,)).fetchall()
    kinds = [str(kind) if "virtual" not in str(sql)[:20].lower() else "virtual table" for kind, sql in entries]
    if kinds and kinds != ["table"]:
        raise DataError(f"{path}: {table} is a {kinds[0]}; expected a table, as in the published database.")
    computed = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({table})") if row[6] in (2, 3)]
    if computed:
        raise DataError(f"{path}: the column {computed[0]} of {table} is computed; expected plain columns.")


def _draw_clients(
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


def _read_examples(
    connection: sqlite3.Connection,
    path: Path,
    chosen: Mapping[tuple[str, str], int],
    max_sentences: int,
    errors: RowErrors,
    progress: Progress,
) -> Iterator[Post]:
    """Yield the first sentences of the chosen clients, each as a post of its own."""
    errors.skipped["sentences_over_maximum"] += sum(max(0, size - max_sentences) for size in chosen.values())
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
                errors.add(f"{path} examples row {row} (client {client})", problem)
                continue
            if not post.sentences:
                errors.skipped["sentences_without_words"] += 1
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
    features = decode_example(blob)
    texts = {}
    for name in FEATURES:
        match features.get(name):
            case [bytes(value)]:
                texts[name] = value.decode("utf-8")
            case other:
                raise ValueError(f"{name} should be one text, but is {str(other)[:50]}")
    words = texts["tokens"].split()
    time = seconds(texts["creation_date"].removesuffix(" UTC"))
    return Post(check_client_name(client), time, [words] if words else [], split)


# ---- tf.train.Example ----
#
# An Example holds Features (field 1), a map (field 1) whose entries have a key (field 1) and a Feature (field 2), which
# holds a list of bytes (field 1) with its values in field 1. Lists of floats and of integers are not read.


def decode_example(message: bytes) -> dict[str, list[bytes]]:
    """Return the features of an Example that are bytes, by name; ValueError if the bytes are not an Example."""
    features: dict[str, list[bytes]] = {}
    for entry in (entry for nested in _read_fields(message, 1) for entry in _read_fields(nested, 1)):
        name = (_read_fields(entry, 1) or [b""])[-1].decode("utf-8")
        feature = (_read_fields(entry, 2) or [b""])[-1]
        lists = _read_fields(feature, 1)
        features[name] = _read_fields(lists[-1], 1) if lists else []
    return features


def _read_fields(message: bytes, number: int) -> list[bytes]:
    """Return the content of the fields with this number, in the wire format of protocol buffers."""
    contents, position, end = [], 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == VARINT:
            _, position = _read_varint(message, position)
            continue
        if kind == BYTES:
            size, position = _read_varint(message, position)
        elif kind in SIZES:
            size = SIZES[kind]
        else:
            raise ValueError(f"unknown wire type {kind} at byte {position}")
        if tag >> 3 == 0 or position + size > end:
            raise ValueError(f"a field of {size} bytes at byte {position} does not fit in a message of {end}")
        if tag >> 3 == number and kind == BYTES:
            contents.append(message[position : position + size])
        position += size
    return contents


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number that begins at a position, and the position after it."""
    number = 0
    for k, byte in enumerate(message[position : position + 10]):
        number |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return number, position + k + 1
    raise ValueError(f"a number at byte {position} does not end")
