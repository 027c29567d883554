"""Where downloads and prepared data are kept."""

import contextlib
import os
from pathlib import Path

from fedrecon._src.data.errors import DataError


def cache_folder() -> Path:
    """Return $FEDRECON_CACHE, $XDG_CACHE_HOME/fedrecon or ~/.cache/fedrecon; it need not exist yet.

    Raises:
      DataError: there is no home folder either.
    """
    if chosen := os.environ.get("FEDRECON_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "fedrecon"
    try:
        return Path.home() / ".cache" / "fedrecon"
    except RuntimeError:  # the system does not know the user
        raise DataError("there is no home folder to keep prepared data in; set FEDRECON_CACHE to a folder") from None


def private_cache(name: str) -> Path:
    """Return a folder of the cache for what people wrote or have; only the user who runs fedrecon can read it.

    Args:
      name: of the folder.
    """
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it may be somebody else's, for us to read
        folder.chmod(0o700)
    return folder
