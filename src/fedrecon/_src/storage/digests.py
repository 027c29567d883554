"""Digests of files, to check that what is read is what was written."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedrecon._src.storage.storage_errors import StorageError


class DamagedError(StorageError):
    """A file is missing, or its content is not what was written."""


def file_digest(path: str | Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal.

    Args:
      path: the file.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: str | Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the entries of files in a manifest: by name, their size in `bytes` and their `sha256`.

    Args:
      folder: where the files are.
      names: of the files, in that folder.
    """
    paths = {name: Path(folder) / name for name in names}
    return {name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for name, path in paths.items()}


def verify(path: str | Path, expected: Mapping[str, Any], most_bytes: int | None = None) -> bool:
    """Check a file against its entry in a manifest.

    Args:
      path: the file.
      expected: its size in `bytes` and its `sha256`, as `describe_files` returns them.
      most_bytes: if the file is larger, only its size is checked; None reads every file.

    Returns:
      Whether the content was checked.

    Raises:
      DamagedError: the file is missing, or not what was written.
    """
    path = Path(path)
    try:
        size, digest = int(expected["bytes"]), str(expected["sha256"])
    except (KeyError, TypeError, ValueError):
        raise DamagedError(f"the manifest does not say what {path} should be") from None
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    if (there := path.stat().st_size) != size:
        raise DamagedError(f"{path} is damaged: it has {there:,} bytes, but {size:,} were written")
    if most_bytes is not None and size > most_bytes:
        return False
    if file_digest(path) != digest:
        raise DamagedError(f"{path} is damaged: its content is not what was written (sha256 differs)")
    return True


def verify_files(folder: str | Path, files: Mapping[str, Any], most_bytes: int | None = None) -> list[str]:
    """Check all files of a manifest.

    Args:
      folder: where the files are.
      files: as `describe_files` returned them.
      most_bytes: as for `verify`.

    Returns:
      The names of files whose content was not read because they are larger.

    Raises:
      DamagedError: a file is missing or not what was written, or the manifest names a file outside the folder.
    """
    if not isinstance(files, Mapping):
        raise DamagedError(f"the manifest of {folder} does not list its files")
    for name in files:
        if Path(name).name != name:
            raise DamagedError(f"the manifest of {folder} names {name!r}, which is not a file in it")
    return [name for name, expected in files.items() if not verify(Path(folder) / name, expected, most_bytes)]
