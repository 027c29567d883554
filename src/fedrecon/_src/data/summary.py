"""What a data set of ratings looks like, in numbers and in one paragraph."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedrecon._src.core.clients import rows_of
from fedrecon._src.core.display import readable, say_left_out
from fedrecon._src.data.columns import describe_columns

if TYPE_CHECKING:
    from fedrecon._src.data.ratings import Ratings

COUNTS_SKEWNESS = 2.0  # ratings on a scale stay below; plays, clicks and purchases are far above
USERS_PER_BLOCK = 1 << 13  # whose ratings are in memory at a time


@dataclass(frozen=True)
class Summary:
    """What ratings look like.

    Attributes:
      users: how many users there are.
      items: how many items there are.
      ratings: how many ratings there are.
      least: the lowest rating.
      greatest: the highest rating.
      mean: the mean of all ratings.
      deviation: their standard deviation.
      skewness: their third standardised moment: 0 if they are symmetric, large if a few are far above the others.
      density: the share of all pairs of a user and an item that is rated.
      whole: whether all ratings are whole numbers.
      skipped: how many rows, items or users loading left out, by reason.
      recognised: the columns that were recognised, by what they are for.

    Example:
      >>> import fedrecon as fr
      >>> summary = fr.data.load_ratings({"user": [1, 1, 2], "item": [1, 2, 1], "rating": [1, 2, 6]}).describe()
      >>> summary.mean, summary.are_counts
      (3.0, False)
      >>> summary.sentence()
      'users: 2; items: 2; ratings: 3, ...'
    """

    users: int
    items: int
    ratings: int
    least: float
    greatest: float
    mean: float
    deviation: float
    skewness: float
    density: float
    whole: bool
    skipped: Mapping[str, int]
    recognised: Mapping[str, str] = field(default_factory=dict)

    @property
    def are_counts(self) -> bool:
        """Whether these look like plays, clicks or purchases: nothing negative, and a few far above the others."""
        return self.least >= 0 and self.skewness > COUNTS_SKEWNESS

    def sentence(self, counts: bool = True) -> str:
        """Describe the ratings in one paragraph.

        Args:
          counts: say so if they look like counts; False if the caller says it.
        """
        per_user = self.ratings / max(1, self.users)
        text = (
            f"users: {self.users:,}; items: {self.items:,}; ratings: {self.ratings:,}, {per_user:.1f} per user, "
            f"{100 * self.density:.3g} % of all pairs. "
            f"Ratings go from {readable(self.least, 6)} to {readable(self.greatest, 6)}, "
            f"with mean {readable(self.mean)} and standard deviation {readable(self.deviation)}."
        )
        if counts and self.are_counts:
            text += f" These look like counts rather than ratings on a scale (skewness {self.skewness:.1f})."
        text += f" {say_left_out(self.skipped)}"
        return " ".join(filter(None, (text, describe_columns(self.recognised))))


def summarize(ratings: "Ratings") -> Summary:
    """Describe ratings, those of some users in memory at a time."""
    users, count = len(ratings), ratings.num_examples
    sums = [(v.min(), v.max(), v.sum(), (v == np.rint(v)).all()) for v in _blocks(ratings)]
    least, greatest, total, whole = map(np.array, zip(*sums or [(np.nan, np.nan, np.nan, True)], strict=True))
    mean = total.sum() / max(1, count)
    moments = [(((v - mean) ** 2).sum(), ((v - mean) ** 3).sum()) for v in _blocks(ratings)] or [(np.nan, np.nan)]
    second, third = np.sum(moments, 0) / max(1, count)
    deviation = float(np.sqrt(second))
    return Summary(
        users=users,
        items=ratings.num_items,
        ratings=count,
        least=float(least.min()),
        greatest=float(greatest.max()),
        mean=float(mean),
        deviation=deviation,
        skewness=0.0 if deviation == 0 else float(third / deviation**3),
        density=count / max(1, users * ratings.num_items),
        whole=bool(whole.all()),
        skipped=dict(ratings.skipped),
        recognised=dict(ratings.recognised),
    )


def _blocks(ratings: "Ratings") -> Iterator[np.ndarray]:
    """Yield the ratings of some users at a time."""
    for first in range(0, len(ratings), USERS_PER_BLOCK):
        users = slice(first, first + USERS_PER_BLOCK)
        values = ratings.columns["rating"][rows_of(ratings.starts[users], ratings.ends[users])]
        if len(values):
            yield np.asarray(values, np.float64)
