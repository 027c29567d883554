"""The folder of a run: its settings, its metrics, its newest checkpoint, its model."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fedrecon._src.storage.arrays import ARRAYS, MANIFEST, load_arrays, save_arrays, write_bytes
from fedrecon._src.storage.digests import DamagedError
from fedrecon._src.storage.folders import whole_folder
from fedrecon._src.storage.locks import hold
from fedrecon._src.storage.metrics import Metrics
from fedrecon._src.storage.parts import (
    CHECKPOINTS,
    FORMAT,
    LOCK,
    METRICS,
    MODEL,
    PARTS,
    PLOTS,
    ROUND,
    RUN,
    VERSION,
    check_ours,
    checkpoints_of,
    has_begun,
    mark,
    read_description,
)
from fedrecon._src.storage.replacement import bring_back, forget, put_aside
from fedrecon._src.storage.sealed import check_files, read_sealed, seal_folder, write_sealed
from fedrecon._src.storage.storage_errors import StorageError

CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "fedrecon-checkpoint", 2
PRIVATE, KEPT = "private", "kept"  # what clients keep is in a folder that other users cannot read

_PRIVATE = (
    b"What single clients keep between rounds. Whoever reads it learns something about them: do not pass it on.\n"
)


class RunFolder:
    """The folder of one run.

    A checkpoint is a folder named after its round, and appears under that name when it is complete. Metrics are lines,
    which are cut back to the checkpoint's round when a run is resumed. Only one process can write at a time.
    """

    def __init__(self, path: str | Path):
        """Use a folder.

        Args:
          path: the folder; it is made when something is first written.
        """
        self.path = Path(path)
        self.metrics = Metrics(self.path / METRICS)
        self._holding = self._marked = False

    @property
    def metrics_path(self) -> Path:
        """The file with one JSON object per round or evaluation."""
        return self.path / METRICS

    @property
    def model_path(self) -> Path:
        """The folder with everything that inference needs."""
        return self.path / MODEL

    @property
    def plots_path(self) -> Path:
        """The folder for plots."""
        return self.path / PLOTS

    # ---- locking and replacing ----

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here while a block runs. Blocks may be nested.

        Raises:
          StorageError: another process writes here (the message says which), or fedrecon did not make this folder.
        """
        if self._holding:
            yield
            return
        check_ours(self.path)
        new = not self.path.exists()
        try:
            with hold(self.path / LOCK, f"the run in {self.path}"):
                check_ours(self.path)
                bring_back(self.path, PARTS, begun=has_begun(self.path))
                self._holding = True
                try:
                    yield
                finally:
                    self._holding = False
                    bring_back(self.path, PARTS, begun=has_begun(self.path))  # if a new run failed to start
        finally:
            if new:  # leave no empty folder behind for a run that could not start
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def replace(self) -> None:
        """Set the run that is here aside; it is restored if the new one is killed before its first checkpoint."""
        with self.held():
            put_aside(self.path, PARTS)

    def complete(self) -> None:
        """Remove the run that was set aside, once the new one is complete."""
        with self.held():
            forget(self.path)

    def holds_run(self) -> bool:
        """Return whether the folder has any part of a run."""
        return any((self.path / name).exists() for name in PARTS)

    def _mark(self) -> None:
        if not self._marked:
            mark(self.path)
        self._marked = True

    # ---- contents ----

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`.

        Args:
          facts: settings, seed, versions, data, times.
        """
        self._mark()
        write_sealed(self.path / RUN, {"format": FORMAT, "version": VERSION, **facts})

    def description(self) -> dict[str, Any]:
        """Read `run.json`."""
        return read_description(self.path)

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line of metrics.

        Args:
          entry: of a round or an evaluation.
        """
        self._mark()
        self.metrics.append(entry)

    def records(self) -> list[dict[str, Any]]:
        """Read all complete lines of metrics. A last line that was cut off is ignored."""
        return self.metrics.read()

    def checkpoint(self, done: int, tree: Any) -> None:
        """Save the state after `done` rounds, then remove older checkpoints.

        Args:
          done: how many rounds.
          tree: the state, by name. The entry `kept`, what clients keep, is written to a private folder.
        """
        folder = self.path / CHECKPOINTS / f"round-{done:09d}"
        if folder.exists():
            return
        self._mark()
        state, kept = _divide(tree)
        with whole_folder(folder) as temporary:
            save_arrays(temporary / ARRAYS, state)
            if jax.tree.leaves(kept):
                (temporary / PRIVATE).mkdir(mode=0o700)
                write_bytes(temporary / PRIVATE / "README", _PRIVATE, mode=0o600)
                save_arrays(temporary / PRIVATE / f"{KEPT}.safetensors", kept, mode=0o600)
            facts = {
                "format": CHECKPOINT_FORMAT,
                "version": CHECKPOINT_VERSION,
                "rounds": done,
                "metrics": self.metrics.seal(),
            }
            seal_folder(temporary, MANIFEST, facts)
        for old in checkpoints_of(self.path)[:-1]:
            shutil.rmtree(old)

    def restore(self, like: Any) -> tuple[int, Any, list[dict[str, Any]]] | None:
        """Load the newest complete checkpoint: its round, its state, and the metrics up to it; None if there is none.

        Args:
          like: a state with the expected structure, shapes and types.

        Raises:
          StorageError: it is damaged, or of another version; the message says which file.
        """
        with self.held():
            if not self.has_checkpoint():
                self.metrics.cut(0, {})
                return None
            folder = checkpoints_of(self.path)[-1]
            manifest = _read_checkpoint(folder)
            state, kept = _divide(like)
            private = f"{PRIVATE}/{KEPT}.safetensors"
            check_files(folder / MANIFEST, manifest, ARRAYS, *([private] if jax.tree.leaves(kept) else []))
            tree = load_arrays(folder / ARRAYS, state)
            if jax.tree.leaves(kept):
                kept = load_arrays(folder / private, kept)
            if isinstance(like, Mapping) and KEPT in like:
                tree = {name: kept if name == KEPT else tree[name] for name in like}
            done = manifest["rounds"]
            return done, tree, self.metrics.cut(done, manifest.get("metrics"))

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return bool(checkpoints_of(self.path))

    def rounds_done(self) -> int | None:
        """Return the number of rounds of the newest complete checkpoint; None if there is none.

        Raises:
          StorageError: it is damaged, or of another version; the message says which file.
        """
        complete = checkpoints_of(self.path)
        if not complete:
            return None
        manifest = _read_checkpoint(complete[-1])
        check_files(complete[-1] / MANIFEST, manifest, ARRAYS)
        return manifest["rounds"]


def _divide(tree: Any) -> tuple[Any, Any]:
    """Divide a state into what the server keeps and what clients keep."""
    if not isinstance(tree, Mapping):
        return tree, ()
    return {name: part for name, part in tree.items() if name != KEPT}, tree.get(KEPT, ())


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = read_sealed(file, unsealed={"format": 1})
    if manifest.get("format") != CHECKPOINT_FORMAT or manifest.get("version") != CHECKPOINT_VERSION:
        raise StorageError(
            f"the checkpoint {folder} was written by another version of fedrecon, and this one cannot continue it; "
            "its model can still be used. Continue with that version, or start again with --overwrite."
        )
    named = ROUND.fullmatch(folder.name)
    if named is None or manifest.get("rounds") != int(named[1]):
        raise DamagedError(f"{file} is damaged: it is of round {manifest.get('rounds')!r}")
    return manifest


__all__ = ["RunFolder", "StorageError"]
