"""Text by its source: a prepared corpus is opened, anything else is prepared once and kept in the cache."""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrecon._src.core.progress import Progress, silent
from fedrecon._src.data.corpus import FORMAT, Corpus
from fedrecon._src.data.downloads import private_cache, report_wait
from fedrecon._src.data.posts import prepare_posts, prepare_text
from fedrecon._src.data.sources import DataError, is_stream, open_bytes
from fedrecon._src.data.stackoverflow import COMPRESSED, prepare_stackoverflow
from fedrecon._src.storage.lock import file_lock
from fedrecon._src.storage.manifest import file_digest


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
    files = {name: _state(value) for name, value in options.items() if name == "word_count" and value is not None}
    folder = _cache_folder(path.name.split(".")[0], _state(path), {**options, **files})
    return _prepare_once(path, folder, progress, options)


def _load_stream(source: str | Path, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Store what a pipe gives in a file that is named after its content, and prepare that."""
    with tempfile.TemporaryDirectory(dir=private_cache("text")) as scratch, open_bytes(source) as stream:
        copy = Path(scratch) / "stream.jsonl"
        with copy.open("wb") as file:
            shutil.copyfileobj(stream, file)
        copied = Path(scratch) / f"stream-{file_digest(copy)[:16]}.jsonl"
        copy.rename(copied)
        return _prepare_once(copied, _cache_folder("stream", copied.name, options), progress, options)


def _cache_folder(name: str, state: Any, options: dict[str, Any]) -> Path:
    """Return where the corpus of a file in this state goes."""
    content = json.dumps([FORMAT.version, state, sorted(options.items())], default=str)
    return private_cache("text") / f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def _prepare_once(path: Path, folder: Path, progress: Progress, options: dict[str, Any]) -> Corpus:
    """Open a corpus, or prepare it; of several processes that want it, one prepares and the others wait."""
    if not folder.is_dir():
        lock = folder.with_name(f".{folder.name}.waiting.lock")
        with file_lock(lock, f"the corpus of {path}", wait=math.inf, on_wait=report_wait):
            if not folder.is_dir():
                return choose_preparer(path)(path, folder, progress=progress, **options)
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
