"""A bundle's folder: which files there are, what their digests say, and what may not be in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from fedrecon_device.contents import parsed
from fedrecon_device.errors import BundleError

FORMAT, VERSION = "fedrecon-bundle", 2
MANIFEST = "manifest.json"
MOST_MANIFEST, MOST_FILES, MOST_BYTES = 1 << 20, 1000, 1 << 31
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,3}")


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the one form in which a manifest is written: sorted, with the digest of all the rest in it."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    digest = digest_of(json.dumps(rest, sort_keys=True).encode())
    return (json.dumps({**rest, "digest": digest}, sort_keys=True, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a bundle's manifest.

    Raises:
      BundleError: it is missing, damaged, changed, of another version, or names files outside the bundle.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a folder; expected a bundle that fedrecon bundle made")
    if not os.path.lexists(folder / MANIFEST):
        raise BundleError(
            f"{folder} is not a bundle: {MANIFEST} is missing. Make a bundle of a run with "
            "fedrecon bundle RUN --out DIR"
        )
    data = read_file(folder, MANIFEST, MOST_MANIFEST)
    manifest = parsed(str(folder / MANIFEST), data)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{folder / MANIFEST} is not the manifest of a bundle")
    if manifest.get("version") != VERSION:
        raise BundleError(
            f"{folder} is a bundle of version {manifest.get('version')}; this runtime reads version {VERSION}"
        )
    try:
        whole = manifest_bytes(manifest) == data
    except RecursionError:
        raise BundleError(f"{folder / MANIFEST} is nested too deeply") from None
    if not whole:
        raise BundleError(f"{folder / MANIFEST} was changed after it was written: its digest does not match")
    _check_names(manifest.get("files"), folder)
    return manifest


def _check_names(files: Any, folder: Path) -> None:
    """Refuse names that lead out of the folder, and sizes that no bundle has."""
    if not isinstance(files, dict) or len(files) > MOST_FILES:
        raise BundleError(f"{folder / MANIFEST}: `files` must be an object of at most {MOST_FILES} files")
    total = 0
    for name, about in files.items():
        if not NAME.fullmatch(name) or name == MANIFEST:
            raise BundleError(f"{folder / MANIFEST} names the file {name!r}, which is not a plain name in the bundle")
        size = about.get("bytes") if isinstance(about, dict) else None
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BundleError(f"{folder / MANIFEST}: {name!r} has no size")
        total += size
    if total > MOST_BYTES:
        raise BundleError(f"{folder / MANIFEST} says the bundle has {total} bytes; at most {MOST_BYTES} are read")


def read_file(folder: Path, name: str, most: int) -> bytes:
    """Read one regular file of at most `most` bytes; links are not followed."""
    path = folder / name
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise BundleError(f"{path} is missing") from None
    except OSError as problem:
        raise BundleError(f"{path} cannot be read as a plain file: {problem.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise BundleError(f"{path} is not a plain file")
        if about.st_size > most:
            raise BundleError(f"{path} has {about.st_size} bytes; at most {most} are expected")
        return file.read(most + 1)


def read_checked(folder: Path, manifest: dict[str, Any], name: str) -> bytes:
    """Read a file that the manifest names, and compare it with its digest there.

    Raises:
      BundleError: it is not named, missing, or changed.
    """
    about = manifest["files"].get(name)
    if about is None:
        raise BundleError(f"{folder} has no {name}")
    for parent in Path(name).parents:
        if (folder / parent).is_symlink() and parent != Path("."):
            raise BundleError(f"{folder / parent} is a link; a bundle has plain folders only")
    data = read_file(folder, name, about["bytes"])
    if len(data) != about["bytes"] or digest_of(data) != about.get("sha256"):
        raise BundleError(f"{folder / name} was changed: its bytes do not have the digest in {MANIFEST}")
    return data


def check_files(folder: Path, manifest: dict[str, Any]) -> int:
    """Compare every file with its digest, and find files that should not be there.

    Returns:
      How many files there are, the manifest not counted.

    Raises:
      BundleError: the first file that is missing, changed, a link, or not in the manifest.
    """
    present = _walk(folder)
    strangers = sorted(present - set(manifest["files"]) - {MANIFEST})
    if strangers:
        raise BundleError(f"{folder / strangers[0]} is not in {MANIFEST}; a bundle has no other files")
    for name in manifest["files"]:
        read_checked(folder, manifest, name)
    return len(manifest["files"])


def _walk(folder: Path) -> set[str]:
    """List all files, following no link, so that no folder is walked twice."""
    paths: set[str] = set()
    todo = [folder]
    while todo:
        directory = todo.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise BundleError(f"{entry.path} is a link; a bundle has plain files and folders only")
                if entry.is_dir():
                    todo.append(Path(entry.path))
                else:
                    paths.add(Path(entry.path).relative_to(folder).as_posix())
                if len(paths) + len(todo) > 2 * MOST_FILES:
                    raise BundleError(f"{folder} has more than {MOST_FILES} files; that is not a bundle")
    return paths
