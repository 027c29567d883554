"""Storage of a person's data: one file that only its owner can read, written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fedrecon_device.errors import StoreError

FORMAT, VERSION = "fedrecon-personal", 1
MOST_BYTES = 1 << 28


class Store:
    """One JSON file. Deleting it deletes the person: what was read from it is then forgotten, too."""

    def __init__(self, path: str | Path):
        """Use the file at `path`, which need not exist yet."""
        self.path = Path(path)

    def read(self) -> dict[str, Any] | None:
        """Return what the file holds; None if there is no file.

        Raises:
          StoreError: it is damaged, or not a person's file.
        """
        try:
            with open(self.path, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StoreError(f"{self.path} cannot be read: {problem.strerror}") from None
        try:
            content = json.loads(data)
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise StoreError(f"{self.path} is of {content['format']} {content['version']}, not {FORMAT} {VERSION}")
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StoreError(f"{self.path} is not a person's file, or is damaged; delete it to start over") from None
        return content

    def write(self, content: dict[str, Any]) -> None:
        """Replace the file atomically, with mode 0600: the old or the new one is there whenever the process ends."""
        data = json.dumps({"format": FORMAT, "version": VERSION, **content}, ensure_ascii=False).encode()
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=folder)  # made with mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        if os.name == "posix":
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def delete(self) -> None:
        """Delete the file, if it is there."""
        self.path.unlink(missing_ok=True)
