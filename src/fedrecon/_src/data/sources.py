"""Where data comes from: files, pipes, standard input, gzip and zip, with a bound on what they unpack to."""

import codecs
import gzip
import io
import lzma
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from fedrecon._src.data.errors import DataError

STANDARD_INPUT = "-"
GZIP = b"\x1f\x8b"
PIECE = 1 << 23  # bytes of a text file in memory at a time
LONGEST_LINE = 1 << 24  # characters

# Ratings and text become 3 to 20 times larger when they are unpacked. Data that becomes 100 times larger is made to
# fill a disk or the memory; up to `ALWAYS_ALLOWED` bytes anything goes.
MOST_EXPANSION = 100
ALWAYS_ALLOWED = 1 << 26

# Python codecs that are not for the text of a file.
NOT_OF_FILES = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")

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


class UnpackingError(DataError):
    """Compressed data that is damaged or cut off."""

    def __init__(self, source: str, reason: object) -> None:
        """Name the file; keep what was found."""
        super().__init__(f"{source} is damaged or cut off ({reason}). Get it again.")
        self.reason = reason


def is_stream(path: str | Path) -> bool:
    """Tell whether this is standard input or a pipe, which can be read only once and whose size is not known."""
    return str(path) == STANDARD_INPUT or Path(path).is_fifo() or Path(path).is_char_device()


def is_readable(path: str | Path) -> bool:
    """Tell whether this is a file, a pipe or standard input."""
    return is_stream(path) or Path(path).is_file()


def size_of(path: str | Path) -> int:
    """Return the size of a file in bytes, 0 if it is not known."""
    return 0 if is_stream(path) else Path(path).stat().st_size


@contextmanager
def open_bytes(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file, a pipe or, as "-", standard input; gzip is recognised by its content and unpacked.

    Raises:
      DataError: it cannot be opened; or, while it is read, it cannot be unpacked or becomes too large.
    """
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
    counted = Counted(raw)
    buffered = io.BufferedReader(counted, PIECE)
    try:
        start = buffered.peek(len(GZIP))[: len(GZIP)]
    except OSError as problem:
        raise DataError(f"cannot read {source}: {problem.strerror or problem}") from None
    if start != GZIP:
        return buffered
    return io.BufferedReader(Bounded(gzip.GzipFile(fileobj=buffered), source, counted), PIECE)


class Counted(io.RawIOBase):
    """Reads from a file and counts the bytes; does not close it."""

    def __init__(self, file: BinaryIO) -> None:
        """Begin at 0."""
        super().__init__()
        self.file, self.done = file, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read as much as there is room for."""
        piece = self.file.read1(len(buffer)) if hasattr(self.file, "read1") else self.file.read(len(buffer))
        buffer[: len(piece)] = piece
        self.done += len(piece)
        return len(piece)


class Bounded(io.RawIOBase):
    """Reads compressed data and refuses what is damaged, or becomes far larger than real data does."""

    def __init__(self, file: Any, source: str, packed: Counted | int) -> None:
        """Read from `file`, whose compressed size is known, or counted as it is read."""
        super().__init__()
        self.file, self.source, self.packed, self.done = file, source, packed, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read as much as there is room for."""
        try:
            piece = self.file.read(len(buffer))
        except UNPACKING as problem:
            raise UnpackingError(self.source, problem) from None
        buffer[: len(piece)] = piece
        self.done += len(piece)
        check_expansion(self.source, self.done, self.packed if isinstance(self.packed, int) else self.packed.done)
        return len(piece)


def check_expansion(source: str, unpacked: int, packed: int) -> None:
    """Refuse compressed data that becomes far larger than ratings or text do."""
    if unpacked > ALWAYS_ALLOWED and unpacked > MOST_EXPANSION * packed:
        raise DataError(
            f"{source} unpacks to more than {MOST_EXPANSION} times its size, which no real data does. "
            "If you trust it, unpack it yourself and give the unpacked file."
        )


# ---- zip ----


class ZipSource:
    """The files in a zip archive."""

    def __init__(self, path: Path) -> None:
        """Read the directory of the archive.

        Raises:
          DataError: it is not a zip file, or its directory is damaged.
        """
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
        """Open a file of the archive.

        Raises:
          DataError: it is encrypted, damaged, compressed in an unknown way or too large.
        """
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
            yield io.BufferedReader(Bounded(file, source, self.path.stat().st_size), PIECE)


# ---- text ----


def check_encoding(encoding: str) -> str:
    """Return the name of an encoding that reads text from a file, without any byte order mark.

    Raises:
      DataError: there is no such encoding.
    """
    try:
        found = codecs.lookup(encoding)
    except (LookupError, ValueError, TypeError, UnicodeError):
        found = None
    text = found is not None and getattr(found, "_is_text_encoding", True) and found.incrementaldecoder is not None
    if found is None or not text or found.name.replace("_", "-") in NOT_OF_FILES:
        raise DataError(f"{encoding!r} is not an encoding of text; common ones are utf-8, latin-1, cp1252 and utf-16.")
    return "utf-8-sig" if found.name == "utf-8" else found.name


def read_text(stream: IO[bytes], source: str, encoding: str, piece: int = PIECE) -> Iterator[str]:
    """Yield a text file in pieces of whole lines; every line ends with a line feed, however the file ends them.

    Args:
      stream: where the bytes come from.
      source: its name, for messages.
      encoding: the encoding of the text.
      piece: how many bytes to read at a time.

    Raises:
      DataError: it is not text in this encoding, or has a line that is too long.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(check_encoding(encoding))(), translate=True)
    rest: list[str] = []
    waiting = done = 0
    while True:
        data = stream.read(piece)
        try:
            text = decoder.decode(data, final=not data)
            if not text.isascii():
                text.encode()  # some encodings can spell halves of characters, which cannot be written again
        except (UnicodeError, ValueError, OverflowError) as problem:
            if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(
                    f"{source} is not a text file: it holds bytes that no text has. Give another."
                ) from None
            where = f" at byte {done + problem.start}" if isinstance(problem, UnicodeDecodeError) else ""
            reason = getattr(problem, "reason", problem)
            raise DataError(
                f"{source} is not {encoding} text ({reason}{where}). Name its encoding with encoding=..."
            ) from None
        done += len(data)
        end = text.rfind("\n") + 1
        if end:
            yield "".join([*rest, text[:end]])
            rest, waiting = [], 0
        rest.append(text[end:])
        waiting += len(text) - end
        if waiting > LONGEST_LINE:
            raise DataError(f"{source} has a line of more than {LONGEST_LINE:,} characters: is it a text file?")
        if not data:
            break
    if last := "".join(rest):
        yield last + "\n"
