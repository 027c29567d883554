"""Text: corpora from JSON lines, one post per line, with the client who wrote it."""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.cache import private_cache
from fedrecon._src.data.dates import seconds
from fedrecon._src.data.downloads import say_who
from fedrecon._src.data.errors import BadRows, DataError
from fedrecon._src.data.sources import is_stream, open_bytes
from fedrecon._src.data.text.corpus import VERSION, Corpus
from fedrecon._src.data.text.federated_sqlite import COMPRESSED
from fedrecon._src.data.text.preparation import (
    FRACTIONS,
    KEPT_WORDS,
    MAX_SENTENCES,
    WORDS_IN_MEMORY,
    Plan,
    prepare_corpus,
)
from fedrecon._src.data.text.records import BadRecords, client_name, read_lines
from fedrecon._src.data.text.runs import Post
from fedrecon._src.data.text.stackoverflow import prepare_posts, prepare_stackoverflow
from fedrecon._src.data.text.words import split_text
from fedrecon._src.storage.digests import file_digest
from fedrecon._src.storage.locks import hold


def prepare_text(
    path: str | Path,
    folder: str | Path,
    *,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
    kept_words: int = KEPT_WORDS,
    max_sentences: int = MAX_SENTENCES,
    words_in_memory: int = WORDS_IN_MEMORY,
    bad_rows: BadRows = "error",
    progress: Progress = silent,
) -> Corpus:
    """Prepare a corpus from JSON lines: objects with `client`, `text` and maybe `time`, plain or gzip.

    Args:
      path: the file. `client` is text or a whole number; `time` is seconds or an ISO date, and a post without one
        counts as time 0, so that a file without any keeps its order. A client's posts may be anywhere in it.
      folder: where the corpus goes; must not exist yet.
      fractions: the share of clients for training, validation and test.
      seed: decides which client goes to which split.
      kept_words: how many of the most used words of training clients are kept: the largest possible vocabulary.
      max_sentences: at most this many of a client's sentences are kept, the first in the file.
      words_in_memory: how many words are in memory at a time.
      bad_rows: "error" refuses lines that cannot be read and names the first; "skip" counts them.
      progress: a progress display.

    Raises:
      DataError: the file is missing, has no sentences, or is malformed; the message names the line.
    """
    bad = BadRecords(bad_rows)
    plan = Plan(
        fractions=fractions,
        seed=seed,
        kept_words=kept_words,
        max_sentences=max_sentences,
        words_in_memory=words_in_memory,
    )
    posts = _read_posts(path, bad, progress)
    return prepare_corpus(posts, folder, plan, str(path), bad.skipped, progress)


def _read_posts(path: str | Path, bad: BadRecords, progress: Progress) -> Iterator[Post]:
    for number, line in read_lines(path, bad, progress):
        try:
            post = parse_post(line)
        except (ValueError, RecursionError) as problem:
            bad.found(f"{path} line {number}", problem)
            continue
        if not post.sentences:
            bad.skipped["posts_without_words"] += 1
        yield post


def parse_post(line: bytes) -> Post:
    """Return what one line of a file holds, or raise ValueError with what is wrong."""
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
    return Post(client_name(record["client"]), _time(record.get("time")), split_text(text))


def _time(value: Any) -> float:
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


def load_text(source: str | Path, *, progress: Progress = silent, **options: Any) -> Corpus:
    """Open a corpus, preparing it the first time.

    Args:
      source: a prepared folder; or a file of JSON lines, a Stack Exchange `Posts.xml`, the federated Stack Overflow
        database, or a pipe ("-" for standard input) of JSON lines. The prepared corpus is kept in $FEDRECON_CACHE or
        ~/.cache/fedrecon, under a name that changes when the file or the options do. A second process that needs the
        same corpus waits for the first.
      progress: a progress display.
      ***options: options of `prepare_text`, `prepare_posts` or `prepare_stackoverflow`, depending on the source.

    Raises:
      DataError: there is no such file, or it cannot be read.
    """
    path = Path(source)
    if path.is_dir():
        return Corpus.open(path)
    if is_stream(source):
        return _load_stream(source, progress, options)
    if not path.is_file():
        raise DataError(f"{source} is neither a file nor a prepared corpus. Check the path.")
    others = {name: _state(value) for name, value in options.items() if name == "word_count" and value is not None}
    about = [VERSION, _state(path), sorted({**options, **others}.items())]
    digest = hashlib.blake2b(json.dumps(about, default=str).encode(), digest_size=8).hexdigest()
    folder = private_cache("text") / f"{path.name.split('.')[0]}-{digest}"
    return _prepare_once(path, folder, progress, options)


def _load_stream(source: str | Path, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Store what a pipe gives in a file that is named after its content, and prepare that."""
    with tempfile.TemporaryDirectory(dir=private_cache("text")) as place, open_bytes(source) as stream:
        copy = Path(place) / "stream.jsonl"
        with copy.open("wb") as file:
            shutil.copyfileobj(stream, file)
        kept = Path(place) / f"stream-{file_digest(copy)[:16]}.jsonl"
        copy.rename(kept)
        about = [VERSION, kept.name, sorted(options.items())]
        digest = hashlib.blake2b(json.dumps(about, default=str).encode(), digest_size=8).hexdigest()
        folder = private_cache("text") / f"stream-{digest}"
        return _prepare_once(kept, folder, progress, options)


def _prepare_once(path: Path, folder: Path, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Open a corpus, or prepare it; of several processes that want it, one prepares and the others wait."""
    if not folder.is_dir():
        lock = folder.with_name(f".{folder.name}.waiting.lock")
        with hold(lock, f"the corpus of {path}", wait=math.inf, on_wait=say_who):
            if not folder.is_dir():
                return preparer(path)(path, folder, progress=progress, **options)
    return Corpus.open(folder)


def _state(path: str | Path) -> list[Any]:
    """Return what changes when a file does."""
    try:
        state = Path(path).stat()
    except OSError:
        return [str(path)]
    return [str(Path(path).resolve()), state.st_size, state.st_mtime_ns]


def preparer(path: str | Path) -> Callable[..., Corpus]:
    """Return what prepares a file of this name: `prepare_posts`, `prepare_stackoverflow` or `prepare_text`."""
    path = Path(path)
    if path.suffix in (".sqlite", *COMPRESSED):
        return prepare_stackoverflow
    return prepare_posts if ".xml" in path.suffixes[-2:] else prepare_text
