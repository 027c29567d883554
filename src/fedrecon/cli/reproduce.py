"""`fedrecon reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedrecon.cli import options, show


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a study of the paper, all rows and figures with three seeds, next to the paper's numbers.

    Leaves report.md, report.html and figures/ in the folder. A study that was stopped goes on where it stopped.
    Example: fedrecon reproduce movielens --data ml-1m.zip --out study

    Attributes:
      study: which study.
      data: movielens-1m, or the path of a MovieLens zip or folder.
      out: the folder for results and report.
      quick: one seed and fewer rounds of everything.
      only: rows or figures to run; the names of files in rows/ and figures/.
      tune: first try the grids of learning rates on validation users; results in tune.json and in the report.
      seeds: how many seeds.
      page: also write the report without pictures to this file.
    """

    study: Annotated[Literal["movielens"], tyro.conf.Positional]
    data: str
    out: Path
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    only: tuple[str, ...] = ()
    tune: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    seeds: int = 3
    page: Path | None = None


def parse(argv: Sequence[str]) -> Reproduce:
    """Parse the options."""
    return options.parse(Reproduce, "reproduce", argv)


def run(args: Reproduce) -> int:
    """Run the study and say where its report is."""
    from fedrecon.progress import bars
    from fedrecon.studies.movielens import STUDY
    from fedrecon.studies.reproduce import Plan, reproduce

    plan = Plan(args.data, args.out, args.seeds, args.quick, args.only, args.tune, args.page)
    path = reproduce(STUDY, plan, say=show.remark, progress=bars)
    print(f"report: {path} and {path.with_suffix('.html')}")
    return 0
