"""What a manifest says about a bundle, checked before anything relies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedrecon_device.errors import BundleError

COLUMN_TYPES = ("float32", "int32", "int64", "int16", "bool")
MOST_NUMBERS = 1 << 27  # in all columns of a person's examples: half a gigabyte


class Description(NamedTuple):
    """What a runtime needs to know about a bundle.

    Attributes:
      task: `ratings`, `clicks`, `text` or `model`.
      most: how many examples reconstruction takes.
      columns: `{"dtype", "shape"}` of each feature.
      scale: the lowest and highest rating, or None.
      least_count: items with fewer ratings are not recommended.
      warm_start: whether to continue from old local parameters.
      graphs: by name: `{"file", "inputs", "outputs"}`, or `{"missing"}` with the reason.
      roles: where tables are, by their role.
      model_digest: of the global parameters.
    """

    task: str
    most: int
    columns: dict[str, dict[str, Any]]
    scale: list[float] | None
    least_count: int
    warm_start: bool
    graphs: dict[str, dict[str, Any]]
    roles: dict[str, str]
    model_digest: str


class Checker:
    """Checks of what a JSON file holds; errors name the file, the field and the rule."""

    def __init__(self, file: str):
        """Check a file of this name."""
        self._file = file

    def expect(self, fine: bool, name: str, what: str) -> None:
        """Raise a `BundleError` unless a field is fine."""
        if not fine:
            raise BundleError(f"{self._file}: `{name}` is damaged; expected {what}")

    def object(self, parent: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a field that is an object."""
        entry = parent.get(name)
        self.expect(isinstance(entry, dict), name, "an object")
        return entry  # type: ignore[return-value]

    def whole(self, parent: Mapping[str, Any], name: str) -> int:
        """Return a field that is a whole number."""
        number = parent.get(name)
        self.expect(_is_whole(number), name, "a whole number of at least 0")
        return number  # type: ignore[return-value]

    def column(self, name: str, about: Any) -> list[int]:
        """Return the shape of one example of a column."""
        valid = isinstance(about, dict) and about.get("dtype") in COLUMN_TYPES and isinstance(about.get("shape"), list)
        valid = valid and len(about["shape"]) <= 8 and all(_is_whole(size) for size in about["shape"])
        self.expect(valid, f"examples.columns.{name}", f"a dtype of {', '.join(COLUMN_TYPES)} and a shape")
        return about["shape"]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


CHECK = Checker("manifest.json")


def described(manifest: Mapping[str, Any], tables: str) -> Description:
    """Return what a manifest says.

    Args:
      manifest: as `read_manifest` returns it.
      tables: the name of the file with the global parameters.

    Raises:
      BundleError: something is missing or makes no sense; the message names it.
    """
    examples, solver = CHECK.object(manifest, "examples"), CHECK.object(manifest, "reconstruct")
    most, columns = CHECK.whole(examples, "most"), CHECK.object(examples, "columns")
    CHECK.expect(most >= 1 and bool(columns), "examples", "at least one example of at least one column")
    numbers = sum(most * math.prod(CHECK.column(name, about)) for name, about in columns.items())
    CHECK.expect(numbers <= MOST_NUMBERS, "examples", f"at most {MOST_NUMBERS} numbers")
    graphs = {name: _graph(name, about) for name, about in CHECK.object(manifest, "graphs").items()}
    roles = CHECK.object(manifest, "roles")
    CHECK.expect(all(isinstance(path, str) for path in roles.values()), "roles", "names of tables")
    task, digest = manifest.get("task"), CHECK.object(CHECK.object(manifest, "files"), tables).get("sha256")
    CHECK.expect(isinstance(task, str), "task", "a name")
    CHECK.expect(isinstance(digest, str), "files", f"a digest of {tables}")
    warm = solver.get("warm_start")
    CHECK.expect(isinstance(warm, bool), "reconstruct.warm_start", "true or false")
    least = CHECK.whole(manifest, "least_count")
    return Description(task, most, columns, _scale(manifest), least, warm, graphs, roles, digest)  # type: ignore[arg-type]


def _scale(manifest: Mapping[str, Any]) -> list[float] | None:
    scale = manifest.get("scale")
    if scale is None:
        return None
    two = isinstance(scale, list) and len(scale) == 2 and all(isinstance(end, (int, float)) for end in scale)
    CHECK.expect(
        two and all(abs(end) < 1e300 for end in scale) and scale[0] <= scale[1], "scale", "two numbers in order"
    )
    return scale


def _graph(name: str, about: Any) -> dict[str, Any]:
    if isinstance(about, dict) and isinstance(about.get("missing"), str):
        return {"missing": about["missing"]}
    CHECK.expect(isinstance(about, dict) and isinstance(about.get("file"), str), f"graphs.{name}", "a file or a reason")
    for side in ("inputs", "outputs"):
        ends = about.get(side)
        fine = isinstance(ends, list) and all(
            isinstance(end, dict)
            and isinstance(end.get("name"), str)
            and isinstance(end.get("dtype"), str)
            and isinstance(end.get("shape"), list)
            for end in ends
        )
        CHECK.expect(fine, f"graphs.{name}.{side}", "a list of names, types and shapes")
    return about
