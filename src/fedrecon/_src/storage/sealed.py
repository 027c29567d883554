"""Sealed JSON files and folders: any change to them is detected when they are read.

A sealed JSON file ends with its own sha256, computed with zeros in that position. The sealed file of a folder, its
manifest, lists the size and the sha256 of every other file in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fedrecon._src.storage.arrays import read_json, without_nan, write_bytes
from fedrecon._src.storage.digests import DamagedError, describe_files, verify

FILES, SEAL = "files", "sha256"
_BLANK, _AFTER = "0" * 64, '"\n}\n'  # the placeholder for the seal, and what follows it
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n\Z')


def write_sealed(path: Path, values: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Write an object to a sealed JSON file, atomically.

    Args:
      path: the file.
      values: the object.
      mode: its permissions, before the process's umask applies.
    """
    content = {name: value for name, value in values.items() if name != SEAL}  # the seal comes last
    text = json.dumps({**without_nan(content), SEAL: _BLANK}, indent=2) + "\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    write_bytes(path, (text.removesuffix(_BLANK + _AFTER) + seal + _AFTER).encode(), mode=mode)


def read_sealed(path: Path, *, unsealed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the object in a sealed JSON file.

    Args:
      path: the file.
      unsealed: entries by which to recognise a file from before there were seals. It is read without a check.

    Raises:
      StorageError: it is missing or damaged; the message names it.
    """
    values = read_json(path)
    if not isinstance(values, dict):
        raise DamagedError(f"{path} is damaged: it is not a JSON object")
    if unsealed is not None and not {SEAL, FILES} & set(values) and unsealed.items() <= values.items():
        return values
    raw = path.read_bytes()
    end = _END.search(raw)
    blank = raw[: -len(_BLANK + _AFTER)] + (_BLANK + _AFTER).encode()
    if not end or hashlib.sha256(blank).hexdigest() != end[1].decode():
        raise DamagedError(f"{path} is damaged: its content is not what was written (sha256 differs)")
    return values


def seal_folder(folder: Path, manifest: str, facts: Mapping[str, Any]) -> None:
    """Write a manifest with facts and with the digests of all files below a folder.

    Args:
      folder: the folder.
      manifest: the name of its manifest.
      facts: what else the manifest says.
    """
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    write_sealed(folder / manifest, {**facts, FILES: describe_files(folder, files)})


def check_files(manifest: Path, values: Mapping[str, Any], *needed: str) -> None:
    """Check all files that a manifest lists.

    Args:
      manifest: the manifest's path.
      values: its contents.
      *needed: files that it must list.

    Raises:
      DamagedError: a file is missing or not what was written; the message names it.
    """
    files = values.get(FILES)
    if not isinstance(files, Mapping) or not set(needed) <= set(files):
        raise DamagedError(f"{manifest} is damaged: it does not list the file {' and '.join(needed)}")
    for name, expected in files.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise DamagedError(f"{manifest} is damaged: it lists {name!r}, which is not in its folder")
        verify(manifest.parent / name, expected)
