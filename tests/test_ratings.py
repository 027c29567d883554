import gzip
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon.data import DataError, Ratings, RatingsSchema, load, load_ratings

CSV = "user,item,rating,time\n3,10,4.0,100\n1,20,3.5,90\n3,5,1.0,80\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="ratings.csv", encoding="utf-8"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
        return tmp_path / name

    return write


def triples(ratings):
    """(user, item, rating) of all examples in order, by original ids."""
    return [
        (str(name), str(ratings.item_ids[item]), float(rating))
        for name, client in zip(ratings.names, ratings, strict=True)
        for item, rating in zip(client["item"], client["rating"], strict=True)
    ]


EXPECTED = [("1", "20", 3.5), ("3", "10", 4.0), ("3", "5", 1.0)]


def test_a_clean_file_is_grouped_and_numbered_in_order_of_id(write):
    ratings = load_ratings(write(CSV))
    assert isinstance(ratings, Ratings)
    assert ratings.names.tolist() == [1, 3]
    assert ratings.item_ids.tolist() == [5, 10, 20]
    assert ratings[1]["item"].tolist() == [1, 0]
    assert ratings[1]["time"].tolist() == [100, 80]
    assert {name: values.dtype.name for name, values in ratings.columns.items()} == {
        "item": "int32",
        "rating": "float32",
        "time": "int64",
    }
    assert ratings.num_items == 3
    assert ratings.title(2) == "20"
    assert ratings.skipped == {"bad_rows": 0, "unknown_items": 0, "duplicates": 0, "users_below_minimum": 0}


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        CSV.replace(",", "\t"),
        CSV.replace(",", ";"),
        CSV.replace(",", "::"),
        CSV.replace("\n", "\r\n"),
        "\n\n" + CSV.replace("\n", "\n\n"),
        "\ufeff" + CSV,
        CSV.replace("user,item", '"user","item"').replace("3,10", '"3","10"'),
        CSV.split("\n", 1)[1],
        CSV.split("\n", 1)[1].replace(",", "::"),
        CSV.replace("3,10,", " 3 , 10 , "),
        "\n".join(",".join(line.split(",")[:3]) for line in CSV.splitlines()),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_the_usual_layouts_are_recognised(write, text):
    assert triples(load_ratings(write(text))) == EXPECTED


@pytest.mark.parametrize(("header", "has_time"), [("time", True), ("timestamp", True), ("when", False)])
def test_a_time_column_is_found_by_its_usual_names(write, header, has_time):
    path = write(CSV.replace("time", header))
    assert ("time" in load_ratings(path).columns) == has_time
    assert "time" in load_ratings(path, time=header).columns
    assert "time" not in load_ratings(path, time=None).columns


def test_columns_can_be_named_or_counted(write):
    path = write("when,stars,film,who\n1,4,7,2\n")
    by_name = load_ratings(path, user="who", item="film", rating="stars", time="when")
    assert triples(by_name) == [("2", "7", 4.0)]
    by_place = load_ratings(write("1,4,7,2\n", "b.csv"), user=3, item=2, rating=1, time=0)
    assert triples(by_place) == [("2", "7", 4.0)]


@pytest.mark.parametrize(
    "header",
    [
        "userId,movieId,rating,timestamp",
        "user_id,item_id,stars,time",
        "User,Item,Rating,Time",
        "uid,iid,r,Timestamp",
        "User-ID,ISBN,Book-Rating,time",
        "reviewerID,asin,overall,timestamp",
        "user_id,business_id,stars,time",
        "Customer ID,Product-ID,SCORE,time",
        "reader,ISBN,value,time",
        "account,Artist,Play Count,time",
    ],
)
def test_common_names_of_columns_are_recognised_in_all_forms(write, write_parquet, header):
    text = CSV.replace("user,item,rating,time", header)
    forms = [write(text), write(text.replace(",", "\t"), "a.tsv"), write(gzip.compress(text.encode()), "a.csv.gz")]
    values = [[3, 1, 3], [10, 20, 5], [4.0, 3.5, 1.0], [100, 90, 80]]
    forms.append(write_parquet(**dict(zip(header.split(","), values, strict=True))))
    for path in forms:
        ratings = load_ratings(path)
        assert ratings.fingerprint() == load_ratings(write(CSV, "plain.csv")).fingerprint()
        assert ratings.recognised["user"] == header.split(",")[0]


