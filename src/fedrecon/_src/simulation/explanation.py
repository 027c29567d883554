"""Explain a model: which parameters are global or local, how they are read, what a client sends and receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.validation import known_lookups, probe
from fedrecon._src.client.lookup_tables import group_name, lookup_groups, row_groups
from fedrecon._src.client.lookup_tracing import Reads, find_reads
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon._src.core.display import lay_out
from fedrecon._src.core.model import AUTO, Batch, Model, shapes_of
from fedrecon._src.core.pytrees import flatten, nbytes
from fedrecon._src.core.split import query_only

SAMPLED = 100  # clients whose rows are counted
ID_BYTES = 4  # a row's id is sent with the row


@dataclasses.dataclass(frozen=True)
class Part:
    """One parameter of a model, or one piece of its state.

    Attributes:
      path: the leaf's path.
      kind: `global`, `local`, `frozen`, `global state` (averaged) or `local state` (set from support).
      shape: its shape.
      nbytes: its size in bytes.
      features: if it is only read by rows, the features whose ids index it.
      note: how it is read or where it starts; why it is not read by rows.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    features: tuple[str, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A report on a model; `print` it.

    Attributes:
      parts: every parameter, global ones first.
      receives: bytes that a client receives in a round: all that is global.
      sends: bytes that it sends: the change of all that is global.
      receives_by_rows: bytes that it would receive if only the table rows that its examples touch were sent, with their
        ids: a mean over clients. None if no clients were given or no table is read by rows.
      sends_by_rows: bytes that it sends if only rows that changed are sent, in the same way.
      clients: how many clients that mean is over.
      noised: whether the algorithm's aggregator adds noise. Noise is added to every row of every table.
    """

    parts: tuple[Part, ...]
    receives: int
    sends: int
    receives_by_rows: float | None = None
    sends_by_rows: float | None = None
    clients: int = 0
    noised: bool = False

    def __str__(self) -> str:
        """Return the report as a table."""
        rows = [("parameter", "part", "shape", "size", "read")]
        for part in self.parts:
            read = f"by rows at {', '.join(part.features)}" if part.features else part.note
            rows.append((part.path, part.kind, str(part.shape), format_size(part.nbytes), read))
        lines = lay_out(rows)
        local = sum(part.nbytes for part in self.parts if part.kind.startswith("local"))
        lines += [
            "",
            f"A client receives {format_size(self.receives)} a round, sends {format_size(self.sends)}, "
            f"and keeps {format_size(local)} to itself.",
        ]
        if self.receives_by_rows is not None and self.sends_by_rows is not None:
            down, up = format_size(self.receives_by_rows), format_size(self.sends_by_rows)
            lines.append(f"Row-wise it would receive {down} and send {up} (mean over {self.clients} clients).")
        if self.noised:
            saved = "" if self.sends_by_rows is None else f", not {format_size(self.sends_by_rows)} of rows"
            lines.append(
                "Noise is added to every row, and row ids would reveal which items a client has. For privacy against "
                f"the server a client sends all {format_size(self.sends)}{saved}."
            )
        return "\n".join(lines)


def explain(model: Model | Algorithm, examples: Clients | Batch | None = None) -> Explanation:
    """Explain which parameters are global, local, frozen or state, how they are read, and what a round sends.

    Args:
      model: a model; or an algorithm, to take its split and optimizer into account.
      examples: clients, or a batch. Needed to find out, by tracing, which tables are read by rows. With clients, the
        rows that they touch are counted, of at most `SAMPLED` clients.

    Returns:
      An `Explanation`: `print` it for a table, or look at its `parts`.

    Example:
      >>> import fedrecon as fr
      >>> report = fr.explain(fr.models.matrix_factorization(num_items=100, dim=8))
      >>> [(part.path, part.kind, part.shape) for part in report.parts]
      [('item_embedding', 'global', (100, 8)), ('user_embedding', 'local', (8,))]
      >>> report.sends
      3200
    """
    algorithm, model = (model, model.model) if isinstance(model, Algorithm) else (None, model)
    reads = _reads(model, examples)
    lookups = {path: read.features for path, read in reads.items() if read.features}
    if algorithm is not None and not algorithm.define(model._replace(lookups=lookups)).needs.groups:
        reads = {p: r if not r.features else Reads((), "its optimizer needs all of it") for p, r in reads.items()}
    shared, local = (flatten(shapes_of(init))[0] for init in (model.init_global, model.init_local))
    state = ((), ()) if model.state is None else (model.state.shared, model.state.local)
    starts = _starts(model) | dict.fromkeys(state[1], "set from support")
    sides: Any = (
        ("global", shared, state[0], reads),
        ("local", local, state[1], {path: Reads((), start) for path, start in starts.items()}),
        ("frozen", model.frozen, (), dict.fromkeys(model.frozen, Reads((), "keeps its value"))),
    )
    parts = [
        Part(path, f"{kind} state" if path in of_state else kind, tuple(leaf.shape), nbytes(leaf), *read[path])
        for kind, leaves, of_state, read in sides
        for path, leaf in leaves.items()
    ]
    total = sum(part.nbytes for part in parts if part.kind.startswith("global"))
    noised = algorithm is not None and algorithm.aggregator.release is not None
    report = Explanation(tuple(parts), total, total, noised=noised)
    sparse = {part.path: part for part in parts if part.features}
    if not sparse or not isinstance(examples, Clients):
        return report
    down = _bytes_by_rows(sparse, examples, Needs(query_only()))
    up = down if algorithm is None else _bytes_by_rows(sparse, examples, algorithm.method.needs)
    dense, clients = total - sum(part.nbytes for part in sparse.values()), min(len(examples), SAMPLED)
    return dataclasses.replace(report, receives_by_rows=dense + down, sends_by_rows=dense + up, clients=clients)


def _reads(model: Model, examples: Clients | Batch | None) -> dict[str, Reads]:
    declared = lookup_groups(model)
    paths = flatten(shapes_of(model.init_global))[0]
    if examples is None:
        unknown = "whole, or by rows: give `examples` to find out" if model.lookups == AUTO else "whole"
        return {path: Reads(declared.get(path, ()), unknown) for path in paths}
    if model.lookups == AUTO and isinstance(examples, Clients):
        return known_lookups(model, examples)
    batch = probe(examples) if isinstance(examples, Clients) else examples
    reads = find_reads(model, {name: jnp.asarray(column) for name, column in batch.items()})
    if model.lookups == AUTO:
        return reads
    declarable = {
        path: Reads((), f"whole; declare it in `lookups`, read by rows at {', '.join(r.features)}") if r.features else r
        for path, r in reads.items()
    }
    return {path: Reads(declared[path]) if path in declared else declarable[path] for path in paths}


def _starts(model: Model) -> dict[str, str]:
    """Describe where each local parameter starts: drawn for every client, the same for all, or learned."""
    first, second = (flatten(model.init_local(jax.random.key(n)))[0] for n in (0, 1))
    if model.default_local is not None:
        return dict.fromkeys(first, "starts at a learned default")
    same = {path: bool(jnp.array_equal(first[path], second[path])) for path in first}
    return {path: "starts the same for every client" if same[path] else "drawn for every client" for path in first}


def _bytes_by_rows(sparse: Mapping[str, Part], clients: Clients, needs: Needs) -> float:
    """Return the mean bytes of the rows that clients touch, and of their ids, which every table has on the wire."""
    groups = row_groups({path: part.features for path, part in sparse.items()}, sparse)
    rows = mean_rows(clients, needs._replace(groups=groups))
    return sum((part.nbytes // part.shape[0] + ID_BYTES) * rows[group_name(part.features)] for part in sparse.values())


def mean_rows(clients: Clients, needs: Needs) -> dict[str, float]:
    """Return how many rows of each group of tables a client touches: a mean over at most `SAMPLED` clients.

    Args:
      clients: whose rows are counted.
      needs: how their examples are packed, and the groups.
    """
    chosen = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), SAMPLED)).astype(np.int64))
    columns = sorted({feature for _, features in needs.groups.values() for feature in features})
    rows = Packer(clients, needs._replace(columns=columns)).pack(chosen).num_rows
    return {group: float(np.mean(counts)) for group, counts in rows.items()}


def format_size(nbytes: float) -> str:
    """Write a number of bytes with its unit: `780 B`, `2.9 kB`.

    Args:
      nbytes: how many.
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"
