"""Where data comes from: files, pipes, standard input, gzip and zip, with a bound on what they unpack to.

Also what all loaders share: `DataError`, the policies for bad rows, ISO dates, and the cache.
"""

import codecs
import contextlib
import gzip
import io
import logging
import lzma
import os
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from fedrecon._src.storage.lock import Holder

BadRows = Literal["error", "skip"]  # whether records that cannot be read are refused, or left out and counted

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
STANDARD_INPUT = "-"
GZIP = b"\x1f\x8b"
CHUNK = 1 << 23  # bytes of a text file in memory at a time
LONGEST_LINE = 1 << 24  # characters

# Ratings and text become 3 to 20 times larger when they are unpacked. Data that becomes 100 times larger is made to
# fill a disk or the memory; up to `ALWAYS_ALLOWED` bytes anything goes.
MAX_EXPANSION = 100
ALWAYS_ALLOWED = 1 << 26

# Python codecs that are not for the text of a file.
NOT_FOR_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")

# What the readers of compressed formats raise where the data is damaged, encrypted or of a kind they do not know.
UNPACKING = (
    EOFError,
    IndexError,
    KeyError,
    lzma.LZMAError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Data that is missing, malformed or not what was expected; the message names the place and what to do.

    Example:
      >>> import fedrecon as fr
      >>> try:
      ...     fr.data.load_ratings("none.csv")
      ... except fr.data.DataError as error:
      ...     print(error)
      none.csv is not a file; expected a table of ratings (text or Parquet). Check the path.
    """


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError unless an argument is one of the values of a `Literal`."""
    if value not in choices.__args__:
        raise ValueError(f"`{name}` must be one of {', '.join(choices.__args__)} (got {value!r}).")


class RowErrors:
    """Raises an error at the first row or record that cannot be read, or counts them all in `skipped`."""

    def __init__(self, bad_rows: BadRows) -> None:
        check_choice("bad_rows", bad_rows, BadRows)
        self.bad_rows = bad_rows
        self.skipped = Counter(bad_rows=0)

    def add(self, where: str, problem: object, count: int = 1) -> None:
        """Raise a `DataError` that names the row, or count it."""
        if self.bad_rows == "error":
            raise DataError(f'{where}: {problem}. Fix it, or skip such rows with bad_rows="skip".') from None
        self.skipped["bad_rows"] += count


class UnpackingError(DataError):
    """Compressed data that is damaged or cut off."""

    def __init__(self, source: str, reason: object) -> None:
        super().__init__(f"{source} is damaged or cut off ({reason}). Get it again.")
        self.reason = reason


def is_stream(path: str | Path) -> bool:
    """Tell whether this is standard input or a pipe, which can be read only once and whose size is not known."""
    return str(path) == STANDARD_INPUT or Path(path).is_fifo() or Path(path).is_char_device()


def is_readable(path: str | Path) -> bool:
    """Tell whether this is a file, a pipe or standard input."""
    return is_stream(path) or Path(path).is_file()


@contextmanager
def open_bytes(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or, as "-", standard input; gzip is recognised by its content and unpacked."""
    if str(path) == STANDARD_INPUT:
        yield _unpacked(sys.stdin.buffer, "standard input")
        return
    try:
        raw = open(path, "rb")  # noqa: SIM115
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot read {path}: {problem}") from None
    with raw:
        yield _unpacked(raw, str(path))


def _unpacked(raw: Any, source: str) -> IO[bytes]:
    counted = CountingReader(raw)
    buffered = io.BufferedReader(counted, CHUNK)
    try:
        start = buffered.peek(len(GZIP))[: len(GZIP)]
    except OSError as problem:
        raise DataError(f"cannot read {source}: {problem.strerror or problem}") from None
    if start != GZIP:
        return buffered
    return io.BufferedReader(BoundedReader(gzip.GzipFile(fileobj=buffered), source, counted), CHUNK)


class CountingReader(io.RawIOBase):
    """Reads from a file and counts the bytes; does not close it."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file, self.done = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read1(len(buffer)) if hasattr(self.file, "read1") else self.file.read(len(buffer))
        buffer[: len(data)] = data
        self.done += len(data)
        return len(data)


class BoundedReader(io.RawIOBase):
    """Reads compressed data, whose packed size is given or counted; refuses what is damaged or far too large."""

    def __init__(self, file: Any, source: str, packed: CountingReader | int) -> None:
        super().__init__()
        self.file, self.source, self.packed, self.done = file, source, packed, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.file.read(len(buffer))
        except UNPACKING as problem:
            raise UnpackingError(self.source, problem) from None
        buffer[: len(data)] = data
        self.done += len(data)
        check_expansion(self.source, self.done, self.packed if isinstance(self.packed, int) else self.packed.done)
        return len(data)


def check_expansion(source: str, unpacked: int, packed: int) -> None:
    """Refuse compressed data that becomes far larger than ratings or text do."""
    if unpacked > ALWAYS_ALLOWED and unpacked > MAX_EXPANSION * packed:
        raise DataError(
            f"{source} unpacks to more than {MAX_EXPANSION} times its size, which no real data does. "
            "If you trust it, unpack it yourself and give the unpacked file."
        )


# ---- zip ----


class ZipSource:
    """The files in a zip archive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self.entries = archive.infolist()
        except UNPACKING as problem:
            raise DataError(f"{path} is damaged or not a zip file ({problem}). Get it again.") from None

    def find(self, name: str) -> zipfile.ZipInfo | None:
        """Return the first entry with this file name, in any folder."""
        return next((entry for entry in self.entries if entry.filename.rsplit("/", 1)[-1] == name), None)

    @contextmanager
    def open(self, entry: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
        """Open a file of the archive, unless it is encrypted, damaged or too large."""
        source = f"{self.path}: {entry.filename}"
        if entry.flag_bits & 1:
            raise DataError(f"{source} is encrypted. Unpack it with its password and give the folder.")
        check_expansion(source, entry.file_size, self.path.stat().st_size)
        try:
            archive = zipfile.ZipFile(self.path)
            file = archive.open(entry)
        except UNPACKING as problem:
            raise DataError(f"{source} cannot be unpacked ({problem}). Get it again, or unpack it yourself.") from None
        with archive, file:
            yield io.BufferedReader(BoundedReader(file, source, self.path.stat().st_size), CHUNK)


# ---- text ----


def check_encoding(encoding: str) -> str:
    """Return the name of an encoding that reads text from a file, without any byte order mark."""
    try:
        codec = codecs.lookup(encoding)
        text = getattr(codec, "_is_text_encoding", True) and codec.incrementaldecoder is not None
        if text and codec.name.replace("_", "-") not in NOT_FOR_FILES:
            return "utf-8-sig" if codec.name == "utf-8" else codec.name
    except (LookupError, ValueError, TypeError):
        pass
    raise DataError(f"{encoding!r} is not an encoding of text; common ones are utf-8, latin-1, cp1252 and utf-16.")


def read_text(stream: IO[bytes], source: str, encoding: str, chunk: int = CHUNK) -> Iterator[str]:
    """Yield a text file in chunks of whole lines; every line ends with a line feed, however the file ends them."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(check_encoding(encoding))(), translate=True)
    tail: list[str] = []
    waiting = done = 0
    while True:
        data = stream.read(chunk)
        try:
            text = decoder.decode(data, final=not data)
            if not text.isascii():
                text.encode()  # some encodings can spell halves of characters, which cannot be written again
        except (UnicodeError, ValueError, OverflowError) as problem:
            raise _decoding_error(source, encoding, data, done, problem) from None
        done += len(data)
        end = text.rfind("\n") + 1
        if end:
            yield "".join([*tail, text[:end]])
            tail, waiting = [], 0
        tail.append(text[end:])
        waiting += len(text) - end
        if waiting > LONGEST_LINE:
            raise DataError(f"{source} has a line of more than {LONGEST_LINE:,} characters: is it a text file?")
        if not data:
            break
    if last := "".join(tail):
        yield last + "\n"


def _decoding_error(source: str, encoding: str, data: bytes, done: int, problem: Exception) -> DataError:
    if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return DataError(f"{source} is not a text file: it holds bytes that no text has. Give another.")
    where = f" at byte {done + problem.start}" if isinstance(problem, UnicodeDecodeError) else ""
    reason = getattr(problem, "reason", problem)
    return DataError(f"{source} is not {encoding} text ({reason}{where}). Name its encoding with encoding=...")


# ---- dates ----


def seconds(date: str) -> float:
    """Return the time of an ISO 8601 date in seconds since 1970, in UTC if it names no zone; ValueError otherwise."""
    return (_parse_date(date) - EPOCH) / timedelta(seconds=1)


def whole_seconds(date: str) -> int:
    """Return the last whole second since 1970 that is not after an ISO 8601 date."""
    return (_parse_date(date) - EPOCH) // timedelta(seconds=1)


def _parse_date(date: str) -> datetime:
    try:
        time = datetime.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{date[:50]!r} is not a date such as 2008-08-10T08:28:52") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


# ---- the cache ----


def cache_folder() -> Path:
    """Return $FEDRECON_CACHE, $XDG_CACHE_HOME/fedrecon or ~/.cache/fedrecon; it need not exist yet."""
    if folder := os.environ.get("FEDRECON_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "fedrecon"
    try:
        return Path.home() / ".cache" / "fedrecon"
    except RuntimeError:  # the system does not know the user
        raise DataError("there is no home folder to keep prepared data in; set FEDRECON_CACHE to a folder") from None


def private_cache(name: str) -> Path:
    """Return a folder of the cache for personal data, which only the user who runs fedrecon can read."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it may be somebody else's, for us to read
        folder.chmod(0o700)
    return folder


def report_wait(holder: Holder) -> None:
    """Log which process we wait for."""
    logger.warning("waiting for %s, which is making the same file", holder)
