"""The folder of a run: its settings, its metrics, its newest checkpoint, its model.

A run can be replaced: its parts move to `.replaced.partial` one by one. When all have moved, that is renamed to
`.replaced.N`, and only then is anything new written, so that old and new can be told apart at whatever point a process
is killed. The old run is restored if the new one never reaches its first checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.display import warn_caller
from fedrecon._src.storage.arrays import load_arrays, save_arrays
from fedrecon._src.storage.atomic import (
    StorageError,
    atomic_folder,
    find_complete,
    read_bytes,
    sync,
    without_nan,
    write_bytes,
    write_errors,
)
from fedrecon._src.storage.manifest import (
    DamagedError,
    Format,
    read_folder_manifest,
    read_manifest,
    write_folder_manifest,
    write_manifest,
)
from fedrecon._src.storage.ownership import (
    CHECKPOINTS,
    LOCK,
    METRICS,
    MODEL,
    RUN,
    check_run_folder,
    file_lock,
    mark_folder,
)
from fedrecon._version import __version__

MAX_METRICS_BYTES = 2**32


class StorageWarning(UserWarning):
    """A file is damaged, but nothing in it is needed to continue."""


def _digest(lines: list[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(record, dict) and record.get("kind") in ("round", "evaluation")
    return record if usable and type(record.get("round")) is int else None


def package_versions(*modules: ModuleType) -> dict[str, str]:
    """Return the versions of Python, of fedrecon and of some modules, by name, as `run.json` has them."""
    versions = {module.__name__: module.__version__ for module in modules}
    return {"python": platform.python_version(), "fedrecon": __version__, **versions}


PLOTS, LOGS = "plots", "tensorboard"  # LOGS: event files of --log tensorboard
PARTS = (MODEL, f".{MODEL}.old", CHECKPOINTS, METRICS, RUN, LOGS)  # what is set aside when a run is replaced
RUN_FORMAT, CHECKPOINT_FORMAT = Format("fedrecon-run", 2), Format("fedrecon-checkpoint", 2)
ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"
PRIVATE, KEPT = "private", "kept"  # what clients keep is in a folder that other users cannot read
KEY_BYTES = 32

_ROUND = re.compile(r"round-(\d+)")
_STASH, _PARTIAL_STASH = re.compile(r"\.replaced\.(\d+)"), ".replaced.partial"
_PRIVATE_README = (
    b"What single clients keep between rounds. Whoever reads it learns something about them: do not pass it on.\n"
)


class RunFolder:
    """The folder of one run.

    A checkpoint is a folder named after its round, and appears under that name when it is complete. Metrics are lines,
    which are cut back to the checkpoint's round when a run is resumed. Only one process can write at a time.

    Args:
      path: the folder; it is made when something is first written.
      checkpoint_every: how many rounds are lost, at most, when the process is killed.

    Attributes:
      metrics_path: the file with one JSON object per round or evaluation.
      model_path: the folder with everything that inference needs.
      plots_path: the folder for plots.

    Example:
      >>> import tempfile
      >>> import fedrecon as fr
      >>> folder = fr.RunFolder(tempfile.mkdtemp() + "/run")
      >>> folder.record({"kind": "round", "round": 1, "loss": 0.5})
      >>> folder.records()
      [{'kind': 'round', 'round': 1, 'loss': 0.5}]
      >>> folder.has_checkpoint()
      False
    """

    def __init__(self, path: str | Path, checkpoint_every: int = 100):
        """Use a folder."""
        check_number("checkpoint_every", checkpoint_every, least=1)
        self.path, self.checkpoint_every = Path(path), checkpoint_every
        self.metrics_path, self.model_path, self.plots_path = (self.path / name for name in (METRICS, MODEL, PLOTS))
        self._locked = False

    # ---- locking and replacing ----

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing here while a block runs. Blocks may be nested.

        Raises:
          StorageError: another process writes here (the message says which), or fedrecon did not make this folder.
        """
        if self._locked:
            yield
            return
        check_run_folder(self.path)
        is_new = not self.path.exists()
        try:
            with file_lock(self.path / LOCK, f"the run in {self.path}"):
                check_run_folder(self.path)
                _restore_stash(self.path)
                self._locked = True
                try:
                    yield
                finally:
                    self._locked = False
                    _restore_stash(self.path)  # if a new run failed to start
        finally:
            if is_new:  # leave no empty folder behind for a run that could not start
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def replace(self) -> None:
        """Set the run that is here aside; it is restored if the new one is killed before its first checkpoint."""
        with self.lock():
            _stash(self.path)

    def complete(self) -> None:
        """Remove the run that was set aside, once the new one is complete."""
        with self.lock():
            for stash in list_stashes(self.path):
                shutil.rmtree(stash)

    def has_run(self) -> bool:
        """Return whether the folder has any part of a run."""
        return any((self.path / name).exists() for name in PARTS)

    # ---- contents ----

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`.

        Args:
          facts: settings, seed, versions, data, times.
        """
        mark_folder(self.path)
        write_manifest(self.path / RUN, RUN_FORMAT, facts)

    def description(self) -> dict[str, Any]:
        """Read `run.json`; raises `StorageError` if it is missing or damaged."""
        return read_manifest(find_part(self.path, RUN), RUN_FORMAT)

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line of metrics.

        Args:
          entry: of a round or an evaluation.
        """
        mark_folder(self.path)
        with write_errors(self.metrics_path), self.metrics_path.open("ab") as file:
            file.write((json.dumps(without_nan(entry)) + "\n").encode())

    def records(self) -> list[dict[str, Any]]:
        """Read all complete lines of metrics. A last line that was cut off is ignored.

        Warns:
          StorageWarning: other lines are damaged; they are left out.
        """
        records = [_record(line) for line in self._metrics_lines()]
        if bad := records.count(None):
            where = f"line {records.index(None) + 1} is not a record"
            warn_caller(f"{self.metrics_path} is damaged: {where}; {bad} lines are left out.", StorageWarning)
        return [record for record in records if record is not None]

    def _metrics_lines(self) -> list[bytes]:
        """Read all complete lines."""
        content = read_bytes(self.metrics_path, MAX_METRICS_BYTES) if self.metrics_path.exists() else b""
        return [line + b"\n" for line in content.split(b"\n")[:-1]]

    def _cut_metrics(self, done: int, seal: Any) -> list[dict[str, Any]]:
        """Cut the metrics back to a checkpoint's round, with the seal that it has of them, and return their records.

        A damaged file does not stop a run: it is kept under another name, and the new file has the lines that can be
        read.
        """
        lines, seal = self._metrics_lines(), seal if isinstance(seal, Mapping) else {}
        records = [_record(line) for line in lines]
        sealed = seal.get("lines", 0)
        if None in records[:sealed] or _digest(lines[:sealed]) != seal.get("sha256", _digest([])):
            aside = self.metrics_path.with_name(f"{self.metrics_path.stem}.damaged{self.metrics_path.suffix}")
            if self.metrics_path.exists() and not aside.exists():
                write_bytes(aside, read_bytes(self.metrics_path, MAX_METRICS_BYTES))
            damage = f"{self.metrics_path} is damaged: it is not what was written"
            warn_caller(f"{damage}. The run continues; the damaged file is kept as {aside}.", StorageWarning)
        pairs = zip(lines, records, strict=True)
        remaining = [(line, record) for line, record in pairs if record and record["round"] <= done]
        if self.metrics_path.exists():
            write_bytes(self.metrics_path, b"".join(line for line, _ in remaining))
        return [record for _, record in remaining]

    def checkpoint(self, done: int, tree: Mapping[str, Any]) -> None:
        """Save the state after `done` rounds, then remove older checkpoints.

        Args:
          done: how many rounds.
          tree: the state, by name. The entry `kept`, what clients keep, is written to a private folder.
        """
        folder = self.path / CHECKPOINTS / f"round-{done:09d}"
        if folder.exists():
            return
        mark_folder(self.path)
        client_state = tree.get(KEPT, ())
        with atomic_folder(folder) as temporary:
            save_arrays(temporary / ARRAYS, _server_state(tree))
            if jax.tree.leaves(client_state):
                (temporary / PRIVATE).mkdir(mode=0o700)
                write_bytes(temporary / PRIVATE / "README", _PRIVATE_README, mode=0o600)
                save_arrays(temporary / PRIVATE / f"{KEPT}.safetensors", client_state, mode=0o600)
            lines = self._metrics_lines()
            facts = {"rounds": done, "metrics": {"lines": len(lines), "sha256": _digest(lines)}}
            write_folder_manifest(temporary / MANIFEST, CHECKPOINT_FORMAT, facts)
        for old in list_checkpoints(self.path)[:-1]:
            shutil.rmtree(old)

    def restore(self, like: Mapping[str, Any]) -> tuple[int, Any, list[dict[str, Any]]] | None:
        """Load the newest complete checkpoint: its round, its state, and the metrics up to it; None if there is none.

        Args:
          like: a state with the expected structure, shapes and types.

        Raises:
          StorageError: it is damaged, or of another version; the message says which file.
        """
        with self.lock():
            if not self.has_checkpoint():
                self._cut_metrics(0, {})
                return None
            folder = list_checkpoints(self.path)[-1]
            private = [f"{PRIVATE}/{KEPT}.safetensors"] if jax.tree.leaves(like.get(KEPT, ())) else []
            manifest = _read_checkpoint(folder, *private)
            tree = {**like, **load_arrays(folder / ARRAYS, _server_state(like))}
            if private:
                tree[KEPT] = load_arrays(folder / private[0], like[KEPT])
            done = manifest["rounds"]
            return done, tree, self._cut_metrics(done, manifest.get("metrics"))

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return bool(list_checkpoints(self.path))

    def rounds_done(self) -> int | None:
        """Return the number of rounds of the newest complete checkpoint; None if there is none.

        Raises:
          StorageError: it is damaged, or of another version; the message says which file.
        """
        checkpoints = list_checkpoints(self.path)
        return _read_checkpoint(checkpoints[-1])["rounds"] if checkpoints else None


def list_checkpoints(path: Path) -> list[Path]:
    """List the complete checkpoints of a run, the newest last."""
    return list(_numbered(path / CHECKPOINTS, _ROUND).values())


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return what has a number in its name, in order of the numbers."""
    entries = [(pattern.fullmatch(entry.name), entry) for entry in folder.iterdir()] if folder.is_dir() else []
    return dict(sorted((int(match[1]), entry) for match, entry in entries if match))


def find_part(path: Path, name: str) -> Path:
    """Return where to read a part of a run, also during a replacement or after a killed one."""
    part, stashes = path / name, list_stashes(path)
    if (path / _PARTIAL_STASH).is_dir():
        part = part if part.exists() else path / _PARTIAL_STASH / name
    elif stashes and not _has_begun(path):
        part = stashes[-1] / name
    return find_complete(part)


def keyed_fingerprint(run: Path, fingerprint: str, *, create: bool = False) -> str:
    """Return the fingerprint of private data under the secret key of a run (HMAC-SHA256).

    A plain fingerprint would let whoever knows all data but one rating find that rating by hashing guesses. The key is
    in `RUN.key`, next to the run's folder rather than in it, so that it is not passed on with the run.

    Args:
      run: the run's folder.
      fingerprint: of the data.
      create: make a new key if there is none.

    Raises:
      StorageError: there is no key, or it cannot be written.
    """
    path = run.absolute().with_name(f"{run.absolute().name}.key")
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, secrets.token_hex(KEY_BYTES).encode() + b"\n", mode=0o600)
    try:
        key = bytes.fromhex(read_bytes(path, 2**10).decode("ascii"))
    except StorageError as problem:
        raise StorageError(f"{problem}; without this key the data of {run} cannot be verified") from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise DamagedError(f"{path} is damaged: it is not a key of {KEY_BYTES} bytes in hexadecimal")
    return hmac.digest(key, fingerprint.encode(), "sha256").hex()


# ---- replacing a run ----


def list_stashes(folder: Path) -> list[Path]:
    """List the runs that were set aside in a folder, the oldest first."""
    return list(_numbered(folder, _STASH).values())


def _stash(folder: Path) -> None:
    parts = [folder / name for name in PARTS if (folder / name).exists()]
    if not parts:
        return
    (folder / _PARTIAL_STASH).mkdir()
    for path in parts:
        path.rename(folder / _PARTIAL_STASH / path.name)
    sync(folder / _PARTIAL_STASH)
    number = max(_numbered(folder, _STASH), default=0) + 1
    (folder / _PARTIAL_STASH).rename(folder / f".replaced.{number}")
    sync(folder)


def _restore_stash(folder: Path) -> None:
    """Undo a replacement that was killed, unless the new run is worth keeping."""
    stashes, partial = list_stashes(folder), folder / _PARTIAL_STASH
    if stashes and not _has_begun(folder) and not partial.exists():
        for path in (folder / name for name in PARTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        stashes[-1].rename(partial)
    if partial.exists():
        for path in partial.iterdir():
            path.rename(folder / path.name)
        partial.rmdir()
        sync(folder)


def _has_begun(path: Path) -> bool:
    """Return whether a run has saved anything worth keeping: a checkpoint or a model."""
    return bool(list_checkpoints(path)) or find_complete(path / MODEL).exists()


def _server_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != KEPT}


def _read_checkpoint(folder: Path, *private: str) -> dict[str, Any]:
    manifest = read_folder_manifest(folder / MANIFEST, CHECKPOINT_FORMAT, ARRAYS, *private)
    match = _ROUND.fullmatch(folder.name)
    if match is None or manifest.get("rounds") != int(match[1]):
        raise DamagedError(f"{folder / MANIFEST} is damaged: it is of round {manifest.get('rounds')!r}")
    return manifest
