"""Downloads and the cache: files are fetched once, by one process at a time, up to a size, and checked at every use."""

import contextlib
import logging
import math
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrecon._src.data.sources import DataError
from fedrecon._src.storage.lock import Holder, file_lock

CHUNK = 1 << 16
MAX_BYTES = 1 << 33  # if nothing is known about the file

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return $FEDRECON_CACHE, $XDG_CACHE_HOME/fedrecon or ~/.cache/fedrecon; it need not exist yet."""
    if folder := os.environ.get("FEDRECON_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "fedrecon"
    try:
        return Path.home() / ".cache" / "fedrecon"
    except RuntimeError:  # the system does not know the user
        raise DataError("there is no home folder to keep prepared data in; set FEDRECON_CACHE to a folder") from None


def private_cache(name: str) -> Path:
    """Return a folder of the cache for personal data, which only the user who runs fedrecon can read."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it may be somebody else's, for us to read
        folder.chmod(0o700)
    return folder


def fetch_once(
    url: str,
    target: Path,
    verify: Callable[[Path], None],
    max_bytes: int = MAX_BYTES,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> Path:
    """Return the path of a file that is downloaded once and verified at every use.

    A second process that wants the same file waits for the first and uses its download. `verify` raises `DataError`
    if the file is not the right one.
    """
    if not target.exists():
        try:
            lock = target.with_name(f".{target.name}.lock")
            with file_lock(lock, f"the download of {target.name}", wait=math.inf, on_wait=report_wait):
                if not target.exists():
                    download(url, target, verify, max_bytes, opener)
                    return target
        except OSError as error:
            raise DataError(f"cannot keep {target.name} in {target.parent} ({error}).") from error
    try:
        verify(target)
    except DataError as problem:
        raise DataError(f"{problem} Remove it, and it will be downloaded again.") from None
    return target


def report_wait(holder: Holder) -> None:
    """Log which process we wait for."""
    logger.warning("waiting for %s, which is making the same file", holder)


def download(
    url: str,
    target: Path,
    verify: Callable[[Path], None],
    max_bytes: int = MAX_BYTES,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> None:
    """Fetch a file with a progress bar; it appears at `target` only when it is complete and verified."""
    from rich.console import Console
    from rich.progress import wrap_file

    temporary = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener(url, timeout=30) as response, temporary.open("wb") as file:
            size, done = _read_length(response), 0
            _check_size(url, size, max_bytes)
            console = Console(stderr=True)
            with wrap_file(response, size, description=target.name, console=console) as shown:
                while piece := shown.read(CHUNK):
                    done += len(piece)
                    _check_size(url, done, max_bytes)
                    file.write(piece)
        verify(temporary)
        temporary.replace(target)
    except OSError as error:
        raise DataError(
            f"cannot download {url} ({error}). Get {target.name} by hand from "
            f"https://grouplens.org/datasets/movielens/ and pass its path, or put it at {target}."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _read_length(response: Any) -> int:
    """Return the size that the server declares, 0 if it declares none."""
    length = str(response.headers.get("Content-Length") or "0")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0


def _check_size(url: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise DataError(f"{url} has {size:,} bytes or more; the file we want has at most {max_bytes:,}.")
