"""Round zero for clicks: item counts and a spectral start of the item embeddings, from sums over users only.

With X the users by items, n the items of a user and c the users of an item, the start is the leading eigenvectors of
`S'S`, where `S = diag(n)^-1/2 X diag(c)^-1/4`. Subspace iteration finds them: the server sends an orthonormal basis Q,
a user adds to each own row i `c_i^-1/4 / n * sum_k c_k^-1/4 Q_k` over own items k, and the server orthonormalises the
sum. The last sum also has the eigenvalues, as those of `Q'S'SQ`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from fedrecon._src.core.checks import check_number, check_rules
from fedrecon._src.core.clients import Clients, rows_of
from fedrecon._src.recommend.estimate import Question, StateError
from fedrecon._src.recommend.round_zero import RoundZero

PASSES = 4
START_LENGTH = 0.5  # root mean square length of an embedding, over clicks
USERS_AT_ONCE = 4096
COUNT, PRODUCT = "item_count", "product"


class SpectralState(NamedTuple):
    """What a server knows between questions.

    Attributes:
      answered: how many questions were answered.
      item_count: `(items,)` how many users have each item.
      basis: `(items, dim)`, orthonormal columns.
      values: `(dim,)` eigenvalues, the largest first; zeros before the last answer.
    """

    answered: int
    item_count: np.ndarray
    basis: np.ndarray
    values: np.ndarray

    @property
    def done(self) -> bool:
        """Whether all questions were answered."""
        return self.answered > PASSES

    @property
    def num_examples(self) -> int:
        """How many examples all clients have."""
        return round(float(self.item_count.sum()))

    @property
    def item_embedding(self) -> np.ndarray:
        """Where training starts, `(items, dim)`, after the last answer; its first columns are the start in fewer."""
        items = self.item_count[:, None] ** 0.25 * self.basis * np.sqrt(self.values)
        clicks = self.item_count / max(self.num_examples, 1)
        length = np.sqrt(clicks @ (items**2).sum(1))
        return (items * (START_LENGTH / max(float(length), 1e-12))).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class SpectralStart(RoundZero):
    """The questions of round zero for clicks, with exact sums.

    Attributes:
      dim: the number of eigenvectors.
      seed: of the first basis.

    Example:
      >>> import fedrecon as fr
      >>> clicks = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)
      >>> zero = fr.recommend.SpectralStart(num_items=20, dim=4)
      >>> state = zero.start()
      >>> while not state.done:
      ...     state = zero.advance(state, zero.answer(state, clicks))
      >>> state.item_embedding.shape
      (20, 4)
    """

    dim: int
    seed: int = 0

    description = "sums over users by item (counts, and the products of a spectral start)"

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_number("dim", self.dim, least=1, most=self.num_items)
        if self.noised:
            raise ValueError("`noise_multiplier` cannot be used: round zero for clicks adds no noise")

    @property
    def questions(self) -> tuple[Question, ...]:
        """All questions, in order."""
        products: list[Question] = ["product"] * PASSES
        return ("counts", *products)

    @property
    def numbers_per_item(self) -> int:
        """How many numbers for each item the largest message has."""
        return self.dim + 1

    def start(self) -> Any:
        """Return the state before anything is asked."""
        drawn = np.random.default_rng(self.seed).normal(size=(self.num_items, self.dim)).astype(np.float32)
        return SpectralState(0, np.zeros(self.num_items), _orthonormal(drawn), np.zeros(self.dim))

    def answer(self, state: Any, clients: Clients) -> dict[str, np.ndarray]:
        """Return the sum of clients' answers to the next question.

        Args:
          state: what the server sent.
          clients: with a column `item`.
        """
        item = np.asarray(clients.columns["item"])[rows_of(clients.starts, clients.ends)]
        if state.answered == 0:
            return {COUNT: np.bincount(item, minlength=self.num_items).astype(np.float64)}
        owner = np.repeat(np.arange(len(clients)), clients.sizes)
        scale = np.where(state.item_count > 0, np.maximum(state.item_count, 1) ** -0.25, 0.0)
        size = np.maximum(clients.sizes, 1) ** -0.5
        values = (scale[item] * size[owner]).astype(np.float32)
        matrix = scipy.sparse.csr_matrix((values, (owner, item)), (len(clients), self.num_items))
        total = np.zeros((self.num_items, self.dim))
        for begin in range(0, len(clients), USERS_AT_ONCE):
            part = matrix[begin : begin + USERS_AT_ONCE]
            total += part.T @ (part @ state.basis)
        return {PRODUCT: total}

    def zeros(self, answered: int) -> dict[str, np.ndarray]:
        """Return the sum over no clients after `answered` questions, in the shapes of all others."""
        check_number("answered", answered, most=PASSES)
        return {PRODUCT: np.zeros((self.num_items, self.dim))} if answered else {COUNT: np.zeros(self.num_items)}

    def advance(self, state: Any, total: Mapping[str, Any], noise: float | None = None) -> Any:
        """Return the next state.

        Args:
          state: the last one.
          total: the sum of all clients' answers to it.
          noise: none.
        """
        if state.answered == 0:
            return state._replace(answered=1, item_count=np.rint(np.asarray(total[COUNT], np.float64)))
        product = np.asarray(total[PRODUCT], np.float64)
        if state.answered < PASSES:
            return state._replace(answered=state.answered + 1, basis=_orthonormal(product))
        small = state.basis.T @ product
        values, rotation = np.linalg.eigh((small + small.T) / 2)
        basis = state.basis @ rotation[:, ::-1]
        return state._replace(
            answered=state.answered + 1, basis=basis.astype(np.float32), values=np.maximum(values[::-1], 0.0)
        )

    def to_tree(self, state: Any) -> dict[str, np.ndarray]:
        """Return a state as named arrays."""
        return {**state._asdict(), "answered": np.asarray(state.answered, np.float64)}

    def from_tree(self, tree: Mapping[str, np.ndarray], start: Any) -> Any:
        """Undo `to_tree`, for arrays that have its shapes."""
        number = int(np.nan_to_num(tree["answered"]))
        positive = (tree["item_count"] >= 0).all() and (tree["values"] >= 0).all()
        rules = {
            "the state of round zero has non-finite values": all(np.isfinite(leaf).all() for leaf in tree.values()),
            "the state of round zero has invalid values": 1 <= number <= PASSES + 1 and positive,
        }
        check_rules(rules, StateError)
        return start._replace(**{**tree, "answered": number})

    def describe(self, result: Any) -> str:
        """Return a sentence about a result."""
        occupied = int((result.item_count > 0).sum())
        return f"round zero: {result.num_examples:,} clicks on {occupied:,} of {self.num_items:,} items"


def estimate_clicks(clients: Clients, num_items: int, dim: int) -> SpectralState:
    """Run round zero of clicks over all clients in this process, and return its last state.

    Args:
      clients: with a column `item`.
      num_items: item ids are 0 to `num_items - 1`.
      dim: the number of eigenvectors, at most the number of items.

    Example:
      >>> import fedrecon as fr
      >>> clicks = fr.data.synthetic_ratings(num_users=60, num_items=20, seed=0)
      >>> fr.recommend.estimate_clicks(clicks, 20, dim=4).num_examples == clicks.num_examples
      True
    """
    zero = SpectralStart(num_items=num_items, dim=dim)
    state = zero.start()
    while not state.done:
        state = zero.advance(state, zero.answer(state, clients))
    return state


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    return np.linalg.qr(columns)[0].astype(np.float32)
