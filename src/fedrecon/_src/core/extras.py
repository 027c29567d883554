"""Packages of the extras, and how to install one that is missing."""

from __future__ import annotations

import importlib
from typing import Any

EXTRAS = {  # by package, the extra that installs it
    **{name: name for name in ("keras", "flax", "equinox")},
    **dict.fromkeys(("dp_accounting", "jax_privacy"), "privacy"),
    **dict.fromkeys(("starlette", "uvicorn", "httpx", "cryptography", "Crypto"), "deploy"),
    **dict.fromkeys(("fedrecon_device", "jax2onnx", "onnx", "onnxruntime", "flatbuffers"), "device"),
    "optuna": "tune",
}


def install_hint(error: ImportError) -> str | None:
    """Return how to install the package that could not be imported, or None if no extra has it."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = EXTRAS[package]
    source = " (in a copy of the repository: pip install ./src-device '.[device]')" if extra == "device" else ""
    return f"{package} cannot be imported; run: pip install 'fedrecon[{extra}]'{source}"


def require(module: str) -> Any:
    """Import a module of an extra; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = ImportError(str(error), name=module)
        raise ImportError(f"{install_hint(missing)} ({error})", name=module) from error
