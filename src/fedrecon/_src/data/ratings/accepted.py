"""Which ratings a trained model takes: those of the scale that it was trained on, and a little beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Accepted(NamedTuple):
    """Ratings that a model takes.

    Attributes:
      least: no rating is below.
      most: no rating is above.
      low: where the scale begins, for messages.
      high: where it ends.
    """

    least: float
    most: float
    low: float
    high: float

    def has(self, rating: Any) -> Any:
        """Return for every rating whether it is taken, in single precision, as ratings are stored.

        Args:
          rating: a number or an array of them.
        """
        rating = np.asarray(rating, np.float32)
        return (rating >= self.least) & (rating <= self.most)

    def why_not(self, rating: float) -> str:
        """Say what is wrong with a rating that is not taken.

        Args:
          rating: a number.
        """
        ends = f"{self.low:.6g} to {self.high:.6g}" if np.isfinite(self.high) else f"{self.low:.6g} or more"
        return f"rating {rating:.9g} is outside of the scale that the model was trained on, {ends}"
