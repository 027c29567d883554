"""The metrics of a run: a file of JSON lines that can be cut back to a checkpoint and detects damage."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.storage.atomic import read_bytes, without_nan, write_bytes, write_errors

MAX_METRICS_BYTES = 2**32


class StorageWarning(UserWarning):
    """A file is damaged, but nothing in it is needed to continue."""


class MetricsLog:
    """A file with one JSON object per round or evaluation."""

    def __init__(self, path: Path):
        """Use a file, which need not exist."""
        self.path = path

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append the line of a round or evaluation."""
        with write_errors(self.path), self.path.open("ab") as file:
            file.write((json.dumps(without_nan(entry)) + "\n").encode())

    def read(self) -> list[dict[str, Any]]:
        """Read all complete lines. A last line that was cut off is ignored.

        Warns:
          StorageWarning: other lines are damaged; they are left out.
        """
        records = [_record(line) for line in self._lines()]
        if bad := records.count(None):
            self._warn(f"line {records.index(None) + 1} is not a record; {bad} lines are left out")
        return [record for record in records if record is not None]

    def seal(self) -> dict[str, Any]:
        """Return the number of lines and their digest, for a checkpoint."""
        lines = self._lines()
        return {"lines": len(lines), "sha256": _digest(lines)}

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
        lines, seal = self._lines(), seal if isinstance(seal, Mapping) else {}
        records = [_record(line) for line in lines]
        sealed = seal.get("lines", 0)
        if None in records[:sealed] or _digest(lines[:sealed]) != seal.get("sha256", _digest([])):
            aside = self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")
            if self.path.exists() and not aside.exists():
                write_bytes(aside, read_bytes(self.path, MAX_METRICS_BYTES))
            self._warn(f"it is not what was written. The run continues; the damaged file is kept as {aside}")
        remaining = [
            (line, record) for line, record in zip(lines, records, strict=True) if record and record["round"] <= done
        ]
        if self.path.exists():
            write_bytes(self.path, b"".join(line for line, _ in remaining))
        return [record for _, record in remaining]

    def _lines(self) -> list[bytes]:
        """Read all complete lines."""
        content = read_bytes(self.path, MAX_METRICS_BYTES) if self.path.exists() else b""
        return [line + b"\n" for line in content.split(b"\n")[:-1]]

    def _warn(self, problem: str) -> None:
        warnings.warn(f"{self.path} is damaged: {problem}.", StorageWarning, stacklevel=4)


def _digest(lines: list[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and record.get("kind") in ("round", "evaluation")
    return record if usable and type(record.get("round")) is int else None
