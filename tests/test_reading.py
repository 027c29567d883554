"""What ratings files hold that is odd, large or made to do harm: pyarrow and rows give one result, or a sentence."""

import gzip
import io
import os
import re
import sys
import threading
import tracemalloc
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.app.cli import main
from fedrecon._src.data import sources as sources_module
from fedrecon._src.data.columns import find_columns
from fedrecon._src.data.ratings import read_columns
from fedrecon._src.data.sources import RowErrors
from fedrecon._src.data.tables import TextTable
from fedrecon.data import DataError, load, load_ratings

COLUMNS = {"user": "user", "item": "item", "rating": "rating", "time": "auto"}


@pytest.fixture
def write(tmp_path):
    def write(content, name="ratings.csv"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return write


# ---- pyarrow and rows one by one ----


def outcome(lines, monkeypatch, delimiter, chunk, arrow):
    """What is read from a file in small chunks, by pyarrow or row by row: rows, or an error."""
    with monkeypatch.context() as patch:
        patch.setattr(sources_module.read_text, "__defaults__", (chunk,))
        if not arrow:
            patch.setattr(TextTable, "_parse", lambda *_: None)
        try:
            table = TextTable(io.BytesIO("".join(lines).encode()), "f", delimiter=delimiter, header=True)
            errors = RowErrors("skip")
            columns, users, items = read_columns(table, find_columns(table, COLUMNS, {}), errors, None)
        except DataError as problem:
            return str(problem)
    columns |= {"user": users[columns["user"]], "item": items[columns["item"]]}
    return {name: (str(values.dtype), values.tolist()) for name, values in columns.items()}, errors.skipped["bad_rows"]


def listed(fields):
    return fields.split(" ")


IDS = [*listed("1 2 17 007 0 -0 -5 +5 1_0 a é x\u00a0 0x10 1.0 nan N/A null #1 \x1f \x00 \\"), "", " ", " 3 ", "\t7"]
IDS += ['"4"', '"a,b"', '"a""b"', '5" disk', '"open', "9" * 18, "9" * 19, "9" * 25, "a" * 201]
NUMBERS = [*listed("3 4.5 1e3 1e39 -1e39 1e400 nan inf -inf x 0x10 1_0 .5 5. +3 ٣ infinity NaN null"), "", " 2 ", '"1"']
NUMBERS += [*listed("3.4028236e38 1e-50 -0.0 1e --1 1d2 1,5 true"), "1" * 400]
TIMES = [*listed("0 978300760 9.78e8 -3 007 +4 -9007199254740993 0x1F nan 1_0 now 1e30"), "", " 5 "]
TIMES += ["1" * 19, "9" * 19, "1" * 400]
DATES = ["2024-01-11", "2024-01-11 10:00", "2024-01-11T10:00:00.999999", "1969-12-31 23:59:59.5", "2024-01-11T10:00Z"]
DATES += ["2024-01-11 10", "2024-01-11T1000", "9999-12-31 23:59:59.999999", "0000-01-01", "0001-01-01", "2024-02-30"]
DATES += ["2024-01-11T10:00+02:00", "2024-01-11T10:00:00.1234567", "20240111", "2024-W02-4", "2024-01-11 24:00"]
DATES += [
    "11.1.2024",
    "2024-1-1",
    "2024-01-11 10:60",
    "2024-01-11 10:00:60",
    "2024-01-11  10:00",
    "2024-01-11T",
    "2024-01-11Z",
]
ids, numbers, times = map(st.sampled_from, (IDS, NUMBERS, TIMES + DATES))
rows = st.lists(st.tuples(ids, ids, numbers, times), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(rows, st.sampled_from([",", ";", "\t", "::", " ", "|"]), st.integers(1, 60), st.booleans(), st.data())
def test_pyarrow_reads_the_same_as_rows_one_by_one(rows, delimiter, chunk, clean, data):
    lines = [delimiter.join(row) + "\n" for row in rows]
    if clean:  # mostly good rows, so that pyarrow has something to do
        good = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 5), st.integers(0, 10**9))
        lines = [
            delimiter.join(map(str, row)) + "\n" for row in data.draw(st.lists(good, min_size=3, max_size=9))
        ] + lines[:1]
    lines = [delimiter.join(COLUMNS).replace("auto", "time") + "\n", *lines]
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_rows, by_arrow = (outcome(lines, monkeypatch, delimiter, chunk, arrow) for arrow in (False, True))
    assert by_arrow == by_rows


