"""The page of a bundle: its files with what only this bundle knows filled in, and a server on this machine for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def page_files(manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the page by their name in the bundle."""
    return {}
