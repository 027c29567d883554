"""What a node remembers between messages and between starts: what it accepted, and which rounds it has seen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from fedrecon._src.deploy.plan import Promises
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import Format, read_manifest, write_manifest
from fedrecon._src.storage.ownership import LOCK, check_names

FILE, FORMAT = "node.json", Format("fedrecon-node", 3)
_FILES = re.compile(rf"{re.escape(FILE)}|{re.escape(LOCK)}|model|\..*\.(partial|old)")
MAX_TRIES = 20  # how often a node takes part in the same round: a server may be restarted
MAX_ENDED = 1000  # runs that are remembered


@dataclasses.dataclass
class Memory:
    """A node's memory, in a folder or, without one, as long as the process lives.

    Attributes:
      folder: where it is kept; None to forget it with the process.
      accepted: the digest of the plan that was accepted last.
      promises: what that plan promises.
      run: the run that the node takes part in.
      ended: runs before this one.
      round: the last round that it has seen.
      tries: how often it has seen that round.
      questions: how many questions of round zero it has answered in this run.
      answers: how often it has answered, by the digest of plans with noise, over all their runs; for questions of
        round zero, by the digest and the question.

    Raises:
      StorageError: the folder is not a node's, or what is in it is damaged.

    Example:
      >>> memory = fr.deploy.Memory()
      >>> memory.begin("run-1")
      >>> memory.see(0)
      >>> memory.round, memory.tries
      (0, 1)
    """

    folder: Path | None = None
    accepted: str | None = None
    promises: Promises | None = None
    run: str | None = None
    ended: list[str] = dataclasses.field(default_factory=list)
    round: int = -1
    tries: int = 0
    questions: int = 0
    answers: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what is in the folder."""
        if self.folder is None:
            return
        check_names(self.folder, _FILES)
        if (self.folder / FILE).exists():
            self._read(self.folder / FILE)

    def accept(self, digest: str, promises: Promises) -> None:
        """Remember that a plan was accepted."""
        self._write(accepted=digest, promises=promises)

    def begin(self, run: str) -> None:
        """Remember that a run has begun."""
        ended = self.ended if self.run is None else [*self.ended, self.run][-MAX_ENDED:]
        self._write(run=run, ended=ended, round=-1, tries=0, questions=0)

    def see(self, number: int) -> None:
        """Remember a round before anything of it is sent."""
        self._write(round=number, tries=self.tries + 1 if number == self.round else 1)

    def answer(self, name: str) -> None:
        """Remember an answer of a plan with noise before it is sent."""
        self._write(answers={**self.answers, name: self.answers.get(name, 0) + 1})

    def note_question(self) -> None:
        """Remember a question of round zero before it is answered."""
        self._write(questions=self.questions + 1)

    def _write(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        if self.folder is not None:
            values = {name: getattr(self, name) for name in _saved_names()}
            values["promises"] = None if self.promises is None else self.promises._asdict()
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_manifest(self.folder / FILE, FORMAT, values, mode=0o600)

    def _read(self, file: Path) -> None:
        try:
            values = read_manifest(file, FORMAT)
            for name in _saved_names():
                setattr(self, name, values[name])
            self.promises = None if values["promises"] is None else Promises(**values["promises"])
            self.ended, self.answers = list(self.ended), {str(plan): int(n) for plan, n in self.answers.items()}
            self.round, self.tries, self.questions = int(self.round), int(self.tries), int(self.questions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{error}. This file says which plan the node accepted; check it, and remove it to accept a plan again"
            ) from None


def _saved_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Memory) if field.name != "folder"]