@pytest.mark.parametrize("other", DATES)
@pytest.mark.parametrize("first", ["2024-01-11 10:00", "7"])
def test_pyarrow_reads_the_same_dates(first, other, monkeypatch):
    lines = ["user,item,rating,time\n", f"1,2,3,{first}\n", f"1,3,3,{other}\n"]
    assert outcome(lines, monkeypatch, ",", 60, True) == outcome(lines, monkeypatch, ",", 60, False)


def test_dates_are_seconds_of_utc(write):
    dates = ["2024-01-11", "2024-01-11 10:00", "2024-01-11T10:00Z", "2024-01-11T10:00+02:00", "1969-12-31 23:59:59.5"]
    lines = [f"1,{item},3,{when}" for item, when in enumerate(dates)]
    ratings = load_ratings(write("\n".join(["user,item,rating,timestamp", *lines])))
    assert ratings.columns["time"].tolist() == [1704931200, 1704967200, 1704967200, 1704960000, -1]


@pytest.mark.parametrize(
    ("time", "problem"), [("yesterday", "must be a finite number"), ("11.1.2024", "'11.1.2024' must be a date")]
)
def test_a_time_that_nobody_asked_for_says_how_to_turn_it_off(write, time, problem):
    path = write(f"user,item,rating,timestamp\n1,2,3,{time}\n1,3,4,5\n")
    with pytest.raises(DataError, match=f"line 2: .*{problem}.*load with time=None or bad_rows='skip'"):
        load_ratings(path)
    with pytest.raises(DataError, match=f"line 2: .*{problem}") as error:
        load_ratings(path, time="timestamp")
    assert "time=None" not in str(error.value)
    assert load_ratings(path, time=None).num_examples == 2


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("1,20,3.5,978300760\n2,20,0.5,978300761\n", ","),
        ('"1","20","3.5","978300760"\n', ","),
        ("1,20,3.5,978300760,extra\n", ","),
        ("\n1,20,3.5,978300760\n", ","),
        ('007,20,3.5,9\nann,tt1,3,9\né,1,3,9\n x y,"a, b",3,9\n', ","),
        ("1::2::3::4\n", "::"),
        ("1  2   3 4 \n", " "),
        ("1,2,3,2024-01-11\n1,3,3,2024-01-11 10:00:00.5\n", ","),
    ],
)
def test_pyarrow_reads_what_is_common(text, delimiter):
    table = TextTable(io.BytesIO(text.encode()), "f", delimiter=delimiter, header=False)
    batch = next(table.batches({"user": 0, "item": 1, "rating": 2, "time": 3}, RowErrors("error")))
    assert batch.lines is None


def test_chunks_of_any_size_give_the_same(write, monkeypatch):
    text = "user,item,rating\n" + "".join(f'u{k % 7},"i\n{k % 5}",{k % 4}\n' for k in range(60)) + "é,é,1"
    path = write(text)
    expected = load_ratings(path)
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(sources_module.read_text, "__defaults__", (size,))
        assert load_ratings(path).fingerprint() == expected.fingerprint()
        with pytest.raises(DataError, match=r"line 122: rating 'x' must be a finite number"):
            load_ratings(write(text.replace("é,é,1", "é,é,x"), "bad.csv"))