def test_the_name_that_was_asked_for_comes_before_common_ones(write):
    ratings = load_ratings(write("userId,user,movie,item,rating,stars\n1,2,3,4,5,6\n"))
    assert triples(ratings) == [("2", "4", 5.0)]
    assert ratings.recognised == {}


def test_two_columns_that_could_be_meant_are_an_error_that_names_both(write):
    path = write("user,movie,movieId,rating\n1,2,3,4\n")
    with pytest.raises(DataError, match=r"'movie' and 'movieId' could each be the item column; .* item=\.\.\."):
        load_ratings(path)
    assert triples(load_ratings(path, item="movieId")) == [("1", "3", 4.0)]


def test_a_column_that_was_named_for_something_else_is_not_taken_twice(write):
    ratings = load_ratings(write("user,item,score,value\n1,2,3,4\n"), time="value")
    assert (triples(ratings), ratings.columns["time"].tolist()) == ([("1", "2", 3.0)], [4])


def test_a_column_that_was_named_must_be_there(write):
    with pytest.raises(DataError, match="no column 'who', 'what'; it has: userId, item, rating"):
        load_ratings(write("userId,item,rating\n1,2,3\n"), user="who", item="what")


@pytest.mark.parametrize(
    ("text", "usual", "expected"),
    [
        ("who,user,item,rating\n1,2,3,4\n", {"user": "who"}, ("1", "3", 4.0)),
        ("user,item,rating\n1,2,3\n", {"user": "who"}, ("1", "2", 3.0)),
        ("userId,item,rating\n1,2,3\n", {"user": "who"}, ("1", "2", 3.0)),
        ("1,2,3\n", {"user": 1, "item": 0}, ("2", "1", 3.0)),
        ("user,item,rating\n1,2,3\n", {"user": 1, "item": 0}, ("1", "2", 3.0)),
        ("a,b,rating\n1,2,3\n", {"user": 1, "item": 0}, ("2", "1", 3.0)),
    ],
)
def test_usual_columns_are_taken_where_the_file_has_them(write, text, usual, expected):
    assert triples(load_ratings(write(text), schema=RatingsSchema(columns=usual))) == [expected]


def test_a_named_column_comes_before_the_usual_one(write):
    path = write("who,client,item,rating\n1,2,3,4\n")
    schema = RatingsSchema(columns={"user": "who"})
    assert triples(load_ratings(path, user="client", schema=schema)) == [("2", "3", 4.0)]


def test_ids_may_be_text(write):
    ratings = load_ratings(write("user,item,rating\nbo,tt2,4\nanna,tt1,3\n"))
    assert ratings.names.tolist() == ["anna", "bo"]
    assert ratings.item_ids.tolist() == ["tt1", "tt2"]
    assert ratings.index_of("bo") == 1


def test_ids_with_leading_zeros_stay_apart(write):
    ratings = load_ratings(write("user,item,rating\n1,007,4\n1,7,3\n"))
    assert ratings.item_ids.tolist() == ["007", "7"]


def test_a_header_can_be_declared(write):
    path = write("2019,item,rating\n1,2,3\n")
    assert len(load_ratings(path, user="2019", header=True)) == 1


def test_other_encodings_are_read(write):
    path = write("user,item,rating\nJosé,1,2\n", encoding="latin-1")
    assert load_ratings(path, encoding="latin-1").names.tolist() == ["José"]
    with pytest.raises(DataError, match=r"is not utf-8 text .* Name its encoding with encoding="):
        load_ratings(path)


def test_times_written_as_decimals_are_read(write):
    assert load_ratings(write("user,item,rating,time\n1,2,3,9.78e8\n"))[0]["time"].tolist() == [978_000_000]


