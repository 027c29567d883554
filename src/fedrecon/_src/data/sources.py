"""Where data comes from: files, pipes, standard input, gzip and zip, with a bound on what they unpack to.

Also what all loaders share: `DataError`, the policies for bad rows, ISO dates, and the cache.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import logging
import math
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

from fedrecon._src.core.checks import check_choice
from fedrecon._src.core.display import listed_counts
from fedrecon._src.storage.atomic import write_errors
from fedrecon._src.storage.ownership import file_lock

BadRows = Literal["error", "skip"]  # whether records that cannot be read are refused, or left out and counted

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STANDARD_INPUT = "-"
GZIP, SEVEN_ZIP = b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c"
CHUNK = 1 << 23  # bytes of a text file in memory at a time
BUFFER = 1 << 17  # bytes that are read at a time
LONGEST_LINE = 1 << 24  # characters

# Ratings and text become 3 to 20 times larger when they are unpacked. Data that becomes 100 times larger is made to
# fill a disk or the memory; up to `ALWAYS_ALLOWED` bytes anything goes.
MAX_EXPANSION = 100
ALWAYS_ALLOWED = 1 << 26

# Python codecs that are not for the text of a file.
NOT_FOR_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")

logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Data that is missing, malformed or not what was expected; the message names the place and what to do.

    Example:
      >>> import fedrecon as fr
      >>> try:
      ...     fr.data.load_ratings("none.csv")
      ... except fr.data.DataError as error:
      ...     print(error)
      none.csv is not a file; expected a table (text or Parquet). Check the path.

    Attributes:
      message: what is wrong.
      fields: the arguments of the reader that may help.
      remedies: values of such arguments that do help, with which the text of the error ends.
    """

    def __init__(self, message: str, fields: Sequence[str] = (), **remedies: str | None):
        self.message, self.fields, self.remedies = message, tuple(fields), remedies
        arguments = " or ".join(f"{name}={value!r}" for name, value in remedies.items())
        super().__init__(f"{message} {arguments}." if arguments else message)


class RowErrors:
    """Raises an error at the first row or record that cannot be read, or counts them all in `skipped`."""

    def __init__(self, bad_rows: BadRows) -> None:
        check_choice("bad_rows", bad_rows, get_args(BadRows))
        self.bad_rows = bad_rows
        self.skipped = Counter(bad_rows=0)

    def add(self, where: str, problem: object, count: int = 1, **remedies: str | None) -> None:
        """Raise a `DataError` that names the row and the reader's arguments that help, or count it."""
        if self.bad_rows == "error":
            raise DataError(f"{where}: {problem}. Fix it, or load with", (), **remedies, bad_rows="skip") from None
        self.skipped["bad_rows"] += count


class UnpackingError(DataError):
    """Compressed data that is damaged, cut off, encrypted or of an unknown kind."""


def is_stream(path: str | Path) -> bool:
    """Tell whether this is standard input or a pipe, which can be read only once and whose size is not known."""
    return str(path) == STANDARD_INPUT or Path(path).is_fifo() or Path(path).is_char_device()


def is_readable(path: str | Path) -> bool:
    """Tell whether this is a file, a pipe or standard input."""
    return is_stream(path) or Path(path).is_file()


def check_file(path: str | Path, expected: str) -> None:
    """Raise `DataError` unless this is a file."""
    if not Path(path).is_file():
        raise DataError(f"{path} is not a file; expected {expected}. Check the path.")


def check_left(count: int, source: str, unit: str, skipped: Mapping[str, int]) -> None:
    """Raise `DataError` if a source has nothing left after all that was skipped."""
    if not count:
        reasons = listed_counts(skipped)
        raise DataError(f"{source} has no {unit}{f' left after leaving out {reasons}' if reasons else ''}.")


