"""`python -m studies`: run a study, all rows and figures, next to the paper's numbers."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedrecon._src.core.display import bars
from studies.runner import Plan, reproduce

STUDIES = ("movielens", "text", "privacy", "ranking", "recommendation", "expressions", "relatives")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study and print where its report is. A study that was stopped continues where it stopped."""
    parser = argparse.ArgumentParser("python -m studies", description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument(
        "--data",
        required=True,
        help="movielens-1m, or a MovieLens zip or folder; for text: JSON lines (client, time, text), a federated Stack "
        "Overflow database, a Posts.xml, or a folder prepared from one; for recommendation: a folder of files; for "
        "expressions: a table of user, expression and count; for relatives: a folder with ml-1m.zip, blogs.jsonl.gz "
        "and tweets.jsonl.gz",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results, report.md, report.html, figures/")
    parser.add_argument(
        "--scale",
        choices=("two-cores", "paper"),
        default="two-cores",
        help="for text: a small model and few rounds, or the paper's sizes, for an accelerator",
    )
    parser.add_argument("--quick", action="store_true", help="one seed and fewer rounds")
    parser.add_argument("--only", nargs="+", default=(), help="rows or figures to run")
    parser.add_argument("--tune", action="store_true", help="first try the grids of settings on validation clients")
    parser.add_argument("--seeds", type=int, help="how many seeds; by default 3 for movielens, 1 for the others")
    parser.add_argument("--page", type=Path, help="also write the report to this file, with figures/ next to it")
    parser.add_argument("--workers", type=int, help="jobs to run at a time; by default one per core")
    args = parser.parse_args(argv)
    module = importlib.import_module(f"studies.{args.study}")
    study = module.PAPER_STUDY if args.study == "text" and args.scale == "paper" else module.STUDY
    try:
        plan = Plan(
            data=args.data,
            folder=args.out,
            seeds=study.seeds if args.seeds is None else args.seeds,
            quick=args.quick,
            only=tuple(args.only),
            tune=args.tune,
            page=args.page,
            workers=args.workers,
        )
        path = reproduce(study, plan, log=lambda line: print(line, file=sys.stderr, flush=True), progress=bars)
    except (ValueError, OSError) as error:
        print(f"studies: {error}", file=sys.stderr)
        return 1
    print(f"report: {path} and {path.with_suffix('.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
