"""`fedrecon reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedrecon._src.app.cli import options, show


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a study of the paper, all rows and figures, next to the paper's numbers.

    Writes report.md, report.html and figures/. A study that was stopped continues where it stopped.
    Examples: fedrecon reproduce movielens --data ml-1m.zip --out study;
    fedrecon reproduce text --data blogs.jsonl.gz --out study;
    fedrecon reproduce privacy --data ml-1m.zip --out study;
    fedrecon reproduce ranking --data ml-1m.zip --out study

    Attributes:
      study: which study.
      data: for movielens, privacy and ranking: movielens-1m, or the path of a MovieLens zip or folder; for text: a file
        of JSON lines (client, time, text), a federated Stack Overflow database, a Posts.xml, or a folder prepared from
        one.
      out: the folder for results and report.
      scale: for text: two-cores (a small model and few rounds) or paper (the paper's sizes, for an accelerator).
        MovieLens always has the paper's.
      quick: one seed and fewer rounds of everything.
      only: rows or figures to run; the names of files in rows/ and figures/.
      tune: first try the grids of settings on validation clients; results in tune.json and in the report.
      seeds: how many seeds; by default 3 for movielens, 1 for the others.
      page: also write the report to this file, and its pictures to a folder figures/ beside it.
      workers: how many jobs to run at a time; by default one per core, or a single one if there is an accelerator.
    """

    study: Annotated[Literal["movielens", "text", "privacy", "ranking"], tyro.conf.Positional]
    data: str
    out: Path
    scale: Literal["two-cores", "paper"] | None = None
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    only: tuple[str, ...] = ()
    tune: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    seeds: int | None = None
    page: Path | None = None
    workers: int | None = None


def parse(argv: Sequence[str]) -> Reproduce:
    """Parse the options."""
    return options.parse(Reproduce, "reproduce", argv)


def run(args: Reproduce) -> int:
    """Run the study and say where its report is."""
    from studies import movielens, text
    from studies.reproduce import Plan, reproduce

    from fedrecon._src.core.progress import bars
    from fedrecon._src.storage.parts import held_study

    study = movielens.STUDY
    if args.study == "text":
        study = text.PAPER_STUDY if args.scale == "paper" else text.STUDY
    elif args.study in ("privacy", "ranking"):
        from studies import privacy, ranking

        study = privacy.STUDY if args.study == "privacy" else ranking.STUDY
        if args.scale is not None:
            raise options.UsageError(f"--scale is {args.scale}; the {args.study} study has one scale only")
    elif args.scale == "two-cores":
        raise options.UsageError("--scale is two-cores; the movielens study has the paper's scale only")
    seeds = study.seeds if args.seeds is None else args.seeds
    plan = Plan(args.data, args.out, seeds, args.quick, args.only, args.tune, args.page, args.workers)
    study.choose(args.only)  # a name that is wrong should leave no folder behind
    with held_study(args.out):
        path = reproduce(study, plan, say=show.remark, progress=bars)
    print(f"report: {path} and {path.with_suffix('.html')}")
    return 0
