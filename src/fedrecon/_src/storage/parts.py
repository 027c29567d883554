"""The parts of a run's folder: their names, where to read them, and whether fedrecon may write to the folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrecon._src.storage.arrays import MANIFEST, read_json, write_bytes
from fedrecon._src.storage.folders import standing
from fedrecon._src.storage.locks import hold
from fedrecon._src.storage.replacement import reading_place
from fedrecon._src.storage.sealed import read_sealed
from fedrecon._src.storage.storage_errors import StorageError

RUN, MODEL, CHECKPOINTS, METRICS, PLOTS = "run.json", "model", "checkpoint", "metrics.jsonl", "plots"
LOGS = "tensorboard"  # event files of --log tensorboard
PARTS = (MODEL, f".{MODEL}.old", CHECKPOINTS, METRICS, RUN, LOGS)  # what is set aside when a run is replaced
MARKER, LOCK = ".fedrecon", ".lock"
KINDS = {"run": {RUN, MODEL, CHECKPOINTS}, "study": {"rows"}, "tuning": {"trials.json"}}
FORMAT, VERSION = "fedrecon-run", 2  # version 1 had no seals; it can be read, but not continued

ROUND = re.compile(r"round-(\d+)")
_CHECKPOINT = re.compile(r"round-\d+|\.round-\d+\.(partial|old)")
_MODEL_FILE = re.compile(r"model\.json|global\.safetensors|\..*\.partial")


def checkpoints_of(path: Path) -> list[Path]:
    """List the complete checkpoints of a run, the newest last.

    Args:
      path: the run's folder.
    """
    folder = path / CHECKPOINTS
    found = [(ROUND.fullmatch(entry.name), entry) for entry in folder.iterdir()] if folder.is_dir() else []
    return [entry for _, entry in sorted((int(name[1]), entry) for name, entry in found if name)]


def has_begun(path: Path) -> bool:
    """Return whether a run has saved anything worth keeping: a checkpoint or a model.

    Args:
      path: the run's folder.
    """
    return bool(checkpoints_of(path)) or standing(path / MODEL).exists()


def standing_part(path: Path, name: str) -> Path:
    """Return where to read a part of a run, also during a replacement or after a killed one.

    Args:
      path: the run's folder.
      name: of the part.
    """
    return standing(reading_place(path, name, begun=has_begun(path)))


def read_description(path: Path) -> dict[str, Any]:
    """Read the `run.json` of a run's folder.

    Args:
      path: the run's folder.

    Raises:
      StorageError: it is missing or damaged.
    """
    return read_sealed(standing_part(path, RUN), unsealed={})


# ---- may fedrecon write here? ----


def check_ours(path: Path) -> None:
    """Check that a run may be written to a folder: it does not exist, is empty, or fedrecon made it.

    Args:
      path: the folder.

    Raises:
      StorageError: fedrecon did not make it.
    """
    inside = _names_inside(path, "run")
    known = MARKER in inside or _describes_run(path) or any(path.glob(f"{CHECKPOINTS}/round-*/{MANIFEST}"))
    if inside and not known:
        raise _somebody_elses(path, inside)
    check_model(path / MODEL)
    check_names(path / CHECKPOINTS, _CHECKPOINT)


@contextmanager
def held_study(path: Path, kind: str = "study") -> Iterator[None]:
    """Lock the folder of a study or a tuning while a block runs, and mark it as made by fedrecon.

    Args:
      path: the folder.
      kind: study or tuning.

    Raises:
      StorageError: another process writes there, or fedrecon did not make the folder, or made it for something else.
    """
    inside = _names_inside(path, kind)
    if inside and MARKER not in inside:
        raise _somebody_elses(path, inside)
    with hold(path / LOCK, f"the {kind} in {path}"):
        mark(path)
        yield


def _names_inside(path: Path, kind: str) -> set[str]:
    """Return what is in a folder, if it is one, and not that of something else that fedrecon makes."""
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; give a new or empty folder, or the folder of a {kind}")
    inside = _names(path) - {LOCK, f".{MARKER}.partial"}
    for other, names in KINDS.items():
        if MARKER in inside and other != kind and names & inside and not KINDS[kind] & inside:
            raise StorageError(f"{path} holds a {other}; give a new or empty folder, or the folder of a {kind}")
    return inside


def mark(path: Path) -> None:
    """Mark a folder as made by fedrecon.

    Args:
      path: the folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MARKER).exists():
        write_bytes(path / MARKER, b"fedrecon made this folder; its page docs/files.md says what is in it.\n")


def check_replaced(path: Path, ours: Collection[str]) -> None:
    """Check that a folder may be replaced: that it is not there, or holds no files but these.

    Args:
      path: the folder.
      ours: names of files that fedrecon wrote, relative to the folder.

    Raises:
      StorageError: it is a file, or holds something else.
    """
    if path.exists() and not path.is_dir():
        raise StorageError(f"{path} is a file; give a new folder")
    others = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
    if others := others - set(ours):
        raise _somebody_elses(path, others)


def check_names(path: Path, ours: re.Pattern[str]) -> None:
    """Check that a folder is not there, or holds nothing but files and folders with names of ours.

    Args:
      path: the folder.
      ours: what their names look like.

    Raises:
      StorageError: it is a file, or holds something else.
    """
    others = {name for name in _names(path) if not path.is_dir() or not ours.fullmatch(name)}
    if others:
        raise _somebody_elses(path, others)


def check_file(path: Path, beginning: bytes, what: str) -> None:
    """Check that a file may be written: it does not exist, is empty, or begins as one of the same kind.

    Args:
      path: the file.
      beginning: how files of its kind begin.
      what: it is, for the message.

    Raises:
      StorageError: it is something else.
    """
    if path.is_dir():
        raise StorageError(f"{path} is a folder; give the name of a file")
    if not path.exists():
        return
    with path.open("rb") as file:
        found = file.read(len(beginning))
    if found not in (b"", beginning):
        raise StorageError(f"{path} is there, and it is not {what}; give another name")


def check_model(path: Path) -> None:
    """Check that a model may be written to a folder: it does not exist, is empty, or has a model of ours.

    Args:
      path: the folder.

    Raises:
      StorageError: fedrecon did not make it.
    """
    check_names(path, _MODEL_FILE)
    try:
        about = read_json(path / "model.json")
    except StorageError:
        return  # missing or damaged, but all other files have names of ours
    if not isinstance(about, dict) or "format" not in about:
        raise _somebody_elses(path, {"another kind of model.json"})


def _describes_run(path: Path) -> bool:
    try:
        found = read_description(path)
    except (StorageError, OSError):
        return False
    return found.get("format") == FORMAT or {"config", "versions"} <= set(found)  # the latter is of version 1


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name} if path.exists() else set()


def _somebody_elses(path: Path, names: set[str]) -> StorageError:
    listed = ", ".join(sorted(names)[:3]) + (" and more" if len(names) > 3 else "")
    return StorageError(f"{path} holds {listed}, and fedrecon did not make it; give a new or empty folder")
