"""Arrays on disk: pytrees as safetensors files, and clients as a folder of `.npy` files that can be memory-mapped.

A folder of clients holds offsets.npy, names.npy, column-<name>.npy, field-<name>.npy, and manifest.json, written last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedrecon._src.core.pytrees import flatten, from_named_arrays, nbytes, to_named_arrays
from fedrecon._src.storage.atomic import StorageError, open_regular, storage_errors, write_bytes
from fedrecon._src.storage.manifest import Format, write_folder_manifest

MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
MAX_PARAMETER = 1e15  # products of larger float32 parameters overflow


def save_arrays(path: Path, tree: Any, *, mode: int = 0o666) -> None:
    """Save a pytree of arrays to one safetensors file, by path.

    Args:
      path: the file.
      tree: the arrays.
      mode: its permissions, before the process's umask applies.

    Raises:
      StorageError: the disk is full, or the file cannot be written for another reason.
    """
    with storage_errors(path, "cannot be written", SafetensorError):
        content = save(to_named_arrays(tree))
    write_bytes(path, content, mode=mode)


def load_arrays(path: Path, like: Any) -> Any:
    """Load a pytree of arrays that `save_arrays` wrote.

    Args:
      path: the file.
      like: a pytree of arrays or of shapes, with the expected structure, shapes and types.

    Raises:
      StorageError: if the file is missing, damaged, or not what is expected.
    """
    open_regular(path, nbytes(like) + MAX_HEADER_BYTES).close()
    with storage_errors(path, "cannot be read", Exception):
        arrays = load_file(path)
    return from_named_arrays(arrays, like, path, StorageError)


def check_parameters(path: Path, tree: Any) -> None:
    """Raise `StorageError` unless all floating-point parameters are finite and small enough to compute with."""
    for name, leaf in flatten(tree)[0].items():
        array = np.asarray(leaf)
        # Written so that NaN fails. Types of ml_dtypes, such as bfloat16, have kind V.
        if array.dtype.kind in "fV" and not np.all(np.abs(array.astype(np.float64)) <= MAX_PARAMETER):
            raise StorageError(f"{path}: {name!r} must be finite and at most {MAX_PARAMETER:g} in absolute value")


# ---- clients, written at once or one at a time ----


Columns = Mapping[str, np.ndarray]

FORMAT, MANIFEST = Format("fedrecon-clients", 1), "manifest.json"
CLIENTS_PER_BLOCK = 16_384
# Of larger files only the size is compared when a folder is opened, so that millions of clients open in milliseconds.
QUICK_BYTES = 1 << 24


class Totals(NamedTuple):
    """The number of examples of all clients, and the size of the largest client."""

    num_examples: int
    max_size: int


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """A `.npy` file that grows along its first axis, so that a column need not fit into memory."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        """Start a file whose entries have this type and shape."""
        self.dtype, self.shape, self.length = np.dtype(dtype), shape, 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        # numpy pads the header so that the first dimension can grow in place
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False}
        npy.write_array_header_1_0(self.file, {**header, "shape": (self.length, *self.shape)})

    def accepts(self, values: np.ndarray) -> bool:
        """Return whether entries have the shape of this file's, and a type that its type can hold."""
        return values.shape[1:] == self.shape and np.can_cast(values.dtype, self.dtype, "safe")

    def append(self, values: np.ndarray) -> None:
        """Append entries, `(entries, ...)`."""
        self.file.write(np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data)
        self.length += len(values)

    def __exit__(self, *error: object) -> None:
        """Write the final length and close."""
        self.file.seek(0)
        self._write_header()
        self.file.close()


class ClientStream(AbstractContextManager["ClientStream"]):
    """Writes clients one by one into a folder; its memory use does not grow with the number of clients."""

    def __init__(self, folder: Path) -> None:
        """Start writing to an empty folder."""
        self.folder, self.files = folder, ExitStack()
        self.columns: dict[str, ArrayFile] = {}
        self.offsets = self.files.enter_context(ArrayFile(folder / "offsets.npy", np.int64))
        self.offsets.append(np.zeros(1, np.int64))
        self.names = self.files.enter_context((folder / "names.txt").open("w+", encoding="utf-8", newline="\n"))
        self.kind: type[np.int64 | np.str_] | None = None  # of all names
        self.width, self.totals = 1, Totals(0, 0)

    def add(self, name: object, client: Columns) -> None:
        """Append the columns of one client, whose name is an integer or text."""
        if not self.columns:
            for column, values in client.items():
                file = ArrayFile(column_path(self.folder, column), values.dtype, values.shape[1:])
                self.columns[column] = self.files.enter_context(file)
        size = len(next(iter(client.values()), ()))
        fits = client.keys() == self.columns.keys() and all(len(values) == size for values in client.values())
        if not fits or not all(self.columns[column].accepts(values) for column, values in client.items()):
            rows = {column: f"{file.dtype}{list(file.shape)}" for column, file in self.columns.items()}
            columns = {column: f"{values.dtype}{list(values.shape)}" for column, values in client.items()}
            raise ValueError(f"client {name!r} has columns {columns}; expected rows of {rows}, all of one length.")
        for column, values in client.items():
            self.columns[column].append(values)
        self.totals = Totals(self.totals.num_examples + size, max(self.totals.max_size, size))
        self.offsets.append(np.array([self.totals.num_examples]))
        kind, text = np.int64 if isinstance(name, int | np.integer) else np.str_, str(name)
        if self.kind not in (None, kind) or text.splitlines() not in ([text], []):
            raise ValueError(f"client name {name!r}: names must be all integers or all text of a single line.")
        self.kind, self.width = kind, max(self.width, len(text))
        self.names.write(text + "\n")

    def __exit__(self, *error: object) -> None:
        """Write the names and close all files."""
        with self.files:
            self.names.seek(0)
            dtype = np.dtype(np.int64 if self.kind is np.int64 else f"U{self.width}")
            with ArrayFile(self.folder / "names.npy", dtype) as names:
                while lines := list(islice(self.names, CLIENTS_PER_BLOCK)):
                    names.append(np.array([line[:-1] for line in lines]).astype(dtype))
        (self.folder / "names.txt").unlink()


def column_path(folder: Path, name: str) -> Path:
    """Return the path of a column's file; raises if the name cannot be part of a file name."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"column name {name!r} cannot be a file name: use letters, digits, '_', '-' and '.'.")
    return folder / f"column-{name}.npy"


def write_clients_manifest(
    folder: Path, kind: str, columns: Mapping[str, ArrayFile], totals: Totals, fields: Mapping[str, Any]
) -> None:
    """Write the array fields of a subclass, and then the manifest, which completes the folder.

    Args:
      folder: of the clients.
      kind: the name of the class.
      columns: their files, by name.
      totals: of all clients.
      fields: of the subclass.
    """
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    for name, value in arrays.items():
        np.save(folder / f"field-{name}.npy", value, allow_pickle=False)
    facts = {
        "kind": kind,
        "num_clients": len(np.load(folder / "offsets.npy", mmap_mode="r")) - 1,
        "num_examples": totals.num_examples,
        "max_size": totals.max_size,
        "columns": {name: {"dtype": file.dtype.str, "shape": list(file.shape)} for name, file in columns.items()},
        "array_fields": sorted(arrays),
        "fields": {name: value for name, value in fields.items() if name not in arrays},
    }
    write_folder_manifest(folder / MANIFEST, FORMAT, facts)


def map_array(path: Path) -> np.ndarray:
    """Memory-map a `.npy` file without reading it."""
    open_regular(path).close()
    return np.load(path, mmap_mode="r", allow_pickle=False)
