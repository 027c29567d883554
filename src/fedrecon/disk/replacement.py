"""Replacing what a folder holds: the old is put aside, and comes back if the new one never came to be.

While the old is being put aside, what has gone is in `.replaced.partial`; when all of it has, that becomes
`.replaced.N`, and only then is anything new written. So whatever a killed process leaves, it is known which is which.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedrecon.disk.folders import sync

PARTIAL = ".replaced.partial"
_ASIDE = re.compile(r"\.replaced\.(\d+)")


def put_aside(folder: Path, names: Sequence[str]) -> None:
    """Put aside all of the files and folders `names` that there are."""
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
    """Undo a replacement that was killed, unless the new one has begun to be worth something.

    Args:
      folder: where it was.
      names: what was to be put aside; what the new one has written under these names is removed.
      begun: whether there is something of the new one to keep.
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
    """Remove what was put aside: what replaces it is complete."""
    for old in put_aside_in(folder):
        shutil.rmtree(old)


def reading_place(folder: Path, name: str, *, begun: bool) -> Path:
    """Return where a reader finds a file or folder that may be put aside, whatever a killed process has left.

    Args:
      folder: where it should be.
      name: of the file or folder.
      begun: whether there is something of a new one, so that what was put aside is past.
    """
    if (folder / PARTIAL).is_dir():
        return folder / name if (folder / name).exists() else folder / PARTIAL / name
    asides = put_aside_in(folder)
    return asides[-1] / name if asides and not begun else folder / name


def put_aside_in(folder: Path) -> list[Path]:
    """List what was put aside in a folder, the oldest first."""
    return sorted((path for path in folder.iterdir() if _ASIDE.fullmatch(path.name)), key=_number)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _number(path: Path) -> int:
    found = _ASIDE.fullmatch(path.name)
    return int(found[1]) if found else 0
