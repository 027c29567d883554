"""The metrics of a run: a file of JSON lines that can be cut back to a checkpoint and detects damage."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedrecon._src.storage.atomic import read_bytes, without_nan, write_bytes, write_errors

MAX_METRICS_BYTES = 2**32


class StorageWarning(UserWarning):
    """A file is damaged, but nothing in it is needed to continue."""


class _Content(NamedTuple):
    lines: list[bytes]  # complete lines
    records: list[tuple[bytes, dict[str, Any]]]
    bad: list[int]  # numbers of the lines that are not records


class MetricsLog:
    """A file with one JSON object per round or evaluation."""

    def __init__(self, path: Path):
        """Use a file, which need not exist."""
        self.path = path
        self._digest: Any = None  # of the lines so far, kept up to date so that sealing costs the same in every round
        self._lines = 0

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append the line of a round or evaluation."""
        self._catch_up()
        line = (json.dumps(without_nan(entry)) + "\n").encode()
        with write_errors(self.path), self.path.open("ab") as file:
            file.write(line)
        self._digest.update(line)
        self._lines += 1

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines. A last line that was cut off is ignored.

        Warns:
          StorageWarning: other lines are damaged; they are left out.
        """
        content = self._read()
        if content.bad:
            self._warn(f"line {content.bad[0]} is not a record; {len(content.bad)} lines are left out")
        return [record for _, record in content.records]

    def seal(self) -> dict[str, Any]:
        """Return the number of lines and their digest, for a checkpoint."""
        self._catch_up()
        return {"lines": self._lines, "sha256": self._digest.hexdigest()}

    def cut(self, done: int, seal: Any) -> list[dict[str, Any]]:
        """Cut the file back to a checkpoint and return its records.

        A damaged file does not stop a run: it is kept under another name, and the new file has the lines that can be
        read.

        Args:
          done: the checkpoint's round; records of later rounds are removed.
          seal: what `seal` returned when the checkpoint was made.

        Warns:
          StorageWarning: the file is damaged.
        """
        content, seal = self._read(), seal if isinstance(seal, Mapping) else {}
        lines = seal.get("lines", 0)
        good = hashlib.sha256(b"".join(content.lines[:lines])).hexdigest() == seal.get("sha256", _NOTHING)
        if not good or any(number <= lines for number in content.bad):
            aside = self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")
            if self.path.exists() and not aside.exists():
                write_bytes(aside, read_bytes(self.path, MAX_METRICS_BYTES))
            self._warn(f"it is not what was written. The run continues; the damaged file is kept as {aside}")
        records = [(line, record) for line, record in content.records if record["round"] <= done]
        if self.path.exists() or records:
            write_bytes(self.path, b"".join(line for line, _ in records))
        self._digest = None
        return [record for _, record in records]

    def _read(self) -> _Content:
        lines = read_bytes(self.path, MAX_METRICS_BYTES).split(b"\n")[:-1] if self.path.exists() else []
        records, bad = [], []
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is None:
                bad.append(number)
            else:
                records.append((line + b"\n", record))
        return _Content([line + b"\n" for line in lines], records, bad)

    def _catch_up(self) -> None:
        if self._digest is None:
            lines = self._read().lines
            self._digest, self._lines = hashlib.sha256(b"".join(lines)), len(lines)

    def _warn(self, problem: str) -> None:
        warnings.warn(f"{self.path} is damaged: {problem}.", StorageWarning, stacklevel=4)


_NOTHING = hashlib.sha256(b"").hexdigest()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and record.get("kind") in ("round", "evaluation")
    return record if usable and type(record.get("round")) is int else None
