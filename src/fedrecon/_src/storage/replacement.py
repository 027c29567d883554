"""Replace the contents of a folder: the old contents are set aside, and restored if the new ones are never completed.

Old files move to `.replaced.partial` one by one. When all have moved, it is renamed to `.replaced.N`, and only then is
anything new written. So old and new can be told apart at whatever point a process is killed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedrecon._src.storage.folders import sync

PARTIAL = ".replaced.partial"
_ASIDE = re.compile(r"\.replaced\.(\d+)")


def put_aside(folder: Path, names: Sequence[str]) -> None:
    """Set files and folders aside.

    Args:
      folder: where they are.
      names: of the files and folders; those that do not exist are skipped.
    """
    here = [folder / name for name in names if (folder / name).exists()]
    if not here:
        return
    (folder / PARTIAL).mkdir()
    for path in here:
        path.rename(folder / PARTIAL / path.name)
    sync(folder / PARTIAL)
    number = max((_number(old) for old in put_aside_in(folder)), default=0) + 1
    (folder / PARTIAL).rename(folder / f".replaced.{number}")
    sync(folder)


def bring_back(folder: Path, names: Sequence[str], *, begun: bool) -> None:
    """Undo a replacement that was killed, unless the new contents are worth keeping.

    Args:
      folder: where it was.
      names: of what was set aside; new files under these names are removed.
      begun: whether the new contents are worth keeping.
    """
    asides = put_aside_in(folder)
    if asides and not begun and not (folder / PARTIAL).exists():
        for name in names:
            remove(folder / name)
        asides[-1].rename(folder / PARTIAL)
    if (folder / PARTIAL).exists():
        for path in (folder / PARTIAL).iterdir():
            path.rename(folder / path.name)
        (folder / PARTIAL).rmdir()
        sync(folder)


def forget(folder: Path) -> None:
    """Remove what was set aside, once the new contents are complete.

    Args:
      folder: where it is.
    """
    for old in put_aside_in(folder):
        shutil.rmtree(old)


def reading_place(folder: Path, name: str, *, begun: bool) -> Path:
    """Return where to read a file or folder that may be set aside, whatever a killed process has left.

    Args:
      folder: where it should be.
      name: of the file or folder.
      begun: whether the new contents are worth keeping, so that what was set aside is obsolete.
    """
    if (folder / PARTIAL).is_dir():
        return folder / name if (folder / name).exists() else folder / PARTIAL / name
    asides = put_aside_in(folder)
    return asides[-1] / name if asides and not begun else folder / name


def put_aside_in(folder: Path) -> list[Path]:
    """List what was set aside in a folder, the oldest first.

    Args:
      folder: where it is.
    """
    return sorted((path for path in folder.iterdir() if _ASIDE.fullmatch(path.name)), key=_number)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists.

    Args:
      path: of the file or folder.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _number(path: Path) -> int:
    found = _ASIDE.fullmatch(path.name)
    return int(found[1]) if found else 0
