"""A plan of an algorithm that was made in Python: any model, of any framework.

A plan holds no code. It names the algorithm by its digest. Each node's operator imports the same algorithm from code of
their own, with the clients of the node.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from fedrecon._src.algorithms.algorithm import Algorithm
from fedrecon._src.algorithms.rounds import as_clients
from fedrecon._src.algorithms.saving import digest, save_algorithm
from fedrecon._src.algorithms.validation import decide_lookups, with_lookups
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import lengths_for
from fedrecon._src.core.display import Say
from fedrecon._src.core.model import metric_names
from fedrecon._src.deploy.plan import NodeData, Plan, PlanError
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.tasks import Measure, Users
from fedrecon._src.simulation.evaluation import Evaluator

NUMBERS = ("rounds", "seed", "evaluate_every", "split_seed", "max_examples", "min_examples")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AlgorithmPlan(Plan):
    """A plan of an algorithm that was made in Python.

    Attributes:
      trained: the algorithm, with its lookups decided.
      columns: `{name: [type, *shape]}` of the columns that clients have.
      fractions: shares of the clients that train, validate and test.
      split_seed: the seed of this division.

    Example:
      >>> model = fr.models.matrix_factorization(num_items=8, dim=2)
      >>> solver = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4)
      >>> server = fr.optimizers.sgd(1.0)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=solver, update=solver, server=server)
      >>> plan = fr.deploy.plan_for(algorithm, fr.data.synthetic_ratings(num_users=4, num_items=8))
      >>> isinstance(plan, fr.deploy.AlgorithmPlan), plan.fractions
      (True, (0.8, 0.1, 0.1))
    """

    kind: ClassVar[str] = "algorithm"

    trained: Algorithm
    columns: Mapping[str, Sequence[Any]]
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        shares = len(self.fractions) == 3 and min(self.fractions) >= 0 and 0 < sum(self.fractions) <= 1 + 1e-9
        yield Rule(not shares, "fractions", "must be three shares that add up to at most 1")
        yield from super().rules()

    @property
    def algorithm(self) -> Algorithm:
        """What is run, the same on every host."""
        return self.trained

    @functools.cached_property
    def task(self) -> SimpleNamespace:
        """What commands show."""
        measures = tuple(Measure(name, name) for name in metric_names(self.trained.model))
        words = {"name": "algorithm", "people": "clients", "examples": "examples", "serve": ""}
        return SimpleNamespace(measures=measures, curve=(*measures, *measures)[:2], **words)

    def subject(self) -> dict[str, Any]:
        """Return the digest of the algorithm, and how it is trained."""
        return {
            "algorithm": digest(self.trained),
            "columns": {name: list(kind) for name, kind in self.columns.items()},
            "fractions": list(self.fractions),
            **{name: getattr(self, name) for name in NUMBERS},
        }

    def about(self) -> str:
        """Say what is trained."""
        return f"an algorithm from this node's operator, with digest {digest(self.trained)[:16]}"

    def evaluator(self, users: Users, part: str) -> Evaluator | None:
        """Return an evaluator of a part of the clients."""
        chosen = getattr(users, part)
        return Evaluator(self.trained, chosen, seed=self.seed) if len(chosen) else None

    def save_model(self, folder: Path, params: Any, failed: str | None = None) -> None:
        """Save the algorithm with its parameters, as `fr.save_algorithm` does."""
        del failed  # the run's own description says it
        save_algorithm(folder, self.trained, params, replace=True)

    def watch(self, say: Say) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that looks at every record and warns when a round was lost."""

        def look(record: Mapping[str, Any]) -> None:
            if record.get("skipped"):
                say(f"warning: round {record['round']}: nothing was learned, the mean of the updates is not finite")

        return look

    def split_clients(self, clients: Clients) -> NodeData:
        """Return a node's clients as the plan wants them, divided by their names.

        Raises:
          PlanError: their columns are not those of the plan.
        """
        columns = columns_of(clients)
        if any(columns.get(name) != list(kind) for name, kind in self.columns.items()):
            raise PlanError(f"the clients have the columns {columns}; the plan expects {dict(self.columns)}")
        enough = clients.cap(self.max_examples).at_least(self.min_examples)
        users = Users(*enough.split_clients(*self.fractions, seed=self.split_seed))
        return NodeData(users, {"clients_below_minimum": len(clients) - sum(map(len, users))})

    @classmethod
    def read(cls, values: Mapping[str, Any], algorithm: Algorithm | None, options: Mapping[str, Any]) -> AlgorithmPlan:
        """Undo `subject`, with the operator's algorithm."""
        if algorithm is None:
            plan = f"this plan is for an algorithm made in Python, digest {values['algorithm'][:16]}"
            raise PlanError(f"{plan}: name it with --algorithm package.module:function")
        lookups = tuple((str(path), tuple(map(str, names))) for path, names in values["lookups"].items())
        made = with_lookups(algorithm, lookups)
        if digest(made) != values["algorithm"]:
            digests = f"{values['algorithm'][:16]}, and the one given here is {digest(made)[:16]}"
            raise PlanError(f"the plan is for the algorithm {digests}: their recipes, shapes or lookups differ")
        numbers = {name: values[name] for name in NUMBERS} | {"split_seed": int(values["split_seed"])}
        fractions = tuple(map(float, values["fractions"]))
        return _make_plan(made, values["columns"], fractions=fractions, **numbers, **options)


