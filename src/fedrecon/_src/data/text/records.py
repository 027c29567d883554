"""Records of text files: line after line, plain or gzip, and what happens to those that cannot be read."""

import gzip
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedrecon._src.core.progress import Progress
from fedrecon._src.data.errors import BadRows, DataError, check_choice
from fedrecon._src.data.sources import Bounded, UnpackingError

GZIP, SEVEN_ZIP = b"\x1f\x8b", b"7z\xbc\xaf\x27\x1c"
LONGEST_LINE = 1 << 26  # bytes; anything longer is not a record
LONGEST_NAME = 200
LINES_PER_REPORT = 256


class BadRecords:
    """Refuses or counts what cannot be read."""

    def __init__(self, policy: BadRows) -> None:
        """Begin with none; `policy` is "error" to refuse the first one, "skip" to count them."""
        check_choice("bad_rows", policy, BadRows)
        self.policy = policy
        self.skipped = Counter(bad_rows=0)

    def found(self, where: str, problem: object) -> None:
        """Raise a `DataError` that names the place, or count."""
        if self.policy == "error":
            raise DataError(f'{where}: {problem}. Fix it, or leave such records out with bad_rows="skip".') from None
        self.skipped["bad_rows"] += 1


def read_lines(path: str | Path, bad: BadRecords, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, and their numbers; gzip is recognised by its content.

    Args:
      path: the file.
      bad: is told about lines that are too long and compressed data that is cut off.
      progress: a display of how much of the file is read.
    """
    size = Path(path).stat().st_size if Path(path).is_file() else None
    if size is None:
        raise DataError(f"{path} is not a file. Check the path.")
    with ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        start = raw.read(len(SEVEN_ZIP))
        raw.seek(0)
        if start == SEVEN_ZIP:
            raise DataError(f"{path} is a 7z archive: unpack it first and give the file in it.")
        packed = start.startswith(GZIP)
        file: Any = (
            raw if not packed else io.BufferedReader(Bounded(stack.enter_context(gzip.open(raw)), str(path), size))
        )
        advance = stack.enter_context(progress(f"reading {Path(path).name} (kB)", size >> 10))
        number = done = 0
        while True:
            number += 1
            try:
                line = file.readline(LONGEST_LINE)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while not line.endswith(b"\n") and line:
                        line = file.readline(LONGEST_LINE)
                    bad.found(f"{path} line {number}", f"longer than {LONGEST_LINE} bytes")
                    continue
            except UnpackingError as problem:
                bad.found(f"{path} line {number}", f"the gzip data is cut off or damaged ({problem.reason})")
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


def client_name(value: Any) -> str:
    """Return a client's name, or raise ValueError if it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"client {repr(value)[:50]} is neither text nor a whole number")
    name = str(value)
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise ValueError(f"client {name[:50]!r} is not 1 to {LONGEST_NAME} printable characters")
    return name
