"""Federated Stack Overflow, as TensorFlow Federated publishes it: an SQLite database, one serialized example per row.

Tables: `examples(split_name, client_id, serialized_example_proto)`, with an index over the first two, and
`client_metadata(client_id, split_name, num_examples)`. The database is not downloaded: docs/data.md says where to get
it. Examples are read without TensorFlow.
"""

import io
import itertools
import lzma
import shutil
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Unpack
from urllib.parse import quote

import numpy as np

from fedrecon._src.core.display import Progress, silent
from fedrecon._src.data.corpus import Corpus
from fedrecon._src.data.corpus_writer import (
    KEPT_WORDS,
    CorpusOptions,
    CorpusSettings,
    Post,
    check_client_name,
    parse_posts,
    prepare_corpus,
)
from fedrecon._src.data.sources import (
    CHUNK,
    BadRows,
    DataError,
    Reader,
    RowErrors,
    check_file,
    check_left,
    make_once,
    open_bytes,
    read_text,
    since_1970,
)
from fedrecon._src.storage.atomic import atomic_file

SPLITS = ("train", "heldout", "test")
COMPRESSED = (".lzma", ".xz")
TABLES = ("examples", "client_metadata")
LONGEST_ENTRY = 1 << 26  # bytes
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter from messages of SQLite that quote a damaged schema
# Client by client, with the published index or, where that is missing, one that SQLite makes for this query.
EXAMPLES = """
SELECT chosen.rowid, split, client, examples.rowid, CAST(ifnull(serialized_example_proto, '') AS BLOB)
FROM chosen CROSS JOIN examples ON split_name = split AND client_id = client
ORDER BY chosen.rowid, examples.rowid
"""
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
        raise ValueError(f"`clients` must map {', '.join(SPLITS)} to numbers of at least 0 (got {clients}).")
    words = None if word_count is None else read_word_count(word_count, options.get("kept_words", KEPT_WORDS))
    settings = CorpusSettings(splits=SPLITS, **{**options, "fractions": None, "words": words})  # type: ignore[arg-type]
    path = _unpack_once(Path(database), unpack, progress)
    with _connect(path) as connection:
        records = _read_examples(connection, path, _draw_clients(connection, numbers, settings.seed), progress)
        posts = parse_posts(records, _parse_example, errors, "sentences")
        return prepare_corpus(posts, folder, settings, str(database), errors.skipped, progress)


def read_word_count(path: str | Path, limit: int = KEPT_WORDS) -> list[str]:
    """Return the first words of `stackoverflow.word_count`: lines of a word and its count, most used first.

    Raises:
      DataError: the file is missing or has other lines.
    """
    words: dict[str, None] = {}
    with open_bytes(path) as stream:
        lines = (line for chunk in read_text(stream, str(path), "utf-8") for line in chunk.split("\n")[:-1])
        for number, line in enumerate(itertools.takewhile(lambda _: len(words) < limit, lines), 1):
            word, *count = line.split() or [""]
            if len(count) != 1 or not count[0].isdigit() or word in words:
                raise DataError(f"{path} line {number}: {line[:50]!r} must be a new word and its count.")
            words[word] = None
    check_left(len(words), str(path), "lines of a word and its count", {})
    return list(words)


# ---- the database ----


def _unpack_once(path: Path, unpack: bool, progress: Progress) -> Path:
    """Return where the database is, after unpacking it if necessary."""
    check_file(path, "stackoverflow.sqlite")
    if path.suffix not in COMPRESSED:
        return path
    target = path.with_suffix("")
    if not unpack and not target.is_file():
        advice = "(xz --decompress --keep --format=auto), or give unpack=True; it takes several times the space"
        raise DataError(f"{path} is compressed. Unpack it to {target.name} first {advice}.", ["unpack"])
    return make_once(target, lambda: _unpack(path, target, progress))


def _unpack(path: Path, target: Path, progress: Progress) -> None:
    """Unpack a file, which appears under its name when it is complete."""
    with (
        progress(f"unpacking {path.name} (kB)", path.stat().st_size >> 10) as advance,
        path.open("rb") as raw,
        atomic_file(target) as file,
    ):
        packed = Reader(raw, str(path), on_read=lambda done: advance(done >> 10))
        with lzma.open(io.BufferedReader(packed)) as unpacked:
            shutil.copyfileobj(Reader(unpacked, str(path), packed), file, CHUNK)


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading only, and check that it holds two plain tables.

    A view or a computed column is a program: it could run forever, or make gigabytes out of nothing.
    """
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
    entries = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (table,))
    kinds = [str(kind) if "virtual" not in str(sql)[:20].lower() else "virtual table" for kind, sql in entries]
    if kinds in ([], ["table"]):
        kinds = [f"column {row[1]}" for row in connection.execute(f"PRAGMA table_xinfo({table})") if row[6] in (2, 3)]
    if kinds:
        raise DataError(f"{path}: {table} must be a table without computed columns (got {kinds}).")


def _draw_clients(connection: sqlite3.Connection, numbers: Mapping[str, int], seed: int) -> list[tuple[str, str]]:
    """Return the split and the id of each chosen client, in alphabetical order."""
    chosen: list[tuple[str, str]] = []
    for split in SPLITS:
        query = connection.execute("SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?", (split,))
        names = sorted(str(name) for (name,) in query)
        if numbers.get(split, len(names)) < len(names):
            picked = np.random.default_rng(seed).permutation(len(names))[: numbers[split]]
            names = [names[k] for k in np.sort(picked)]
        chosen += [(split, name) for name in names]
    return chosen


def _read_examples(
    connection: sqlite3.Connection, path: Path, chosen: Sequence[tuple[str, str]], progress: Progress
) -> Generator[tuple[str, tuple[str, str, bytes]]]:
    """Yield where each example of the chosen clients is, and its split, client and content."""
    connection.execute("CREATE TEMP TABLE chosen (split TEXT, client TEXT)")
    connection.executemany("INSERT INTO chosen VALUES (?, ?)", chosen)
    most_rows, last = path.stat().st_size, 1
    with progress("reading clients", len(chosen)) as advance:
        for done, (number, split, client, row, blob) in enumerate(connection.execute(EXAMPLES), 1):
            if number > last:
                advance(number - last)
                last = number
            if done > most_rows:
                raise DataError(f"{path} gives more rows than it has bytes: it is damaged. Get it again.")
            yield f"{path} examples row {row} (client {client})", (split, client, blob)


def _parse_example(record: tuple[str, str, bytes]) -> Post:
    """Return the sentence that an example holds, as a post of its own, or raise ValueError with what is wrong."""
    split, client, blob = record
    match decode_example(blob):
        case {"creation_date": [bytes(date)], "tokens": [bytes(tokens)]}:
            words = tokens.decode("utf-8").split()
            time = since_1970(date.decode("utf-8").removesuffix(" UTC")).total_seconds()
            return Post(check_client_name(client), time, [words] if words else [], SPLITS.index(split))
        case features:
            raise ValueError(f"creation_date and tokens must be one text each (got {str(features)[:100]})")


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
        size = SIZES.get(kind, end)  # no field of an unknown type fits
        if kind in (VARINT, BYTES):
            value, position = _read_varint(message, position)
            size = value if kind == BYTES else 0
        if tag >> 3 == 0 or position + size > end:
            raise ValueError(f"a field of type {kind} and {size} bytes at byte {position} does not fit in {end}")
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
