"""A run's folder of several processes: the first reads and writes it, and tells the others what it read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from fedrecon._src.simulation.multihost.channel import agree, is_first, wire
from fedrecon._src.simulation.multihost.host_arrays import from_first
from fedrecon._src.storage.run_folders import RunFolder


class FirstWrites(RunFolder):
    """A run's folder that only the first process touches; it need not be there on other hosts."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from writing here, in the first process."""
        with super().held() if is_first() else contextlib.nullcontext():
            yield

    def replace(self) -> None:
        """Put aside the run that is here."""
        if is_first():
            super().replace()

    def complete(self) -> None:
        """Forget the run that was put aside."""
        if is_first():
            super().complete()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`."""
        if is_first():
            super().describe(facts)

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        if is_first():
            super().record(entry)

    def checkpoint(self, done: int, tree: Any) -> None:
        """Save the state after `done` rounds."""
        if is_first():
            super().checkpoint(done, tree)

    def restore(self, like: Any) -> tuple[int, Any, list[dict[str, Any]]] | None:
        """Load the newest complete checkpoint in the first process, and give it to all."""
        tree = like

        def read() -> Any:
            nonlocal tree
            found = super(FirstWrites, self).restore(like)
            if found is None:
                return None
            tree = found[1]
            return found[0], found[2]

        found = agree(read)
        return None if found is None else (found[0], from_first(tree), found[1])


def first_writes(folder: RunFolder) -> RunFolder:
    """Return a folder that only the first of several processes touches; the folder itself where there is one."""
    return folder if wire() is None or isinstance(folder, FirstWrites) else FirstWrites(folder.path)
