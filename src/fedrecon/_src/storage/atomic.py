"""Read and write our own files safely: bounded reads of regular files, and writes that are complete or absent."""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

MAX_JSON_BYTES = 2**28  # a catalogue of some millions of items


class StorageError(ValueError):
    """A file or folder is missing, damaged, not ours, or cannot be written."""


@contextmanager
def storage_errors(path: str | Path, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn some kinds of exceptions in the block into a `StorageError`.

    Args:
      path: the file, which the error names.
      what: happened to it, such as "cannot be read".
      *kinds: of exceptions.
    """
    try:
        yield
    except kinds as problem:
        raise StorageError(f"{path} {what}: {getattr(problem, 'strerror', None) or problem}") from None


# ---- reading ----


def open_regular(path: Path, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file (or a link to one) for reading; never blocks on a FIFO or reads an endless device.

    Args:
      path: the file.
      max_bytes: the largest size that is accepted; None for any.

    Raises:
      StorageError: the file is missing, unreadable, not regular, or too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        reason = "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem}"
        raise StorageError(f"{path} {reason}") from None
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or (max_bytes is not None and status.st_size > max_bytes):
        os.close(descriptor)
        rule = f"a regular file of at most {max_bytes:,} bytes" if max_bytes is not None else "a regular file"
        size = f"{status.st_size:,} bytes" if is_regular else "something else"
        raise StorageError(f"{path} cannot be read: it must be {rule} (got {size})")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a regular file of bounded size; raises `StorageError` like `open_regular`."""
    with open_regular(path, max_bytes) as file:
        return file.read(min(os.fstat(file.fileno()).st_size, max_bytes))  # it may grow while it is read


def parse_json(content: bytes, path: Path) -> Any:
    """Parse JSON; raises a `StorageError` that names the file it came from."""
    # Not JSON, not UTF-8, a number of thousands of digits, or too deep.
    with storage_errors(path, "is not valid JSON", ValueError, RecursionError):
        value = json.loads(content.decode("utf-8"))
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file; raises `StorageError` if it is missing, cannot be read, or is not JSON."""
    return parse_json(read_bytes(path), path)


# ---- writing ----


def write_errors(path: Path) -> AbstractContextManager[None]:
    """Turn an `OSError` in the block into a `StorageError` that names the file."""
    return storage_errors(path, "cannot be written", OSError)


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: if the process is killed, either the old or the new content is there.

    Args:
      path: the file.
      content: all of it.
      mode: its permissions, before the process's umask applies.

    Raises:
      StorageError: the disk is full, or the file cannot be written for another reason.
    """
    with write_errors(path), atomic_file(path, mode) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a temporary file, which is renamed to `path` once the block has succeeded and all of it is on disk."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)  # a leftover one may have other permissions
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def timestamp() -> str:
    """Return the time as our files have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; numbers that are not finite become null."""
    write_bytes(path, (json.dumps(without_nan(value), indent=2) + "\n").encode())


def without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot write (NaN, infinity) by None."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` once the block has succeeded and everything is on disk.

    A folder under its final name is always complete. A killed process leaves at most a temporary folder, which is never
    read and which the next writer removes. Between the two renames of a replacement the old folder has a temporary
    name; `find_complete` finds it there.

    Args:
      path: the final name.
      replace: whether to replace a folder of that name; otherwise one that exists is an error.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already: remove it or choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = path.with_name(f".{path.name}.partial"), _old(path)
    if old.exists() and not path.exists():  # a process was killed between its two renames
        old.rename(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            sync(file)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        temporary.rename(path)
        sync(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def find_complete(path: Path) -> Path:
    """Return where a complete folder is: under its name, or where a killed replacement had moved it."""
    return path if path.exists() or not _old(path).exists() else _old(path)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
