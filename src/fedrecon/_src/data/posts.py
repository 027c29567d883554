"""Posts of many people: JSON lines, and the `Posts.xml` of Stack Exchange dumps, prepared as a corpus."""

import gzip
import io
import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from typing import Any, Unpack
from xml.etree import ElementTree

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.corpus import Corpus
from fedrecon._src.data.corpus_writer import CorpusOptions, CorpusSettings, Post, prepare_corpus
from fedrecon._src.data.sources import GZIP, BadRows, BoundedReader, DataError, RowErrors, UnpackingError, seconds
from fedrecon._src.data.vocabulary import split_text

SEVEN_ZIP = b"7z\xbc\xaf\x27\x1c"
LONGEST_LINE = 1 << 26  # bytes; anything longer is not a record
LONGEST_NAME = 200
LINES_PER_REPORT = 256

QUESTION, ANSWER = 1, 2
XML_FRAME = (b"<?xml", b"<posts", b"</posts", b"\xef\xbb\xbf<?xml")  # how the lines that hold no post begin
# A tag: quoted attributes may hold ">". Possessive, and without "<" in it, so that no character is looked at twice.
_TAG = re.compile(
    r"""(?P<comment><!--)|<(?P<slash>/?)(?P<name>[A-Za-z][A-Za-z0-9]*+)(?:[^<>"']++|"[^"<]*+"|'[^'<]*+')*+>"""
)
BLOCKS = frozenset("address blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table td th tr ul".split())  # noqa: SIM905


# ---- records ----


def read_lines(path: str | Path, errors: RowErrors, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of every line that is not blank; gzip is recognised by its content."""
    if not Path(path).is_file():
        raise DataError(f"{path} is not a file. Check the path.")
    size = Path(path).stat().st_size
    with ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        start = raw.read(len(SEVEN_ZIP))
        raw.seek(0)
        if start == SEVEN_ZIP:
            raise DataError(f"{path} is a 7z archive: unpack it first and give the file in it.")
        file: Any = raw
        if start.startswith(GZIP):
            file = io.BufferedReader(BoundedReader(stack.enter_context(gzip.open(raw)), str(path), size))
        advance = stack.enter_context(progress(f"reading {Path(path).name} (kB)", size >> 10))
        number = done = 0
        while True:
            number += 1
            try:
                line = file.readline(LONGEST_LINE)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LONGEST_LINE)
                    errors.add(f"{path} line {number}", f"longer than {LONGEST_LINE} bytes")
                    continue
            except UnpackingError as problem:
                errors.add(f"{path} line {number}", f"the gzip data is cut off or damaged ({problem.reason})")
                return
            except OSError as problem:
                raise DataError(f"cannot read {path}: {problem.strerror or problem}") from None
            if not line:
                return
            if number % LINES_PER_REPORT == 0:
                advance((raw.tell() >> 10) - done)
                done = raw.tell() >> 10
            if not line.isspace():
                yield number, line


def check_client_name(value: Any) -> str:
    """Return a client's name, or raise ValueError if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"client {repr(value)[:50]} is neither text nor a whole number")
    name = str(value)
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"client {name[:50]!r} is not 1 to {LONGEST_NAME} printable characters")
    return name


# ---- JSON lines ----


def prepare_text(
    path: str | Path,
    folder: str | Path,
    *,
    bad_rows: BadRows = "error",
    progress: Progress = silent,
    **options: Unpack[CorpusOptions],
) -> Corpus:
    """Prepare a corpus from JSON lines: objects with `client`, `text` and maybe `time`, plain or gzip.

    `client` is text or a whole number; `time` is seconds or an ISO date, and a post without one has time 0, so a file
    without times keeps its order. The posts of a client may be anywhere in the file.

    Args:
      path: the file.
      folder: where the corpus goes; must not exist yet.
      bad_rows: "error" refuses lines that cannot be read and names the first; "skip" counts them.
      progress: a progress display.
      **options: fractions, seed, kept_words, max_sentences and words_in_memory; see `CorpusOptions`.

    Raises:
      DataError: the file is missing, has no sentences, or is malformed; the message names the line.

    Example:
      >>> import tempfile, fedrecon as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with open(f"{folder}/posts.jsonl", "w") as file:
      ...         _ = file.write('{"client": "ann", "text": "The cat sat. It slept."}')
      ...     fr.data.prepare_text(f"{folder}/posts.jsonl", f"{folder}/corpus", fractions=(1, 0, 0))
      Corpus(1 clients (1 train, 0 valid, 0 test), 2 sentences, 7 words)
    """
    errors = RowErrors(bad_rows)
    posts = _read_json(path, errors, progress)
    return prepare_corpus(posts, folder, CorpusSettings(**options), str(path), errors.skipped, progress)


def _read_json(path: str | Path, errors: RowErrors, progress: Progress) -> Iterator[Post]:
    for number, line in read_lines(path, errors, progress):
        try:
            post = _parse_json(line)
        except (ValueError, RecursionError) as problem:
            errors.add(f"{path} line {number}", problem)
            continue
        if not post.sentences:
            errors.skipped["posts_without_words"] += 1
        yield post


