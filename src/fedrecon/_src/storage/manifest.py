"""Manifests: the one JSON format in which we describe what we write to disk, so that damage and other formats show.

A manifest is a JSON object with a `format`, its `version` (a protocol number, not that of the package), facts, the
size and sha256 of the other `files` of its folder if it has any, and last its own `sha256`, computed with zeros in that
position.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fedrecon._src.storage.atomic import StorageError, open_regular, parse_json, read_bytes, without_nan, write_bytes

FILES, SEAL = "files", "sha256"
_BLANK, _AFTER = "0" * 64, '"\n}\n'  # the placeholder for the seal, and what follows it
_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n\Z')


class DamagedError(StorageError):
    """A file is missing, or its content is not what was written."""


class Format(NamedTuple):
    """The format of a manifest; only the version that this code writes is read."""

    name: str
    version: int


def write_manifest(path: Path, file_format: Format, facts: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Write a manifest atomically.

    Args:
      path: the file.
      file_format: what it describes.
      facts: all that it says; numbers that are not finite become null.
      mode: its permissions, before the process's umask applies.
    """
    content = {"format": file_format.name, "version": file_format.version, **facts}
    content.pop(SEAL, None)  # the seal comes last
    text = json.dumps({**without_nan(content), SEAL: _BLANK}, indent=2) + "\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    write_bytes(path, (text.removesuffix(_BLANK + _AFTER) + seal + _AFTER).encode(), mode=mode)


def read_manifest(path: Path, file_format: Format) -> dict[str, Any]:
    """Read a manifest.

    Raises:
      DamagedError: it is not what was written.
      StorageError: it is missing, or of another format or version.
    """
    content = read_bytes(path)
    facts = parse_json(content, path)
    header = (facts.get("format"), facts.get("version")) if isinstance(facts, dict) else ("not an object", None)
    if header != file_format:
        readable = f"this version of fedrecon reads {file_format.name!r} {file_format.version}"
        raise StorageError(f"{path} is of format {header[0]!r} {header[1]!r}; {readable}")
    end = _END.search(content)
    blank = content[: -len(_BLANK + _AFTER)] + (_BLANK + _AFTER).encode()
    if not end or hashlib.sha256(blank).hexdigest() != end[1].decode():
        raise DamagedError(f"{path} is damaged: its content is not what was written (sha256 differs)")
    return facts


def write_folder_manifest(path: Path, file_format: Format, facts: Mapping[str, Any]) -> None:
    """Write a manifest that lists all files below its folder, which completes the folder."""
    folder = path.parent
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)} for name in names}
    write_manifest(path, file_format, {**facts, FILES: files})


def read_folder_manifest(
    path: Path, file_format: Format, *required: str, max_hashed: int | None = None
) -> dict[str, Any]:
    """Read a manifest and verify the files that it lists.

    Args:
      path: the manifest.
      file_format: as for `read_manifest`.
      *required: files that it must list.
      max_hashed: of larger files, only the size is compared; None reads all.

    Raises:
      DamagedError: the manifest or a file is not what was written; the message names it.
      StorageError: it is missing, or of another format or version.
    """
    facts = read_manifest(path, file_format)
    files = facts.get(FILES)
    if not isinstance(files, Mapping) or not set(required) <= set(files):
        raise DamagedError(f"{path} is damaged: it does not list the file {' and '.join(required)}")
    for name, entry in files.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise DamagedError(f"{path} is damaged: it lists {name!r}, which is not in its folder")
        verify_file(path.parent / name, entry, max_hashed)
    return facts


def file_digest(path: str | Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal."""
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_file(path: Path, entry: Any, max_hashed: int | None = None) -> None:
    """Verify a file against its entry in a manifest; of one larger than `max_hashed`, only the size.

    Raises:
      DamagedError: the file is missing, or not what was written.
    """
    try:
        size, digest = int(entry["bytes"]), str(entry["sha256"])
    except (KeyError, TypeError, ValueError):
        raise DamagedError(f"{path} is not in the manifest") from None
    if not path.is_file():
        problem = "is missing or not a regular file"
    elif (actual := path.stat().st_size) != size:
        problem = f"is damaged: it has {actual:,} bytes, but {size:,} were written"
    elif (max_hashed is None or size <= max_hashed) and file_digest(path) != digest:
        problem = "is damaged: its content is not what was written (sha256 differs)"
    else:
        return
    raise DamagedError(f"{path} {problem}")
