"""Whether fedrecon may write to a folder or file: it does not exist, is empty, or fedrecon made it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrecon._src.storage.atomic import StorageError, open_regular, read_json, write_bytes
from fedrecon._src.storage.lock import file_lock

MARKER, LOCK = ".fedrecon", ".lock"
RUN, MODEL, CHECKPOINTS, METRICS = "run.json", "model", "checkpoint", "metrics.jsonl"
KINDS = {"run": {RUN, MODEL, CHECKPOINTS}, "study": {"rows"}, "tuning": {"trials.json"}}

_CHECKPOINT = re.compile(r"round-\d+|\.round-\d+\.(partial|old)")
_MODEL_FILE = re.compile(r"model\.json|global\.safetensors|\..*\.partial")


def check_run_folder(path: Path) -> None:
    """Raise `StorageError` unless a run may be written to this folder."""
    _check_marked(path, "run")
    check_model_folder(path / MODEL)
    check_names(path / CHECKPOINTS, _CHECKPOINT)


@contextmanager
def lock_study(path: Path, kind: str = "study") -> Iterator[None]:
    """Lock the folder of a study or a tuning while a block runs, and mark it as made by fedrecon.

    Args:
      path: the folder.
      kind: study or tuning.

    Raises:
      StorageError: another process writes there, or fedrecon did not make the folder, or made it for something else.
    """
    _check_marked(path, kind)
    with file_lock(path / LOCK, f"the {kind} in {path}"):
        mark_folder(path)
        yield


def mark_folder(path: Path) -> None:
    """Mark a folder as made by fedrecon."""
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MARKER).exists():
        write_bytes(path / MARKER, b"fedrecon made this folder; its page docs/files.md says what is in it.\n")


def check_replaceable(path: Path, own_files: Collection[str]) -> None:
    """Raise `StorageError` unless a folder does not exist or holds no files but `own_files` (relative names)."""
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    names = {file.relative_to(path).as_posix() for file in files} if path.is_dir() else _list_names(path)
    if foreign := names - set(own_files):
        raise _foreign_folder(path, foreign)


def check_names(path: Path, own_names: re.Pattern[str]) -> None:
    """Raise `StorageError` unless a folder does not exist or all names in it match `own_names`."""
    if foreign := {name for name in _list_names(path) if not own_names.fullmatch(name)}:
        raise _foreign_folder(path, foreign)


def check_overwritable(path: Path, beginning: bytes, what: str) -> None:
    """Raise `StorageError` unless a file does not exist, is empty, or begins as one of the same kind.

    Args:
      path: the file.
      beginning: how files of its kind begin.
      what: it is, for the message.
    """
    if not path.exists():
        return
    with open_regular(path) as file:
        if file.read(len(beginning)) not in (b"", beginning):
            raise StorageError(f"{path} already exists and is not {what}; choose another name")


def check_model_folder(path: Path) -> None:
    """Raise `StorageError` unless a model may be written to this folder."""
    check_names(path, _MODEL_FILE)
    try:
        facts = read_json(path / "model.json")
    except StorageError:
        return  # missing or damaged, but all other files have names of ours
    if not isinstance(facts, dict) or "format" not in facts:
        raise _foreign_folder(path, {"another kind of model.json"})


def _check_marked(path: Path, kind: str) -> None:
    """Raise `StorageError` unless a folder is new, empty, or one of this kind that fedrecon made."""
    names = _list_names(path) - {LOCK, f".{MARKER}.partial"}
    if names and MARKER not in names:
        raise _foreign_folder(path, names)
    for other, typical in KINDS.items():
        if other != kind and typical & names and not KINDS[kind] & names:
            raise StorageError(f"{path} holds a {other}; give a new or empty folder, or the folder of a {kind}")


def _list_names(path: Path) -> set[str]:
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; give a new or empty folder")
    return {entry.name for entry in path.iterdir()} if path.exists() else set()


def _foreign_folder(path: Path, names: set[str]) -> StorageError:
    listed = ", ".join(sorted(names)[:3]) + (" and more" if len(names) > 3 else "")
    return StorageError(f"{path} holds {listed}, and fedrecon did not make it; give a new or empty folder")
