import numpy as np
import pytest

from fedrecon.data import Ratings, synthetic_ratings


@pytest.fixture(scope="module")
def full():
    return synthetic_ratings()


def test_the_default_has_the_shape_of_movielens_1m(full):
    assert isinstance(full, Ratings)
    assert (len(full), full.num_items) == (6040, 3706)
    assert 900_000 < full.num_examples < 1_100_000
    assert full.sizes.min() >= 20
    assert 85 < np.median(full.sizes) < 107
    assert 1_500 < full.max_size < 2_500
    popularity = np.sort(np.bincount(full.columns["item"], minlength=full.num_items))[::-1]
    assert 2_000 < popularity[0] < 4_000
    assert popularity[:370].sum() > 0.35 * full.num_examples
    assert {name: values.dtype.name for name, values in full.columns.items()} == {
        "item": "int32",
        "rating": "float32",
        "time": "int64",
    }


def test_ratings_are_whole_stars(full):
    assert np.unique(full.columns["rating"]).tolist() == [1, 2, 3, 4, 5]


def test_nobody_rates_an_item_twice(full):
    owner = np.repeat(np.arange(len(full)), full.sizes)
    assert len(np.unique(owner * full.num_items + full.columns["item"])) == full.num_examples


def test_time_increases_along_every_user(full):
    later = np.diff(full.columns["time"]) > 0
    within = np.ones(full.num_examples - 1, bool)
    within[full.ends[:-1] - 1] = False
    assert later[within].all()


def test_there_is_something_to_learn(full):
    """Item means, and then user means of the rest, explain a good part of the variance."""
    rating, item = full.columns["rating"].astype(float), full.columns["item"]
    owner = np.repeat(np.arange(len(full)), full.sizes)
    rest = rating - (np.bincount(item, rating) / np.maximum(np.bincount(item), 1))[item]
    rest -= (np.bincount(owner, rest) / np.bincount(owner))[owner]
    assert rest.std() < 0.95 * rating.std()


def test_one_seed_gives_one_data_set():
    small = {"num_users": 30, "num_items": 50, "mean_ratings": 12}
    assert synthetic_ratings(**small).fingerprint() == synthetic_ratings(**small).fingerprint()
    assert synthetic_ratings(**small).fingerprint() != synthetic_ratings(**small, seed=1).fingerprint()


@pytest.mark.parametrize(
    ("users", "items", "mean"), [(1, 1, 1), (5, 3, 100), (40, 60, 0.5), (200, 400, 30), (3, 2000, 25)]
)
def test_any_size_works(users, items, mean):
    ratings = synthetic_ratings(users, items, mean)
    assert len(ratings) == users
    assert ratings.sizes.min() >= 1
    assert ratings.max_size <= items
    assert ratings.columns["item"].max() < items


def test_the_mean_is_met_where_there_is_room():
    assert 27 < synthetic_ratings(4000, 1000, 30).sizes.mean() < 33


@pytest.mark.parametrize("wrong", [{"num_users": 0}, {"dim": 0}, {"noise": -1}, {"mean_ratings": 0}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
        synthetic_ratings(**wrong)
