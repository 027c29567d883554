"""Write folders atomically: a folder is either complete or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` once the block has succeeded and everything is on disk.

    A folder under its final name is always complete. A killed process leaves at most a temporary folder, which is never
    read and which the next writer removes. Between the two renames of a replacement the old folder has a temporary
    name; `standing` finds it there.

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


def standing(path: Path) -> Path:
    """Return where a complete folder is: under its name, or where a killed replacement had moved it.

    Args:
      path: its name.
    """
    return path if path.exists() or not _old(path).exists() else _old(path)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk.

    Args:
      path: of the file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
