"""Where downloads and prepared data are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $FEDRECON_CACHE, or ~/.cache/fedrecon; it need not exist yet."""
    return Path(os.environ.get("FEDRECON_CACHE") or Path.home() / ".cache" / "fedrecon")
