"""Text of many people, prepared as a corpus once: JSON lines, `Posts.xml` of Stack Exchange dumps, any source."""

import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, Unpack
from xml.etree import ElementTree

from pydantic import BaseModel

from fedrecon._src.core.display import Progress, silent
from fedrecon._src.data.corpus import FORMAT, Corpus
from fedrecon._src.data.corpus_writer import (
    CorpusOptions,
    CorpusSettings,
    Post,
    check_client_name,
    parse_posts,
    prepare_corpus,
)
from fedrecon._src.data.sentences import split_text
from fedrecon._src.data.sources import (
    BadRows,
    DataError,
    RowErrors,
    UnpackingError,
    check_file,
    is_stream,
    make_once,
    open_bytes,
    private_cache,
    since_1970,
)
from fedrecon._src.data.stackoverflow import COMPRESSED, prepare_stackoverflow
from fedrecon._src.storage.manifest import file_digest

LONGEST_LINE = 1 << 26  # bytes; anything longer is not a record

QUESTION, ANSWER = 1, 2
XML_FRAME = (b"<?xml", b"<posts", b"</posts", b"\xef\xbb\xbf<?xml")  # how the lines that hold no post begin
# A comment, which may have no end, or a tag, whose quoted attributes may hold ">". Possessive, and without "<" in a
# tag, so that no character is looked at twice.
_TAG = re.compile(
    r"""(?s:<!--.*?(?:-->|\Z))|<(?P<slash>/?)(?P<name>[A-Za-z][A-Za-z0-9]*+)(?:[^<>"']++|"[^"<]*+"|'[^'<]*+')*+>"""
)
BLOCKS = frozenset("address blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table td th tr ul".split())  # noqa: SIM905


# ---- records ----


def read_lines(path: str | Path, errors: RowErrors, progress: Progress) -> Generator[tuple[str, bytes]]:
    """Yield where each line is that is not blank, and its bytes; gzip is recognised by its content."""
    check_file(path, "posts, one per line")
    with (
        progress(f"reading {Path(path).name} (kB)", Path(path).stat().st_size >> 10) as advance,
        open_bytes(path, on_read=lambda done: advance(done >> 10)) as file,
    ):
        for number in itertools.count(1):
            where = f"{path} line {number}"
            try:
                line = file.readline(LONGEST_LINE)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LONGEST_LINE)
                    errors.add(where, f"longer than {LONGEST_LINE} bytes")
                    continue
            except UnpackingError as problem:
                errors.add(where, problem)
                return
            if not line:
                return
            if not line.isspace():
                yield where, line


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
    posts = parse_posts(read_lines(path, errors, progress), _parse_json, errors)
    return prepare_corpus(posts, folder, CorpusSettings(**options), str(path), errors.skipped, progress)


class _Line(BaseModel, strict=True, allow_inf_nan=False):
    """A post as a JSON object; any other fields are ignored."""

    client: str | int
    text: str
    time: float | str | None = None


def _parse_json(line: bytes) -> Post:
    post = _Line.model_validate(json.loads(line.decode("utf-8-sig")))
    time = since_1970(post.time).total_seconds() if isinstance(post.time, str) else post.time or 0.0
    return Post(check_client_name(post.client), time, split_text(post.text))


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
    parse = partial(_parse_row, type_ids=set(map(str, types)), skipped=errors.skipped)
    posts = parse_posts(read_lines(path, errors, progress), parse, errors)
    return prepare_corpus(posts, folder, CorpusSettings(**options), str(path), errors.skipped, progress)