# ---- what is refused, and how ----


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("user,item,rating\n1,2,1e39\n", {}, "line 2: rating '1e39' must be a finite number up to 3.4e+38"),
        ("user,item,rating\n1,2," + "1" * 400 + "\n", {}, "line 2: rating '" + "1" * 50 + "' must be a finite number"),
        ("user,item,rating,rating\n1,2,3,4\n", {}, "has several columns 'rating', at 2 and 3"),
        ("user,item,rating,time\n1,2,3," + "9" * 19 + "\n", {}, "must be a number of seconds in 64 bits"),
        ("user,item,rating,time\n1,2,3,1e30\n", {}, "line 2: time '1e30' must be a finite number up to 9.2e+18"),
        ("user,item,rating\n1,2,3\n", {"encoding": "klingon"}, "`encoding` must be a text encoding"),
        ("user,item,rating\n1,2,3\n", {"encoding": "hex"}, "`encoding` must be a text encoding"),
        ("user,item,rating\n1,2,3\n", {"encoding": "unicode_escape"}, "`encoding` must be a text encoding"),
        ("user,item,rating\n1,2,3\n", {"encoding": "a\0b"}, "`encoding` must be a text encoding"),
        ("user,item,rating\n1,2,3\n", {"encoding": "utf-16"}, "is not utf-16 text"),
        ("user,item,rating\n1,2,3\n", {"delimiter": ""}, "`delimiter`"),
        ("user,item,rating\n1,2,3\n", {"delimiter": '"'}, "`delimiter`"),
        ("user,item,rating\n1,2,3\n", {"delimiter": "\n"}, "`delimiter`"),
        (",,,\n1,2,3\n", {}, "line 1 has only empty fields"),
        ("\n\n;;;\n1;2;3\n", {}, "line 3 has only empty fields"),
        ("user,item,rating\n1," + "x" * 20_000 + ",3\n", {}, "x' must be a whole number or 1 to 200 characters"),
        ("user,item,rating\na\0,2,3\n", {}, "line 2: user 'a\\x00' must be"),
        ("user,item,rating\n1,2,3\n", {"skip_lines": -1}, "`skip_lines`"),
        ("user,item,rating\n1,2,3\n", {"skip_lines": 9}, "is empty"),
        (b"user,item,rating\n1,2,3\n\xff", {}, "is not utf-8 text (invalid start byte at byte 23)"),
        ("user,item,rating\n1,2,3\n".encode("utf-16"), {}, "at byte 0). Name its encoding with encoding=..."),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00", {}, "ratings.csv is not a text file"),
        ("user;item;rating\n1;2;2,0\n", {}, "up to 3.4e+38, with a point for decimals"),
        ("user,item,rating\n1,2,\n", {}, "rating '' must be a finite number"),
        ("user,item,rating\n1,2,NaN\n", {}, "rating 'NaN' must be a finite number"),
        ('{"client": "a", "text": "b c"}\n', {}, "holds JSON objects; expected a table, one row per line"),
        ("user,item,count\n1,2,many\n", {"rating": "auto"}, "which was detected as the rating column"),
    ],
)  # fmt: skip
def test_odd_files_are_refused_with_a_sentence_that_names_them(write, content, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_ratings(write(content), **options)
    if not {"delimiter", "encoding", "skip_lines"} & set(options):
        assert "ratings.csv" in str(error.value)


def test_ratings_that_cannot_be_stored_are_counted_if_bad_rows_are_skipped(write):
    ratings = load_ratings(write("user,item,rating\n1,2,1e39\n1,3,4\n2,2,-1e39\n2,3,3e38\n"), bad_rows="skip")
    assert ratings.skipped["bad_rows"] == 2
    assert np.isfinite(ratings.columns["rating"]).all()


def test_a_column_named_twice_can_be_chosen_by_position(write):
    ratings = load_ratings(write("user,item,rating,rating\n1,2,3,4\n"), rating=3)
    assert ratings.columns["rating"].tolist() == [4.0]


def test_an_unwanted_column_may_be_there_twice(write):
    assert load_ratings(write("user,item,rating,note,note\n1,2,3,a,b\n")).num_examples == 1


# ---- what must stay small ----


def peak_of(work):
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as error:
            work()
        return tracemalloc.get_traced_memory()[1], str(error.value)
    finally:
        tracemalloc.stop()


def test_one_long_id_costs_its_own_length(write):
    rows = "".join(f"{k},{k % 9},3\n" for k in range(20_000))
    path = write("user,item,rating\n" + rows + "x" * 20_000 + ",1,3\n")
    peak, message = peak_of(lambda: load_ratings(path))
    assert "1 to 200 characters" in message
    assert peak < 50e6  # as text of fixed width it would be 1.6 GB
    ratings = load_ratings(path, bad_rows="skip")
    assert (len(ratings), ratings.skipped["bad_rows"]) == (20_000, 1)


def test_too_much_text_in_ids_is_refused_before_it_is_made(write, monkeypatch):
    monkeypatch.setattr("fedrecon._src.data.columns.MAX_ID_BYTES", 10_000)
    rows = "".join(f"u{k},1,3\n" for k in range(100))
    assert len(load_ratings(write("user,item,rating\n" + rows))) == 100
    with pytest.raises(DataError, match="101 different user ids, the longest of 150 characters"):
        load_ratings(write("user,item,rating\n" + rows + "x" * 150 + ",1,3\n"))


def test_one_leading_zero_does_not_turn_rows_into_text(write):
    rows = "".join(f"{k % 50},{k},3\n" for k in range(5_000))
    ratings = load_ratings(write("user,item,rating\n" + rows + "007,1,3\n"))
    assert ratings.names.dtype.kind == "U"
    assert ratings.item_ids.dtype == np.int64
    assert sorted(set(ratings.names)) == sorted({*map(str, range(50)), "007"})


def test_gzip_is_read_and_its_bombs_are_not(write, monkeypatch):
    text = "user,item,rating\n1,2,3\n"
    assert load_ratings(write(gzip.compress(text.encode()), "a.csv.gz")).num_examples == 1
    monkeypatch.setattr(sources_module, "ALWAYS_ALLOWED", 1 << 20)
    bomb = gzip.compress(text.encode() + b"\n" * 50_000_000)
    peak, message = peak_of(lambda: load_ratings(write(bomb, "a.csv.gz")))
    assert "unpacks to more than 100 times its size" in message
    assert peak < 60e6
    with pytest.raises(DataError, match="damaged or cut off"):
        load_ratings(write(gzip.compress(text.encode() * 99)[:-20], "a.csv.gz"))


def test_a_line_without_end_is_refused(write, monkeypatch):
    monkeypatch.setattr(sources_module, "LONGEST_LINE", 10_000)
    with pytest.raises(DataError, match="has a line of more than 10,000 characters"):
        load_ratings(write("user,item,rating\n1,2," + "3" * 20_000))


# ---- Parquet ----


@pytest.fixture
def write_table(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    def write(columns, **options):
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        parquet.write_table(table, tmp_path / "a.parquet", **options)
        return tmp_path / "a.parquet"

    return write


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1], "item": [1], "rating": [1e39]}, "row 1: rating '1e+39' must be a finite number up to 3.4e+38"),
        ({"user": [1], "item": [1], "rating": [1.0], "time": [1e30]}, "row 1: time '1e+30' must be"),
        ({"user": [[1]], "item": [1], "rating": [1.0]}, "column 'user' must hold whole numbers or text (got list"),
        ({"user": [1.5], "item": [1], "rating": [1.0]}, "row 1: user '1.5' must be a whole number"),
        ({"user": ["x" * 300], "item": [1], "rating": [1.0]}, "1 to 200 characters"),
        ({"user": [b"x"], "item": [1], "rating": [1.0]}, "column 'user' must hold whole numbers or text (got binary"),
        ({"user": [True], "item": [1], "rating": [1.0]}, "column 'user' must hold whole numbers or text (got bool"),
        ({"user": [], "item": [], "rating": []}, "has no ratings"),
    ],
)  # fmt: skip
def test_odd_parquet_files_are_refused(write_table, columns, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_ratings(write_table(columns))


def test_parquet_takes_dates_and_whole_numbers_that_pandas_made_floats(write_table):
    import pyarrow as pa

    dates = pa.array([1_000_000_500, 2_000_000_000], pa.timestamp("ms"))
    ratings = load_ratings(write_table({"user": [1.0, 2.0], "item": ["b", "a"], "rating": [1, 2], "time": dates}))
    assert ratings.names.tolist() == [1, 2]
    assert ratings.item_ids.tolist() == ["a", "b"]
    assert ratings.columns["time"].tolist() == [1_000_000, 2_000_000]


@pytest.mark.parametrize(
    ("dates", "expected"),
    [
        (["2024-01-11 10:00", "2024-01-11"], [1704967200, 1704931200]),
        (["2024-01-11T10:00Z", "2024-01-11T10:00+02:00"], [1704967200, 1704960000]),
        ([date(2024, 1, 11), date(1970, 1, 1)], [1704931200, 0]),
    ],
)
def test_parquet_takes_dates_of_text_and_days(write_table, dates, expected):
    table = {"user": [1, 1], "item": [1, 2], "rating": [1.0, 2.0], "timestamp": dates}
    assert load_ratings(write_table(table)).columns["time"].tolist() == expected


def test_a_parquet_time_that_nobody_asked_for_says_how_to_turn_it_off(write_table):
    path = write_table({"user": [1], "item": [1], "rating": [1.0], "time": ["yesterday"]})
    with pytest.raises(DataError, match=r"row 1: time 'yesterday' .*load with time=None"):
        load_ratings(path)
    assert "time" not in load_ratings(path, time=None).columns
    path = write_table({"user": [1, 1], "item": [1, 2], "rating": [1.0, 1.0], "time": [1, None]})
    with pytest.raises(DataError, match=r"row 2: time '' must be .*time=None or bad_rows='skip'"):
        load_ratings(path)


def test_parquet_with_a_column_twice_or_far_too_many_rows_is_refused(write_table):
    import pyarrow as pa

    twice = pa.table([[1], [1], [1.0], [2.0]], names=["user", "item", "rating", "rating"])
    with pytest.raises(DataError, match="several columns 'rating'"):
        load_ratings(write_table(twice))
    many = np.ones(20_000_000, np.int8)
    path = write_table({"user": many, "item": many, "rating": many})
    assert path.stat().st_size < 500_000
    with pytest.raises(DataError, match="declares 20,000,000 rows in"):
        load_ratings(path)


def test_one_long_text_in_parquet_is_not_made_a_column(write_table):
    import pyarrow as pa

    names = pa.DictionaryArray.from_arrays(np.arange(60_000, dtype=np.int32) % 2, ["u1", "x" * 20_000])
    path = write_table({"user": names, "item": list(range(60_000)), "rating": [1.0] * 60_000})
    peak, message = peak_of(lambda: load_ratings(path))
    assert "1 to 200 characters" in message
    assert peak < 50e6


# ---- pipes, standard input, lines to skip ----

TEXT = "user,item,rating\n1,2,3\n2,3,4\n"


def test_pipes_are_read_like_files(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(TEXT), daemon=True)
    writer.start()
    ratings = load(pipe)
    writer.join()
    assert ratings.fingerprint() == load(write(TEXT)).fingerprint()


@pytest.mark.parametrize("form", ["text", "gzip", "parquet"])
def test_standard_input_is_read_like_a_file(write, write_table, monkeypatch, form):
    path = write(TEXT)
    expected = load(path).fingerprint()
    if form == "gzip":
        path = write(gzip.compress(TEXT.encode()), "a.gz")
    elif form == "parquet":
        path = write_table({"user": [1, 2], "item": [2, 3], "rating": [3.0, 4.0]})
    with path.open("r") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert load("-").fingerprint() == expected


def test_lines_before_the_header_can_be_skipped(write):
    path = write("# made by us\nuser;1;2\n\nuser,item,rating\n1,2,3\n1,3,x\n")
    assert load_ratings(path, skip_lines=2, bad_rows="skip").num_examples == 1
    with pytest.raises(DataError, match=r"line 6: rating 'x'"):
        load_ratings(path, skip_lines=3)


@pytest.mark.slow
def test_commands_read_standard_input(tmp_path, monkeypatch, capsys):
    rows = [f"{user},{item},{1 + (user * item) % 5}" for user in range(30) for item in range(8) if (user + item) % 3]
    path = tmp_path / "a.csv"
    path.write_text("user,item,rating\n" + "\n".join(rows))
    run = str(tmp_path / "run")
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["train", "-", "--out", run, "--rounds", "2", "--model.dim", "2"]) == 0
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["recommend", run, "--ratings", "-", "--user", "1", "-n", "1"]) == 0
    assert "for user 1" in capsys.readouterr().out
