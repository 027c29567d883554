import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.data import ratings as ratings_module
from fedrecon.data import Ratings, load_ratings


def ratings_of(values, users=None):
    users = np.arange(len(values)) % 3 if users is None else users
    columns = {"item": np.arange(len(values), dtype=np.int32), "rating": np.array(values, np.float32)}
    return Ratings.from_columns(columns, client=users, item_ids=np.arange(len(values)))


def test_a_summary_by_hand(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("user,item,rating\n1,1,1\n1,2,2\n2,1,2\n2,1,3\n3,1,x\n2,2,6\n")
    found = load_ratings(path, bad_rows="skip").describe()
    assert (found.users, found.items, found.ratings) == (2, 2, 4)
    assert (found.least, found.greatest, found.mean, found.density, found.whole) == (1.0, 6.0, 3.0, 1.0, True)
    assert found.deviation == pytest.approx(np.sqrt(14 / 4))  # of -2, -1, 0, 3
    assert found.skewness == pytest.approx((18 / 4) / (14 / 4) ** 1.5)
    assert found.skipped == {"bad_rows": 1, "unknown_items": 0, "duplicates": 1, "users_below_minimum": 0}
    assert found.sentence() == (
        "users: 2; items: 2; ratings: 4, 2.0 per user, 100 % of all pairs. Ratings go from 1 to 6, with mean 3 "
        "and standard deviation 1.871. Left out: bad rows (1), duplicates (1)."
    )


def test_a_summary_says_which_columns_were_recognised(tmp_path):
    (tmp_path / "a.csv").write_text("userId,item,stars\n1,1,1\n1,2,2\n")
    ratings = load_ratings(tmp_path / "a.csv")
    assert ratings.describe().sentence().endswith("Columns taken: 'userId' for user, 'stars' for rating.")
    named = load_ratings(tmp_path / "a.csv", user="userId", rating="stars")
    assert named.describe().sentence().endswith("Nothing was left out.")


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        (np.random.default_rng(0).integers(1, 6, 500), False),
        (np.random.default_rng(0).choice([1, 2, 3, 4, 5], 500, p=[0.02, 0.03, 0.05, 0.2, 0.7]), False),
        (np.rint(np.random.default_rng(0).lognormal(3, 1.5, 500)), True),
        (-np.random.default_rng(0).lognormal(3, 1.5, 500), False),
        (np.random.default_rng(0).lognormal(3, 1.5, 500) - 1, False),
        (np.full(50, 3.0), False),
    ],
    ids=["scale", "mostly five", "plays", "negative", "some negative", "all the same"],
)
def test_counts_are_recognised(values, counts):
    found = ratings_of(values).describe()
    assert found.are_counts == counts
    assert ("look like counts" in found.sentence()) == counts


def test_parts_of_the_users_are_described_by_their_own_ratings(monkeypatch):
    ratings = fr.data.synthetic_ratings(50, 40, 12, seed=1)
    some = ratings.take([3, 30, 7])
    monkeypatch.setattr(ratings_module, "USERS_PER_BLOCK", 2)
    found = some.describe()
    own = np.concatenate([client["rating"] for client in some]).astype(np.float64)
    assert (found.users, found.ratings) == (3, len(own))
    assert found.mean == pytest.approx(own.mean())
    assert found.deviation == pytest.approx(own.std())
    assert found.skewness == pytest.approx(((own - own.mean()) ** 3).mean() / own.std() ** 3)
    nobody = ratings.take([]).describe()
    assert (nobody.users, nobody.ratings, nobody.are_counts) == (0, 0, False)
