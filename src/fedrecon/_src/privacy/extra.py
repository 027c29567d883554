"""Packages of the extra `privacy`, and a sentence where one is missing."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str) -> Any:
    """Import a module of the extra, or say how to install it.

    Args:
      module: its name.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this needs {module}, which cannot be imported ({error}); run: pip install 'fedrecon[privacy]'"
        ) from error
