"""The settings of ranking that settings of ratings do not have: its model, and what of a file counts as a click."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from fedrecon._src.app.settings import MOST_ROUNDS, MOST_WIDTH, check_number


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The model: an item's score is the product of its embedding (global) and a user's (local), which is reconstructed
    by least squares over all items: 1 for what the user has, 0 for all else at a lower weight.

    Attributes:
      dim: length of the embeddings.
      unobserved: the weight of an item that a user does not have; one that they have weighs 1.
      ridge: the penalty on a user's embedding.
      prior: the server's ridge on item embeddings, against the sum over all clicks.
      init_scale: item embeddings start normal, with lengths of about this.
      second_order: differentiate through the reconstruction.
      both_ways: run every user twice in a round, the second time with support and query exchanged.
      counts: ignore, or log: an item weighs 1 + log(count), for counts of 1 and more.
      least_ratings: recommend only items that at least this many training users have.
    """

    dim: int = 64
    unobserved: float = 0.4
    ridge: float = 1.0
    prior: float = 10.0
    init_scale: float = 0.4
    second_order: bool = True
    both_ways: bool = True
    counts: Literal["ignore", "log"] = "ignore"
    least_ratings: int = 1
    at_least: tyro.conf.Suppress[float | None] = None  # copied from the data's: it also applies to other files

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("dim", self.dim, least=1, most=MOST_WIDTH)
        for name in ("unobserved", "ridge", "init_scale"):
            check_number(f"model.{name}", getattr(self, name), above=True)
        check_number("model.prior", self.prior)
        check_number("model.least_ratings", self.least_ratings, most=MOST_ROUNDS)
