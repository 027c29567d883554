"""Downloads: fetched once, by one process at a time, up to a size, and checked whenever they are used."""

import math
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrecon._src.data.errors import DataError
from fedrecon._src.simulation.multihost import is_first_process
from fedrecon._src.storage.locks import Holder, hold

PIECE = 1 << 16
MOST_BYTES = 1 << 33  # if nothing is known about the file


def cached(
    url: str,
    target: Path,
    verify: Callable[[Path], None],
    most_bytes: int = MOST_BYTES,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> Path:
    """Return the path of a file that is downloaded once and checked every time.

    A second process that wants the same file waits for the first and uses its download.

    Args:
      url: where to download it from.
      target: where it is kept; missing folders are created.
      verify: called with the path of the file before it is used; raises `DataError` if it is not the right one.
      most_bytes: the download stops if it becomes larger than this.
      opener: opens the URL, as `urllib.request.urlopen` does.

    Raises:
      DataError: it cannot be downloaded, or the file there is not the right one.
    """
    if not target.exists():
        try:
            lock = target.with_name(f".{target.name}.lock")
            with hold(lock, f"the download of {target.name}", wait=math.inf, on_wait=say_who):
                if not target.exists():
                    download(url, target, verify, most_bytes, opener)
                    return target
        except OSError as error:
            raise DataError(f"cannot keep {target.name} in {target.parent} ({error}).") from error
    try:
        verify(target)
    except DataError as problem:
        raise DataError(f"{problem} Remove it, and it will be downloaded again.") from None
    return target


def say_who(holder: Holder) -> None:
    """Say on standard error which process we wait for; with several processes, only the first one says it."""
    if is_first_process():
        print(f"waiting for {holder}, which is making the same file", file=sys.stderr, flush=True)


def download(
    url: str,
    target: Path,
    verify: Callable[[Path], None],
    most_bytes: int = MOST_BYTES,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> None:
    """Fetch a file with a progress bar; it appears at `target` only when it is complete and verified.

    Args:
      url: where to download it from.
      target: where it goes; missing folders are created.
      verify: as for `cached`.
      most_bytes: as for `cached`.
      opener: as for `cached`.
    """
    from rich.console import Console
    from rich.progress import wrap_file

    temporary = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener(url, timeout=30) as response, temporary.open("wb") as file:
            size, done = _declared(response), 0
            _check_size(url, size, most_bytes)
            console = Console(stderr=True)
            with wrap_file(response, size, description=target.name, console=console) as shown:
                while piece := shown.read(PIECE):
                    done += len(piece)
                    _check_size(url, done, most_bytes)
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


def _declared(response: Any) -> int:
    """Return the size that the server declares, 0 if it declares none."""
    declared = str(response.headers.get("Content-Length") or "0")
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 19 else 0


def _check_size(url: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise DataError(f"{url} has {size:,} bytes or more; the file we want has at most {most_bytes:,}.")