@contextmanager
def open_bytes(path: str | Path, on_read: Callable[[int], None] | None = None) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or, as "-", standard input; gzip is recognised by its content and unpacked.

    `on_read` is called with the number of bytes whenever some of the file are read.
    """
    standard = str(path) == STANDARD_INPUT
    try:
        raw = nullcontext(sys.stdin.buffer) if standard else open(path, "rb")  # noqa: SIM115
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from None
    with raw as file:
        yield _unpacked(Reader(file, "standard input" if standard else str(path), on_read=on_read))


def _unpacked(reader: "Reader") -> IO[bytes]:
    buffered = io.BufferedReader(reader, BUFFER)
    start = buffered.peek(len(SEVEN_ZIP))
    if start.startswith(SEVEN_ZIP):
        raise DataError(f"{reader.source} is a 7z archive: unpack it first and give the file in it.")
    if not start.startswith(GZIP):
        return buffered
    return io.BufferedReader(Reader(gzip.GzipFile(fileobj=buffered), reader.source, reader), BUFFER)


class Reader(io.RawIOBase):
    """Reads from a file, which it does not close, and turns all errors into `DataError`.

    `packed` is where compressed data comes from, or its size; data that becomes far too large is refused.
    """

    def __init__(
        self, file: Any, source: str, packed: "Reader | int | None" = None, on_read: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self.file, self.source, self.packed, self.on_read, self.done = file, source, packed, on_read, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.file.read1(len(buffer))
        except Exception as problem:  # of a dozen types where compressed data is damaged or encrypted
            if self.packed is None:
                raise DataError(f"cannot read {self.source}: {problem}") from None
            raise UnpackingError(f"{self.source} is damaged or cut off: {problem}") from None
        buffer[: len(data)] = data
        self.done += len(data)
        if self.on_read is not None:
            self.on_read(len(data))
        packed = self.packed.done if isinstance(self.packed, Reader) else self.packed
        if packed is not None and self.done > max(ALWAYS_ALLOWED, MAX_EXPANSION * packed):
            advice = "If you trust it, unpack it yourself and give the unpacked file."
            raise DataError(f"{self.source} unpacks to more than {MAX_EXPANSION} times its size. {advice}")
        return len(data)


@contextmanager
def open_member(path: Path, name: str) -> Iterator[IO[bytes] | None]:
    """Open the first file of this name in a zip archive or a folder; None if there is none."""
    if path.is_dir():
        paths = (file for file in (path / name, *sorted(path.glob(f"*/{name}"))) if file.is_file())
        with open_bytes(first) if (first := next(paths, None)) else nullcontext() as stream:
            yield stream
        return
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            entries = (entry for entry in archive.infolist() if entry.filename.rsplit("/", 1)[-1] == name)
            file = stack.enter_context(archive.open(entry)) if (entry := next(entries, None)) else None
        except Exception as problem:
            raise UnpackingError(f"{path} cannot be unpacked: {problem}. Get it again or unpack it.") from None
        source = f"{path}: {name}"
        yield file and io.BufferedReader(Reader(file, source, path.stat().st_size), BUFFER)


# ---- text ----


def check_encoding(encoding: str) -> str:
    """Return the name of an encoding that reads text from a file, without any byte order mark."""
    try:
        name = codecs.lookup(encoding).name
        io.TextIOWrapper(io.BytesIO(), name)  # refuses codecs that do not decode bytes to text, such as zlib
        if name.replace("_", "-") not in NOT_FOR_FILES:
            return "utf-8-sig" if name == "utf-8" else name
    except (LookupError, ValueError, TypeError):
        pass
    raise DataError(f"`encoding` must be a text encoding, such as utf-8, latin-1, cp1252 or utf-16 (got {encoding!r}).")


def read_text(stream: IO[bytes], source: str, encoding: str, chunk: int = CHUNK) -> Iterator[str]:
    """Yield a text file in chunks of whole lines; every line ends with a line feed, however the file ends them."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(check_encoding(encoding))(), translate=True)
    tail, done = "", 0
    for data in itertools.chain(iter(partial(stream.read, chunk), b""), [b""]):  # the last ends what is decoded
        try:
            text = decoder.decode(data, final=not data)
            if not text.isascii():
                text.encode()  # some encodings can spell halves of characters, which cannot be written again
        except (UnicodeError, ValueError, OverflowError) as problem:
            raise _decoding_error(source, encoding, data, done, problem) from None
        done += len(data)
        lines, end, tail = (tail + text).rpartition("\n")
        if end:
            yield lines + end
        if len(tail) > LONGEST_LINE:
            raise DataError(f"{source} has a line of more than {LONGEST_LINE:,} characters: is it a text file?")
    if tail:
        yield tail + "\n"


def _decoding_error(source: str, encoding: str, data: bytes, done: int, problem: Exception) -> DataError:
    if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return DataError(f"{source} is not a text file: it holds bytes that no text has. Give another.")
    where = f" at byte {done + problem.start}" if isinstance(problem, UnicodeDecodeError) else ""
    reason, advice = getattr(problem, "reason", problem), "Name its encoding with encoding=..."
    return DataError(f"{source} is not {encoding} text ({reason}{where}). {advice}", ["encoding"])


# ---- dates ----


def since_1970(date: str) -> timedelta:
    """Return the time since 1970 of an ISO 8601 date, in UTC if it names no zone; ValueError if it is none."""
    try:
        time = datetime.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{date[:50]!r} must be a date such as 2008-08-10T08:28:52") from None
    return (time.replace(tzinfo=UTC) if time.tzinfo is None else time) - EPOCH


# ---- the cache ----


def cache_folder() -> Path:
    """Return $FEDRECON_CACHE, $XDG_CACHE_HOME/fedrecon or ~/.cache/fedrecon; it need not exist yet."""
    if folder := os.environ.get("FEDRECON_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedrecon"
    except RuntimeError:  # the system does not know the user
        raise DataError("there is no home folder to keep prepared data in; set FEDRECON_CACHE to a folder") from None


def private_cache(name: str) -> Path:
    """Return a folder of the cache for personal data, which only the user who runs fedrecon can read."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it may be somebody else's, for us to read
        folder.chmod(0o700)
    return folder


def make_once(target: Path, make: Callable[[], object]) -> Path:
    """Make a file or folder unless it is there; of several processes that want it, one makes it and the others wait."""
    if not target.exists():
        lock = target.with_name(f".{target.name}.waiting.lock")
        report = partial(logger.warning, "waiting for %s, which is making the same file")
        with write_errors(target), file_lock(lock, str(target), wait=math.inf, on_wait=report):
            if not target.exists():
                make()
    return target