# ---- what is refused, and how ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ratings.csv is empty"),
        (" \n\n", "ratings.csv is empty"),
        ("user,item,rating\n", "ratings.csv has no ratings."),
        (
            "a,b,c\n1,2,3\n",
            "ratings.csv: no column 'user', 'item', 'rating'; it has: a, b, c. "
            "Name it with user=..., item=..., rating=...",
        ),
        (
            "user,item,liked\n1,2,yes\n",
            "no column 'rating'; it has: user, item, liked. Name it with rating=...",
        ),
        (
            "user|item|rating\n",
            "cannot tell what separates fields in 'user|item|rating'; name it with delimiter=...",
        ),
        ("user,item,rating\n1,2,3\n1,3,x\n", "ratings.csv line 3: rating 'x' must be a finite number"),
        ("user,item,rating\n\n1,2,3\n\n1,3,\n", "ratings.csv line 5: rating '' must be a finite number"),
        ("user,item,rating\n1,2,nan\n", "ratings.csv line 2: rating 'nan' must be a finite number"),
        ("user,item,rating\n1,2,inf\n", "ratings.csv line 2: rating 'inf' must be a finite number"),
        ("user,item,rating\n1,2,3\n1,3\n", "ratings.csv line 3: expected at least 3 fields, but there are 2"),
        ("user,item,rating\n,2,3\n", "ratings.csv line 2: user '' must be a whole number or 1 to 200 characters"),
        ("user,item,rating\n1,,3\n", "ratings.csv line 2: item '' must be"),
        ("user,item,rating,time\n1,2,3,today\n", "ratings.csv line 2: time 'today' must be a finite number"),
        ("1::2::3::4\n1::3::x::5\n", "ratings.csv line 2: rating 'x' must be a finite number"),
        ('user,item,rating\na,"b\nc",3\na,d,x\n', "ratings.csv line 4: rating 'x' must be a finite number"),
        ('user,item,rating\n1,2,3\na,"' + "b" * 140_000, "ratings.csv after line 2: field larger than"),
        ("1,2\n3,4\n", "no column 2 for rating; its first line has 2 fields"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(write, text, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_ratings(write(text))


def test_a_name_needs_a_header(write):
    with pytest.raises(DataError, match="has no header line to find 'who' in; give a position, as in user=0"):
        load_ratings(write("1,2,3\n"), user="who")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv is not a file"):
        load_ratings(tmp_path / "none.csv")


@pytest.mark.parametrize("option", [{"duplicates": "all"}, {"bad_rows": "ignore"}])
def test_unknown_options_are_refused(write, option):
    with pytest.raises(ValueError, match="must be one of"):
        load_ratings(write(CSV), **option)


def test_bad_rows_can_be_skipped_and_are_counted(write):
    ratings = load_ratings(write(CSV + "1,2\n,5,3\n9,9,x\n9,9,nan\n"), bad_rows="skip")
    assert triples(ratings) == EXPECTED
    assert ratings.skipped["bad_rows"] == 4


def test_a_file_of_bad_rows_only_says_so(write):
    with pytest.raises(DataError, match="has no ratings left after leaving out bad rows \\(1\\)"):
        load_ratings(write("user,item,rating\n1,2,x\n"), bad_rows="skip")


# ---- duplicates, minimum, vocabulary ----

TWICE = "user,item,rating,time\n1,7,2,10\n1,8,3,11\n1,7,5,12\n2,7,1,13\n"


@pytest.mark.parametrize(
    ("duplicates", "expected", "times"),
    [
        ("last", [("1", "8", 3.0), ("1", "7", 5.0), ("2", "7", 1.0)], [11, 12, 13]),
        ("first", [("1", "7", 2.0), ("1", "8", 3.0), ("2", "7", 1.0)], [10, 11, 13]),
        ("mean", [("1", "8", 3.0), ("1", "7", 3.5), ("2", "7", 1.0)], [11, 12, 13]),
    ],
)
def test_one_of_several_ratings_counts(write, duplicates, expected, times):
    ratings = load_ratings(write(TWICE), duplicates=duplicates)
    assert triples(ratings) == expected
    assert ratings.columns["time"].tolist() == times
    assert ratings.skipped["duplicates"] == 1


def test_duplicates_can_be_refused(write):
    with pytest.raises(DataError, match=r"ratings\.csv: user 1 rates item 7 more than once"):
        load_ratings(write(TWICE), duplicates="error")


def test_small_users_are_left_out_with_their_items(write):
    ratings = load_ratings(write(CSV), min_ratings=2)
    assert ratings.names.tolist() == [3]
    assert ratings.item_ids.tolist() == [5, 10]
    assert ratings.skipped["users_below_minimum"] == 1


@pytest.mark.parametrize("vocabulary", [[20, 99, 5], ["20", "99", "5"]])
def test_items_can_be_numbered_as_in_a_saved_model(write, vocabulary):
    ratings = load_ratings(write(CSV), schema=RatingsSchema(vocabulary))
    assert ratings.num_items == 3
    assert [client["item"].tolist() for client in ratings] == [[0], [2]]
    assert ratings.skipped["unknown_items"] == 1


def test_a_vocabulary_needs_each_item_once(write):
    with pytest.raises(ValueError, match="must not list an item twice"):
        load_ratings(write(CSV), schema=RatingsSchema([5, 5]))


def test_unknown_items_only_says_so(write):
    with pytest.raises(DataError, match="has no ratings left after leaving out unknown items"):
        load_ratings(write(CSV), schema=RatingsSchema([1]))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 10)), min_size=1, max_size=30))
