"""Locks on files and folders, which are released when the process ends."""

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from fedrecon._src.storage.atomic import StorageError, read_bytes

SECONDS_BETWEEN_TRIES = 0.1
MAX_LOCK_BYTES = 2**16


class LockedError(StorageError):
    """Another process holds the lock."""


@contextmanager
def file_lock(
    path: str | Path,
    what: str | None = None,
    *,
    wait: float = 0.0,
    on_wait: Callable[[str], None] | None = None,
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
            warnings.warn(
                f"cannot lock {path} ({problem.strerror}): make sure that no other process writes here.", stacklevel=4
            )
        if _is_current(path, file):
            break
        file.close()  # its last holder removed it in the meantime
    file.truncate(0)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
    file.flush()
    return file


def _is_current(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
