"""What the operator of a node decides, and the node made from it: for the command line and for a ClientApp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedrecon._src.deploy.algorithm_plan import AlgorithmPlan, bring
from fedrecon._src.deploy.holding import Holding, hold, read_holding
from fedrecon._src.deploy.memory import Memory
from fedrecon._src.deploy.node import Node
from fedrecon._src.deploy.node_keys import read_public_keys
from fedrecon._src.deploy.plan import Plan
from fedrecon._src.deploy.settings_plan import SettingsPlan
from fedrecon._src.recommend.config import Reading


class Operator(NamedTuple):
    """What the operator of a node decides.

    Attributes:
      source: the node's file.
      state: the folder where the node remembers what was accepted; by default the file's name plus .node.
      reading: how a ratings file is laid out.
      min_examples: users with fewer examples do not take part; the plan's minimum applies if it is larger.
      nodes: a folder with public keys of the nodes that the operator knows; None to trust the plan's list.
      algorithm: `package.module:function`, for plans of an algorithm made in Python.
    """

    source: Path
    state: Path | None = None
    reading: Reading = Reading()
    min_examples: int = 1
    nodes: Path | None = None
    algorithm: str | None = None

    @property
    def folder(self) -> Path:
        """Where the node remembers what was accepted."""
        return self.state or self.source.with_name(self.source.name + ".node")

    def node(
        self, accept: Callable[[Plan], bool], say: Callable[[str], None] = lambda text: None, key: Any = None
    ) -> Node:
        """Return the node.

        Args:
          accept: asks about a plan.
          say: called with a line about every round.
          key: the node's private key.
        """
        brought = None if self.algorithm is None else bring(self.algorithm, self.source)

        def read(plan: Plan) -> Holding:
            if isinstance(plan, AlgorithmPlan):
                assert brought is not None  # or the plan could not have been read
                assert brought.clients is not None
                found = hold(plan, brought.clients)
            else:
                assert isinstance(plan, SettingsPlan)
                found = read_holding(plan, self.source, self.reading, self.min_examples)
            train, valid, test = map(len, found.users)
            left = [f"{count:,} {what.replace('_', ' ')}" for what, count in found.skipped.items() if count]
            say(
                f"{self.source}: {train:,} {plan.task.people} train, {valid:,} validate, {test:,} test"
                + (f"; left out: {', '.join(left)}" if left else "")
            )
            return found

        return Node(
            read,
            accept,
            Memory(self.folder),
            say,
            algorithm=None if brought is None else brought.algorithm,
            key=key,
            known=None if self.nodes is None else read_public_keys(self.nodes),
        )