def test_the_last_rating_of_each_pair_survives_on_both_paths(tmp_path_factory, rows):
    lines = [f"{user},{item},{rating / 2}" for user, item, rating in rows]
    folder = tmp_path_factory.mktemp("rows")
    (folder / "fast.csv").write_text("\n".join(["user,item,rating", *lines]))
    (folder / "slow.csv").write_text("\n".join(["user,item,rating", *lines, "7,7,bad"]))
    fast = load_ratings(folder / "fast.csv")
    slow = load_ratings(folder / "slow.csv", bad_rows="skip")
    assert {(u, i): r for u, i, r in triples(fast)} == {(str(u), str(i)): r / 2 for u, i, r in rows}
    assert fast.fingerprint() == slow.fingerprint()


# ---- disk, Parquet, load ----


def test_ratings_survive_disk(write, tmp_path):
    ratings = load_ratings(write(CSV))
    ratings.save(tmp_path / "saved")
    opened = Ratings.open(tmp_path / "saved")
    assert triples(opened) == triples(ratings)
    assert (opened.skipped, opened.titles, opened.title(0)) == (ratings.skipped, None, "5")


def test_what_was_recognised_survives_disk(write, tmp_path):
    load_ratings(write(CSV.replace("user", "userId"))).save(tmp_path / "saved")
    assert Ratings.open(tmp_path / "saved").recognised == {"user": "userId"}


@pytest.fixture
def write_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    def write(**columns):
        parquet.write_table(pa.table(columns), tmp_path / "ratings.parquet")
        return tmp_path / "ratings.parquet"

    return write


def test_parquet_gives_the_same_as_text(write, write_parquet):
    path = write_parquet(user=[3, 1, 3], item=[10, 20, 5], rating=[4.0, 3.5, 1.0], time=[100, 90, 80])
    assert load_ratings(path).fingerprint() == load_ratings(write(CSV)).fingerprint()
    assert load(path).fingerprint() == load(write(CSV)).fingerprint()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"u": [1], "v": [1], "item": [1], "rating": [1.0]},
            "no column 'user'; it has: u, v, item, rating. Name it with user=",
        ),
        ({"user": [1], "item": [1], "rating": [np.nan]}, "ratings.parquet row 1: rating 'nan' must be a finite number"),
        (
            {"user": [1], "item": [1], "rating": ["x"]},
            "must be a finite number up to 3.4e+38 (column 'rating')",
        ),
        ({"user": [1], "item": [1], "rating": [None]}, "the rating column 'rating' must hold numbers (got null)"),
    ],
)
def test_a_bad_parquet_file_is_refused(write_parquet, columns, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_ratings(write_parquet(**columns))


def test_empty_and_non_finite_parquet_rows_can_be_skipped(write_parquet):
    path = write_parquet(user=[1, 1, None, 2], item=[1, 2, 3, 4], rating=[1.0, np.nan, 3.0, 4.0])
    ratings = load_ratings(path, bad_rows="skip")
    assert triples(ratings) == [("1", "1", 1.0), ("2", "4", 4.0)]
    assert ratings.skipped["bad_rows"] == 2


def test_a_file_that_is_not_parquet_is_refused(write):
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        load_ratings(write(CSV, "a.parquet"))


def test_an_unknown_name_lists_the_known_ones():
    names = "movielens-small, movielens-100k, movielens-1m, synthetic"
    with pytest.raises(DataError, match=f"nosuch is neither a file .*: {names}"):
        load("nosuch")


def test_synthetic_ratings_load_by_name():
    assert len(load("synthetic", num_users=5, num_items=30, mean_ratings=10)) == 5
