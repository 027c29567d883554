"""`fedrecon recommend`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Ge

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.settings import NonNegativeInt, OtherReading


@dataclass(frozen=True, kw_only=True)
class Recommend:
    """Recommend items to the users of a file.

    Reconstructs each user's parameters and ranks the items that they have not rated or do not have. Needs only a saved
    model, not the training data.
    Example: fedrecon recommend runs/mine --ratings my-ratings.csv --user 17 -n 5

    Attributes:
      run: the folder of a run, or of a saved model.
      ratings: for a model of ratings, the users' own ratings, with item ids as in training.
      clicks: for a model of clicks, what the users have, with item ids as in training.
      user: whom to recommend to, by the ids in the file; by default all users of the file.
      top: how many items to recommend.
      least_ratings: recommend only items that at least this many training users have rated or have; by default as in
        training.
      titles: a text file with the columns item and title, to show titles instead of ids.
      json: print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    ratings: Path | None = None
    clicks: Path | None = None
    user: tuple[str, ...] = ()
    top: Annotated[int, Ge(1), tyro.conf.arg(aliases=("-n",))] = 10
    least_ratings: NonNegativeInt | None = None
    titles: Path | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    data: OtherReading = field(default_factory=OtherReading)

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        missing = self.ratings is None and self.clicks is None
        yield Rule(missing, "ratings", "is missing, or --clicks for a model of clicks")


parse = partial(options.parse, Recommend, "recommend")


def run(args: Recommend) -> int:
    """Recommend and print."""
    from fedrecon._src.app.experiment import with_columns
    from fedrecon._src.core.display import silent
    from fedrecon._src.data import Ratings
    from fedrecon._src.recommend.saved_models import open_for
    from fedrecon._src.recommend.serving import Recommender
    from fedrecon._src.recommend.tasks import CLICKS, RATINGS
    from fedrecon._src.recommend.tasks.ratings import with_titles

    model = open_for(RATINGS, args.run, CLICKS)
    file = options.file_of_task(args.run, model.task.name, {"ratings": args.ratings, "clicks": args.clicks})
    assert file is not None  # or `rules` had refused it
    if args.titles is not None:
        model = dataclasses.replace(model, legend=with_titles(model.legend, args.titles))
    config, reading = with_columns(model.config, args.run, args.data)
    ratings = model.task.read(config, model.legend, file, reading, silent).clients
    assert isinstance(ratings, Ratings)
    show.left_out(ratings.skipped)
    if args.user:
        try:
            ratings = ratings.take([ratings.index_of(name) for name in args.user])
        except KeyError as problem:
            raise ValueError(f"{file}: {problem.args[0]}") from None
    assert ratings.names is not None  # a ratings file names its users
    advice = Recommender(model).recommend(ratings, args.top, least_ratings=args.least_ratings)
    everyone: list[dict[str, Any]] = []
    verb = "rated" if model.task.name == "ratings" else "clicked"
    for name, size, items in zip(ratings.names, ratings.sizes, advice, strict=True):
        best = [{**item._asdict(), "rating": round(item.rating, 4)} for item in items]
        everyone.append({"user": name.item(), verb: int(size), "recommendations": best})
    if none := sum(not entry["recommendations"] for entry in everyone):
        least = model.config.model.least_ratings if args.least_ratings is None else args.least_ratings
        reason = f"no other item was {verb} by {least} training users or more; try a lower --least-ratings"
        show.remark(f"users without recommendations: {none} of {len(everyone)}; {reason}")
    if args.json:
        print(json.dumps({"users": everyone, "left_out": dict(ratings.skipped)}))
        return 0
    for entry in everyone:
        if entry["recommendations"]:
            title = f"for user {entry['user']}, {model.task.examples}: {entry[verb]:,}"
            show.recommendations(title, entry["recommendations"])
    return 0
