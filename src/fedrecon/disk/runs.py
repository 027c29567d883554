"""A run's folder: its settings, its metrics, its newest checkpoint, its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrecon.disk.arrays import (
    ARRAYS,
    MANIFEST,
    StorageError,
    load_arrays,
    read_json,
    save_arrays,
    without_nan,
    write_json,
)
from fedrecon.disk.folders import whole_folder


class RunFolder:
    """Where one run is written.

    A checkpoint is a folder named after its round, renamed into place when it is complete; metrics are lines that
    are cut back to the checkpoint's round when a run is resumed.
    """

    def __init__(self, path: str | Path):
        """Use `path`, made if it is not there."""
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def metrics_path(self) -> Path:
        """The file with one JSON object a round or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def model_path(self) -> Path:
        """The folder with all that inference needs."""
        return self.path / "model"

    @property
    def plots_path(self) -> Path:
        """The folder for pictures."""
        return self.path / "plots"

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`: settings, seed, versions, data, times."""
        write_json(self.path / "run.json", dict(facts))

    def description(self) -> dict[str, Any]:
        """Read `run.json`."""
        return read_json(self.path / "run.json")

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan(entry)) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Read all complete lines of metrics; a last line that was cut off is not one."""
        if not self.metrics_path.exists():
            return []
        found = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def checkpoint(self, done: int, tree: Any) -> None:
        """Save the state after `done` rounds, then forget older checkpoints."""
        folder = self._checkpoints / f"round-{done:09d}"
        if folder.exists():
            return
        with whole_folder(folder) as temporary:
            save_arrays(temporary / ARRAYS, tree)
            (temporary / MANIFEST).write_text(json.dumps({"format": 1, "rounds": done}) + "\n", encoding="utf-8")
        for old in self._complete()[:-1]:
            shutil.rmtree(old)

    def restore(self, like: Any) -> tuple[int, Any, list[dict[str, Any]]] | None:
        """Load the newest complete checkpoint: its round, its state, and the metrics up to there; None if none."""
        complete = self._complete()
        if not complete:
            self.metrics_path.unlink(missing_ok=True)
            return None
        done = _rounds_of(complete[-1])
        tree = load_arrays(complete[-1] / ARRAYS, like)
        records = [entry for entry in self.records() if entry["round"] <= done]
        lines = "".join(json.dumps(entry) + "\n" for entry in records)
        temporary = self.metrics_path.with_name(".metrics.partial")
        temporary.write_text(lines, encoding="utf-8")
        temporary.replace(self.metrics_path)
        return done, tree, records

    def forget(self) -> None:
        """Remove what an earlier run left here."""
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        shutil.rmtree(self.model_path, ignore_errors=True)
        self.metrics_path.unlink(missing_ok=True)

    def has_checkpoint(self) -> bool:
        """Say whether there is something to resume from."""
        return bool(self._complete())

    def rounds_done(self) -> int | None:
        """Return after how many rounds the newest complete checkpoint was made; None if there is none."""
        complete = self._complete()
        return _rounds_of(complete[-1]) if complete else None

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def _complete(self) -> list[Path]:
        if not self._checkpoints.exists():
            return []
        return sorted(p for p in self._checkpoints.iterdir() if p.name.startswith("round-"))


def _rounds_of(checkpoint: Path) -> int:
    try:
        return int(read_json(checkpoint / MANIFEST)["rounds"])
    except (KeyError, TypeError, ValueError) as problem:
        if isinstance(problem, StorageError):
            raise
        raise StorageError(f"{checkpoint / MANIFEST} is damaged: {problem!r}") from None


__all__ = ["RunFolder", "StorageError"]
