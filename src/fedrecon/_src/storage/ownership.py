"""Whether fedrecon may write to a folder or file: nobody else holds its lock, and it is new, empty or ours."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedrecon._src.storage.atomic import StorageError, read_bytes, read_json, timestamp, write_bytes

SECONDS_BETWEEN_TRIES = 0.1
MAX_LOCK_BYTES = 2**16


class LockedError(StorageError):
    """Another process holds the lock."""


@contextmanager
def file_lock(
    path: str | Path, what: str | None = None, *, wait: float = 0.0, on_wait: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """Lock a file while a block runs.

    The operating system holds the lock (`flock`). It is released when the process ends, however that happens, and a
    lock file that a killed process leaves behind locks nothing. A forked child shares the lock of its parent. A second
    lock of the same file in one process is refused like any other.

    Args:
      path: the lock file, which names the holder. Missing folders are made; the file is removed at the end.
      what: what is being locked, for the message; None for the lock file's own name.
      wait: how many seconds to wait for the lock; `math.inf` for as long as it takes.
      on_wait: called once with a description of the holder if the lock is taken.

    Raises:
      LockedError: another process holds it; the message says which.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait
    while (file := _try_lock(path)) is None:
        holder = read_holder(path)
        if time.monotonic() >= until:
            raise LockedError(f"{what or path} is in use by {holder}. Wait until it ends, or choose another folder.")
        if on_wait is not None:
            on_wait(holder)
            on_wait = None
        time.sleep(min(SECONDS_BETWEEN_TRIES, wait))
    with file:
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)  # before releasing the lock: others that opened this file see that it is gone


def read_holder(path: str | Path) -> str:
    """Describe the process that last wrote a lock file, whether or not it still runs."""
    try:
        content = json.loads(read_bytes(Path(path), MAX_LOCK_BYTES))
        return f"process {int(content['pid'])} on {content['host']!s:.100} (since {content['since']!s:.40})"
    except (ValueError, KeyError, TypeError, RecursionError):  # StorageError is a ValueError
        return "another process"


def _try_lock(path: Path) -> IO[str] | None:
    """Return the lock file, open, locked and naming this process; None if another process holds the lock."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as problem:  # some network file systems have no locks
            advice = "make sure that no other process writes here"
            warnings.warn(f"cannot lock {path} ({problem.strerror}): {advice}.", stacklevel=4)
        if _is_current(path, file):
            break
        file.close()  # its last holder removed it in the meantime
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": timestamp()}) + "\n")
    file.flush()
    return file


def _is_current(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


# ---- whose it is ----


MARKER, LOCK = ".fedrecon", ".lock"
RUN, MODEL, CHECKPOINTS, METRICS = "run.json", "model", "checkpoint", "metrics.jsonl"
KINDS = {"run": {RUN, MODEL, CHECKPOINTS}, "tuning": {"trials.json"}}

_CHECKPOINT = re.compile(r"round-\d+|\.round-\d+\.(partial|old)")
_MODEL_FILE = re.compile(r"model\.json|global\.safetensors|\..*\.partial")


def check_run_folder(path: Path) -> None:
    """Raise `StorageError` unless a run may be written to this folder."""
    _check_marked(path, "run")
    check_model_folder(path / MODEL)
    check_names(path / CHECKPOINTS, _CHECKPOINT)


@contextmanager
def lock_tuning(path: Path) -> Iterator[None]:
    """Lock the folder of a tuning while a block runs, and mark it as made by fedrecon.

    Args:
      path: the folder.

    Raises:
      StorageError: another process writes there, or fedrecon did not make the folder, or made it for something else.
    """
    _check_marked(path, "tuning")
    with file_lock(path / LOCK, f"the tuning in {path}"):
        mark_folder(path)
        yield


def mark_folder(path: Path) -> None:
    """Mark a folder as made by fedrecon."""
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MARKER).exists():
        write_bytes(path / MARKER, b"fedrecon made this folder; its page docs/files.md says what is in it.\n")


def check_replaceable(path: Path, own_files: Collection[str]) -> None:
    """Raise `StorageError` unless a folder does not exist or holds no files but `own_files` (relative names)."""
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    names = {file.relative_to(path).as_posix() for file in files} if path.is_dir() else _list_names(path)
    _check_foreign(path, names - set(own_files))


def check_names(path: Path, own_names: re.Pattern[str]) -> None:
    """Raise `StorageError` unless a folder does not exist or all names in it match `own_names`."""
    _check_foreign(path, {name for name in _list_names(path) if not own_names.fullmatch(name)})


def check_model_folder(path: Path) -> None:
    """Raise `StorageError` unless a model may be written to this folder."""
    check_names(path, _MODEL_FILE)
    try:
        facts = read_json(path / "model.json")
    except StorageError:
        return  # missing or damaged, but all other files have names of ours
    if not isinstance(facts, dict) or "format" not in facts:
        _check_foreign(path, {"another kind of model.json"})


def _check_marked(path: Path, kind: str) -> None:
    """Raise `StorageError` unless a folder is new, empty, or one of this kind that fedrecon made."""
    names = _list_names(path) - {LOCK, f".{MARKER}.partial"}
    _check_foreign(path, names if MARKER not in names else set())
    for other, typical in KINDS.items():
        if other != kind and typical & names and not KINDS[kind] & names:
            raise StorageError(f"{path} holds a {other}; give a new or empty folder, or the folder of a {kind}")


def _list_names(path: Path) -> set[str]:
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; give a new or empty folder")
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


def _check_foreign(path: Path, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:3]) + (" and more" if len(names) > 3 else "")
        raise StorageError(f"{path} holds {listed}, and fedrecon did not make it; give a new or empty folder")