def plan_for(algorithm: Algorithm, examples: Clients | Mapping[str, Any], **options: Any) -> AlgorithmPlan:
    """Make a plan for an algorithm made in Python. Each node imports the same algorithm from its operator's code.

    Args:
      algorithm: what is trained.
      examples: columns as clients have them, for their types and shapes; the examples themselves are not used.
      **options: fields of `AlgorithmPlan` and of `Plan` to set, such as `rounds`, `seed` and `secure`.

    Example:
      >>> model = fr.models.matrix_factorization(num_items=8, dim=2)
      >>> solver = fr.gradient_descent(fr.optimizers.sgd(0.1), batch_size=4)
      >>> server = fr.optimizers.sgd(1.0)
      >>> algorithm = fr.federated_reconstruction(model, reconstruct=solver, update=solver, server=server)
      >>> ratings = fr.data.synthetic_ratings(num_users=4, num_items=8, seed=0)
      >>> plan = fr.deploy.plan_for(algorithm, ratings, rounds=20, least_users=5)
      >>> plan.promises.least_users
      5
    """
    clients = as_clients(examples)
    made = decide_lookups(algorithm, clients)
    return _make_plan(made, columns_of(clients), **options)


def _make_plan(algorithm: Algorithm, columns: Mapping[str, Sequence[Any]], **options: Any) -> AlgorithmPlan:
    lengths = lengths_for(options.get("max_examples", AlgorithmPlan.max_examples), algorithm.method.needs)
    return AlgorithmPlan(trained=algorithm, columns=columns, lengths=lengths, **options)


def columns_of(clients: Clients) -> dict[str, list[Any]]:
    """Return the type and shape of each column."""
    return {name: [str(column.dtype), *map(int, column.shape[1:])] for name, column in clients.columns.items()}


@functools.lru_cache(maxsize=8)
def import_algorithm(name: str, source: Path | None) -> tuple[Algorithm, Clients | None]:
    """Return the algorithm, and the node's clients, of code that an operator names as `package.module:function`.

    The function is called with the node's own file; by the server with None, which uses only the algorithm.

    Raises:
      PlanError: there is no such function, or it does not return an algorithm and clients.
    """
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"--algorithm must be package.module:function (got {name!r}: {error})") from None
    try:
        code = make(source)
    except Exception as error:  # the function is not ours
        raise PlanError(f"{name}({source}) fails with {type(error).__name__}: {error}") from error
    if not isinstance(code, tuple) or len(code) != 2 or not isinstance(code[0], Algorithm):
        raise PlanError(f"{name} must return (algorithm, clients) (got {type(code).__name__})")
    return code