def _parse_row(line: bytes, type_ids: Collection[str], skipped: Counter[str]) -> Post | None:
    """Return the post of a `<row .../>`, which has a line of its own, as published; None if it is left out."""
    line = line.strip()
    if line.startswith(XML_FRAME):
        return None
    element = ElementTree.fromstring(line)
    if element.tag != "row":
        raise ValueError(f"{line[:40]!r} is not a <row .../>, which has a line of its own in a published Posts.xml")
    row = element.attrib
    if row["PostTypeId"] not in type_ids:
        skipped["posts_of_other_types"] += 1
        return None
    owner = row.get("OwnerUserId", "")
    if not owner or owner.startswith("-"):  # a deleted user, or the site itself
        skipped["posts_without_owner"] += 1
        return None
    sentences = split_text(row.get("Title", "")) + split_text(plain_text(row["Body"]))
    return Post(check_client_name(owner), since_1970(row["CreationDate"]).total_seconds(), sentences)


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment: blocks on lines of their own, blocks of code and comments left out."""
    pieces: list[str] = []
    depth = start = 0  # how many <pre> are open: that is where Stack Exchange puts blocks of code
    for tag in _TAG.finditer(html + "<br>"):  # which ends the last line
        if not depth:  # a line that only the source breaks is not a line of the text
            pieces.append(unescape(html[start : tag.start()]).replace("\r", " ").replace("\n", " "))
        start, name = tag.end(), (tag["name"] or "").lower()
        if name == "pre":
            depth = max(0, depth + (-1 if tag["slash"] else 1))
        if name in BLOCKS:
            pieces.append("\n")
    return "".join(pieces)


# ---- any source, prepared once ----


def load_text(source: str | Path, *, progress: Progress = silent, **options: Any) -> Corpus:
    """Open a corpus, preparing it the first time.

    Args:
      source: a prepared folder; or a file of JSON lines, a Stack Exchange `Posts.xml`, the federated Stack Overflow
        database, or a pipe ("-" for standard input) of JSON lines. The prepared corpus is kept in $FEDRECON_CACHE or
        ~/.cache/fedrecon, under a name that changes when the file or the options do. A second process that needs the
        same corpus waits for the first.
      progress: a progress display.
      **options: options of `prepare_text`, `prepare_posts` or `prepare_stackoverflow`, depending on the source.

    Raises:
      DataError: there is no such file, or it cannot be read.

    Example:
      >>> import tempfile, fedrecon as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with open(f"{folder}/posts.jsonl", "w") as file:
      ...         _ = file.write('{"client": "ann", "text": "The cat sat."}')
      ...     _ = fr.data.prepare_text(f"{folder}/posts.jsonl", f"{folder}/corpus", fractions=(1, 0, 0))
      ...     fr.data.load_text(f"{folder}/corpus")
      Corpus(1 clients (1 train, 0 valid, 0 test), 1 sentences, 4 words)
    """
    path = Path(source)
    if path.is_dir():
        return Corpus.open(path)
    if is_stream(source):
        return _load_stream(source, progress, options)
    if not path.is_file():
        raise DataError(f"{source} is neither a file nor a prepared corpus. Check the path.")
    return _prepare_once(path, path.name.split(".")[0], _state(path), progress, options)


def _load_stream(source: str | Path, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Store what a pipe gives in a file that is named after its content, and prepare that."""
    with tempfile.TemporaryDirectory(dir=private_cache("text")) as scratch, open_bytes(source) as stream:
        copy = Path(scratch) / "stream.jsonl"
        with copy.open("wb") as file:
            shutil.copyfileobj(stream, file)
        copied = copy.rename(copy.with_name(f"stream-{file_digest(copy)[:16]}.jsonl"))
        return _prepare_once(copied, "stream", copied.name, progress, options)


def _prepare_once(path: Path, name: str, state: Any, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Open the corpus of a file in this state, or prepare it; of several processes that want it, all but one wait."""
    files = {option: _state(value) for option, value in options.items() if option == "word_count" and value is not None}
    content = json.dumps([FORMAT.version, state, sorted({**options, **files}.items())], default=str)
    folder = private_cache("text") / f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
    make_once(folder, lambda: choose_preparer(path)(path, folder, progress=progress, **options))
    return Corpus.open(folder)


def _state(path: str | Path) -> list[Any]:
    """Return what changes when a file does."""
    try:
        state = Path(path).stat()
    except OSError:
        return [str(path)]
    return [str(Path(path).resolve()), state.st_size, state.st_mtime_ns]


def choose_preparer(path: str | Path) -> Callable[..., Corpus]:
    """Return what prepares a file of this name: `prepare_posts`, `prepare_stackoverflow` or `prepare_text`."""
    path = Path(path)
    if path.suffix in (".sqlite", *COMPRESSED):
        return prepare_stackoverflow
    return prepare_posts if ".xml" in path.suffixes[-2:] else prepare_text
