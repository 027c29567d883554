"""Tables that can be read in only one way are read without options, and errors name column, value and rule."""

import dataclasses
import logging

import pytest

from fedrecon._src.data.columns import MissingColumnsError
from fedrecon._src.recommend.settings import Scale
from fedrecon._src.recommend.tasks.ratings import _say_scale
from fedrecon.data import DataError, load_ratings


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "a.txt").write_text(text)
        return tmp_path / "a.txt"

    return write


@pytest.mark.parametrize("delimiter", [None, " "])
@pytest.mark.parametrize(
    "text",
    [
        "user  item   rating\n1     2      3\n10    20     4.5\n",
        "  user item   rating \n  1 2   3 \n 10  20 4.5",
        "1   2  3\n10 20  4.5\n",
        '"user" item  rating\n1 "2"  3\n10 20 "4.5"\n',
    ],
)
def test_columns_may_be_separated_by_runs_of_spaces(write, text, delimiter):
    ratings = load_ratings(write(text), delimiter=delimiter)
    assert ratings.names.tolist() == [1, 10]
    assert ratings.item_ids.tolist() == [2, 20]
    assert ratings.columns["rating"].tolist() == [3.0, 4.5]


def test_quoted_fields_keep_their_spaces(write):
    ratings = load_ratings(write('user  item  rating\n"ann b"  7  3\nbob 8 4\n'))
    assert ratings.names.tolist() == ["ann b", "bob"]


def test_two_columns_are_users_and_items(write, caplog):
    path = write("visitor,page\nann,/a\nann,/b\nbob,/a\n")
    with caplog.at_level(logging.INFO, logger="fedrecon"):
        clicks = load_ratings(path, rating="auto")
    assert clicks.names.tolist() == ["ann", "bob"]
    assert clicks.item_ids.tolist() == ["/a", "/b"]
    assert clicks.columns["rating"].tolist() == [1.0, 1.0, 1.0]
    assert clicks.recognised == {"user": "visitor", "item": "page"}
    assert "'page' for item" in caplog.text
    with pytest.raises(MissingColumnsError, match="or pass rating=None") as error:
        load_ratings(path)
    assert error.value.fields == ("rating",)


@pytest.mark.parametrize("name", ["Hours", "Feedback"])
def test_the_only_numeric_column_that_is_left_is_the_rating(write, name):
    ratings = load_ratings(write(f"user,item,{name},note\nann,x,2.5,good\nbob,x,4,\n"))
    assert ratings.columns["rating"].tolist() == [2.5, 4.0]
    assert ratings.recognised == {"rating": name}
    assert f"{name!r} for rating" in ratings.describe().sentence()


def test_several_numeric_columns_leave_the_choice_open(write):
    with pytest.raises(MissingColumnsError, match="rating="):
        load_ratings(write("user,item,Hours,Year\nann,x,2.5,1999\n"))


def test_a_column_that_is_left_is_not_taken_for_a_rating_of_clicks(write):
    clicks = load_ratings(write("user,item,Year\nann,x,1999\n"), rating="auto")
    assert clicks.columns["rating"].tolist() == [1.0]


def test_labels_in_a_numeric_column_name_column_value_and_rule(write):
    with pytest.raises(DataError, match=r"line 3: rating 'good' must be .* up to 3.4e\+38 \(column 'stars'\)"):
        load_ratings(write("user,item,stars\nann,x,5\nann,y,good\n"))
    with pytest.raises(DataError, match=r"line 2: rating 'good' must be .* up to 3.4e\+38 \(column 2\)"):
        load_ratings(write("1,1,5\n1,2,good\n"))


def test_a_detected_time_column_can_be_ignored(write):
    path = write("user,item,rating,timestamp\nann,x,5,yesterday\n")
    with pytest.raises(DataError, match=r"column 'timestamp', which was detected as the time column.*time=None"):
        load_ratings(path)
    assert "time" not in load_ratings(path, time=None).columns


def test_the_scale_prints_as_people_know_it():
    scale = Scale(mean=5.0, deviation=2.0, low=1.0004, high=9.999)
    assert "between 1 and 10." in _say_scale(scale)
    assert "between 0.5 and 4.5." in _say_scale(dataclasses.replace(scale, low=0.5, high=4.5))


def test_data_frames_are_tables_too():
    pandas = pytest.importorskip("pandas")
    columns = {"userId": ["b", "a"], "movie": [3, 4], "stars": [1.5, 2.0], "time": ["2024-01-11", "2024-01-12"]}
    expected = load_ratings(columns).fingerprint()
    assert load_ratings(pandas.DataFrame(columns)).fingerprint() == expected
    with pytest.raises(DataError, match=r"row 2: rating '' must be a finite number up to 3.4e\+38 \(column 'stars'\)"):
        load_ratings({**columns, "stars": [1.5, None]})
