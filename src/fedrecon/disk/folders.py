"""Folders that are whole or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder under a temporary name; it gets its name when the block has succeeded and all is on disk.

    Whoever finds the folder under its name finds all of it. A process that is killed leaves at most a folder with a
    temporary name, which nobody reads and the next writer removes. Between the two renames of a replacement the old
    folder has only a temporary name; `standing` finds it there.

    Args:
      path: the name it gets.
      replace: whether a folder of that name is replaced; otherwise it is an error.
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


def standing(path: Path) -> Path:
    """Return where a whole folder stands: under its name, or where a replacement that was killed had put it aside."""
    return path if path.exists() or not _old(path).exists() else _old(path)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
