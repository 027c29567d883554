"""What a node remembers between messages and between starts: what it accepted, and which rounds it has seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.plan import Promises
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.ownership import LOCK, check_names

FILE, FORMAT = "node.json", Format("fedrecon-node", 2)
_FILES = re.compile(rf"{re.escape(FILE)}|{re.escape(LOCK)}|model|compiled|\..*\.(partial|old)")
MOST_TRIES = 20  # how often a node takes part in the same round: a server may be restarted


class Memory:
    """A node's memory, in a folder or, without one, as long as the process lives."""

    def __init__(self, folder: Path | None = None):
        """Read what is in the folder.

        Raises:
          StorageError: the folder is not a node's, or what is in it is damaged.
        """
        self.folder = folder
        if folder is not None:
            check_names(folder, _FILES)
        self.accepted: str | None = None  # the digest of a plan
        self.promises: Promises | None = None
        self.run: str | None = None
        self.ended: list[str] = []  # runs before this one
        self.round, self.tries, self.questions = -1, 0, 0
        self.answers: dict[str, int] = {}  # of plans with noise, by digest, over all their runs
        if folder is not None and (folder / FILE).exists():
            self._read(folder / FILE)

    def accept(self, digest: str, promises: Promises) -> None:
        """Remember that a plan was accepted."""
        self.accepted, self.promises = digest, promises
        self._write()

    def begin(self, run: str) -> None:
        """Remember that a run has begun."""
        if self.run is not None:
            self.ended = [*self.ended, self.run][-1000:]
        self.run, self.round, self.tries, self.questions = run, -1, 0, 0
        self._write()

    def see(self, number: int) -> None:
        """Remember a round before anything of it is sent."""
        self.tries = self.tries + 1 if number == self.round else 1
        self.round = number
        self._write()

    def answer(self, digest: str) -> None:
        """Remember an answer of a plan with noise before it is sent."""
        self.answers = {**self.answers, digest: self.answers.get(digest, 0) + 1}
        self._write()

    def note_question(self) -> None:
        """Remember a question of round zero before it is answered."""
        self.questions += 1
        self._write()

    def _write(self) -> None:
        if self.folder is None:
            return
        values = {
            "accepted": self.accepted,
            "promises": None if self.promises is None else self.promises._asdict(),
            "run": self.run,
            "ended": self.ended,
            "round": self.round,
            "tries": self.tries,
            "questions": self.questions,
            "answers": self.answers,
        }
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_manifest(self.folder / FILE, FORMAT, values, mode=0o600)

    def _read(self, file: Path) -> None:
        try:
            values: dict[str, Any] = read_manifest(file, FORMAT)
            self.accepted, self.run, self.ended = values["accepted"], values["run"], list(values["ended"])
            self.promises = None if values["promises"] is None else Promises(**values["promises"])
            self.round, self.tries = int(values["round"]), int(values["tries"])
            self.questions = int(values["questions"])
            self.answers = {str(plan): int(count) for plan, count in values["answers"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise StorageError(
                f"{problem}. This file says which plan the node accepted; check it, and remove it to "
                "accept a plan again"
            ) from None
