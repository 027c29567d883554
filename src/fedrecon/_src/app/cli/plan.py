"""`fedrecon plan`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Gt, Le

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Config, ConfigError, change_settings
from fedrecon._src.recommend.settings import Data, NonNegativeInt, PositiveInt, Source


@dataclass(frozen=True, kw_only=True)
class MakePlan(options.TaskOptions):
    """Write a plan for training over several nodes.

    Attributes:
      out: the folder for the plan.
      share: the share of a node's users that train in a round.
      least_users: a node sends only sums over at least this many users.
      least_nodes: the server learns only from sums over at least this many nodes.
      users: with --privacy options, about how many users all nodes have together.
      secure: hide every node's sum from the server, which learns only the total. Needs --least-nodes 2 or more.
      nodes: the folder with public keys of the nodes (*.pub). With --secure, each node then signs its keys, and the
        others accept only nodes in this folder.
    """

    out: Path
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    least_users: PositiveInt = 1
    least_nodes: PositiveInt = 1
    users: NonNegativeInt = 0
    secure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    nodes: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PlanItems(MakePlan):
    """Write a plan for training over several nodes that have ratings or clicks.

    Attributes:
      items: a CSV file that lists all items, with the column item and optionally title. Nodes leave out other items.
      item_column: header of the column with item ids.
      title_column: header of the column with titles.
    """

    items: Path
    item_column: str = "item"
    title_column: str = "title"


class PlanRatings(PlanItems):
    """Make the plan of a training over several nodes that have ratings: everything that server and nodes agree on. A
    plan names no data; every node brings its own file. Example: fedrecon plan --items catalogue.csv --out plan
    """


class PlanClicks(PlanItems):
    """Make the plan of a training over several nodes that have clicks, plays or purchases: everything that server and
    nodes agree on. A plan names no data; every node brings its own file. Example: fedrecon plan --task clicks --items
    catalogue.csv --out plan
    """


@dataclass(frozen=True, kw_only=True)
class PlanText(MakePlan):
    """Make the plan of a training over several nodes that have text: everything that server and nodes agree on. A plan
    names no data; every node brings its own file. Example: fedrecon plan --task text --words words.txt --out plan

    Attributes:
      words: the vocabulary: a text file with one word per line, the most used first.
    """

    words: Path


# Every node has its own data, and titles are a column of --items.
HIDDEN = ((Source, "source"), (Data, "titles"), (Config, "sampling"), (Config, "patience"))
NOT_IN_PLANS: options.Marks = dict.fromkeys(HIDDEN, (tyro.conf.Suppress,))
INSTEAD = {
    "--sampling": "use --share, the participation rate of a node's users",
    "--patience": "a deployment always trains for --rounds rounds",
}
COMMANDS: dict[str, type[MakePlan]] = {"ratings": PlanRatings, "clicks": PlanClicks, "text": PlanText}


def parse(argv: Sequence[str]) -> MakePlan:
    """Parse the options of the task."""
    for option in (re.split("[.=]", argument)[0] for argument in argv):
        if option in INSTEAD:
            raise options.UsageError(f"{option} is for simulations; {INSTEAD[option]}")
    default = options.default_config("plan", argv)
    files = {"data.source": "", **({"data.titles": None} if isinstance(default.data, Data) else {})}
    default = change_settings(default, files)
    command = COMMANDS[default.task]
    required = {"words" if command is PlanText else "items": tyro.MISSING}
    start = command(settings=default, out=tyro.MISSING, **required)
    return options.parse(command, "plan", argv, default=start, marks=NOT_IN_PLANS)


def run(args: MakePlan) -> int:
    """Write the plan and describe it."""
    from fedrecon._src.deploy.admission import read_public_keys
    from fedrecon._src.deploy.plan import PlanError, describe
    from fedrecon._src.deploy.settings_plan import make_plan
    from fedrecon._src.recommend.tasks.ratings import read_items
    from fedrecon._src.recommend.tasks.text import read_words

    config = args.settings
    if isinstance(args, PlanItems):
        legend: Any = read_items(args.items, args.item_column, args.title_column)
    else:
        assert isinstance(args, PlanText)
        legend = read_words(args.words, config.model.vocabulary, config.model.oov_buckets)
    names = ("share", "least_users", "least_nodes", "secure", "users")
    nodes = () if args.nodes is None else read_public_keys(args.nodes)
    try:
        plan = make_plan(config, legend, nodes=nodes, **{name: getattr(args, name) for name in names})
    except PlanError as problem:
        if isinstance(problem.__cause__, ConfigError):  # which names a setting, and so an option
            raise problem.__cause__ from None
        raise
    plan.save(args.out)
    show.table(f"a plan, saved in {args.out}", ("", ""), describe(plan), texts=(0, 1))
    show.following(f"serve {shlex.quote(str(args.out))} --out RUN --keys KEYS")
    join = "fedrecon join FILE --server https://HOST:8000 --ca ca.crt --key NODE.key"
    print(f"on every node: {join} --accept {plan.digest[:16]}")
    print("make the keys with fedrecon keys; to try it out on one machine, use --insecure instead")
    return 0