def _parse_json(line: bytes) -> Post:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        raise ValueError(f"not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    except ValueError as problem:
        raise ValueError(f"not JSON ({problem})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object with client and text")
    for name in ("client", "text"):
        if name not in record:
            raise ValueError(f"no {name!r}; it has: {', '.join(map(str, record)) or 'nothing'}")
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f"text {str(text)[:50]!r} is not text")
    return Post(check_client_name(record["client"]), _parse_time(record.get("time")), split_text(text))


def _parse_time(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, str):
        return seconds(value)
    try:
        time = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, OverflowError):
        time = math.nan
    if not math.isfinite(time):
        raise ValueError(f"time {str(value)[:50]!r} is neither a number of seconds nor a date")
    return time


# ---- Posts.xml ----


def prepare_posts(
    path: str | Path,
    folder: str | Path,
    *,
    types: Collection[int] = (QUESTION, ANSWER),
    bad_rows: BadRows = "error",
    progress: Progress = silent,
    **options: Unpack[CorpusOptions],
) -> Corpus:
    """Prepare a corpus from the `Posts.xml` of a Stack Exchange dump, with the authors as clients.

    A post's text is its title, if it has one, and its body without HTML; blocks of code are left out. Posts without an
    author are left out and counted.

    Args:
      path: the file, plain or gzip.
      folder: where the corpus goes; must not exist yet.
      types: which posts, by PostTypeId: 1 for questions, 2 for answers.
      bad_rows: "error" refuses lines that cannot be read and names the first; "skip" counts them.
      progress: a progress display.
      **options: fractions, seed, kept_words, max_sentences and words_in_memory; see `CorpusOptions`.

    Raises:
      DataError: the file is missing, has no sentences, or is malformed; the message names the line.

    Example:
      >>> import tempfile, fedrecon as fr
      >>> row = '<row PostTypeId="1" CreationDate="2008-08-01" OwnerUserId="7" Body="&lt;p&gt;Why?&lt;/p&gt;" />'
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with open(f"{folder}/Posts.xml", "w") as file:
      ...         _ = file.write(row)
      ...     fr.data.prepare_posts(f"{folder}/Posts.xml", f"{folder}/corpus", fractions=(1, 0, 0)).words
      ('?', 'why')
    """
    errors = RowErrors(bad_rows)
    posts = _read_xml(path, types, errors, progress)
    return prepare_corpus(posts, folder, CorpusSettings(**options), str(path), errors.skipped, progress)


def _read_xml(path: str | Path, types: Collection[int], errors: RowErrors, progress: Progress) -> Iterator[Post]:
    """Yield the posts that have an owner; every `<row .../>` has a line of its own, as published."""
    type_ids = set(map(str, types))
    for number, line in read_lines(path, errors, progress):
        line = line.strip()
        if line.startswith(XML_FRAME):
            continue
        try:
            row = _parse_attributes(line)
            if row["PostTypeId"] not in type_ids:
                errors.skipped["posts_of_other_types"] += 1
                continue
            owner = row.get("OwnerUserId", "")
            if not owner or owner.startswith("-"):  # a deleted user, or the site itself
                errors.skipped["posts_without_owner"] += 1
                continue
            sentences = split_text(row.get("Title", "")) + split_text(plain_text(row["Body"]))
            post = Post(check_client_name(owner), seconds(row["CreationDate"]), sentences)
        except KeyError as missing:
            errors.add(f"{path} line {number}", f"a row without {missing.args[0]}")
            continue
        except (ValueError, OverflowError) as problem:
            errors.add(f"{path} line {number}", problem)
            continue
        if not sentences:
            errors.skipped["posts_without_words"] += 1
        yield post


def _parse_attributes(line: bytes) -> dict[str, str]:
    if not line.startswith(b"<row"):
        raise ValueError(f"{line[:40]!r} is not a <row .../>, which has a line of its own in a published Posts.xml")
    try:
        return ElementTree.fromstring(line).attrib
    except ElementTree.ParseError as problem:
        raise ValueError(f"not XML ({problem.msg})") from None


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment: blocks on lines of their own, blocks of code and comments left out.

    Every character is looked at once. A parser of all of HTML would look for the end of every `<!--` that has none, to
    the end of the text each time.
    """
    pieces: list[str] = []
    depth = start = 0  # how many <pre> are open: that is where Stack Exchange puts blocks of code

    def add(text: str) -> None:
        if text and not depth:  # a line that only the source breaks is not a line of the text
            pieces.append(unescape(text).replace("\r", " ").replace("\n", " "))

    for tag in _TAG.finditer(html):
        if tag.start() < start:
            continue  # within a comment
        add(html[start : tag.start()])
        start = tag.end()
        if tag["comment"]:
            end = html.find("-->", start)
            start = len(html) if end < 0 else end + 3
            if end < 0:
                break
            continue
        name = tag["name"].lower()
        if name == "pre":
            depth = max(0, depth + (-1 if tag["slash"] else 1))
        if name in BLOCKS:
            pieces.append("\n")
    add(html[start:])
    return "".join(pieces)
