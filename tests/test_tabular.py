import importlib
import importlib.util

import numpy as np
import optax
import pytest

import fedrecon as fr
from fedrecon._src.core import tabular
from fedrecon._src.core.tabular import read_csv, to_arrays, to_arrow


def frame_columns(frame):
    return to_arrays(to_arrow(frame), "the data frame")


COLUMNS = {"user": ["b", "a", "b"], "item": [3, 4, 5], "rating": [1.5, 2.0, 3.0]}


def frames():
    """Every kind of data frame whose package is installed."""
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    found = [pandas.DataFrame(COLUMNS), pandas.DataFrame(COLUMNS).astype({"item": "Int64"}), pyarrow.table(COLUMNS)]
    if importlib.util.find_spec("polars"):
        found.append(importlib.import_module("polars").DataFrame(COLUMNS))
    return found


@pytest.mark.parametrize("frame", frames(), ids=lambda frame: f"{type(frame).__module__.split('.')[0]}")
def test_data_frames_of_all_kinds_become_the_same_clients(frame):
    clients = fr.Clients.from_dataframe(frame)
    assert clients.names.tolist() == ["a", "b"]
    assert clients[1]["item"].tolist() == [3, 5]
    assert clients[1]["rating"].tolist() == [1.5, 3.0]
    expected = fr.Clients.from_columns({name: np.array(values) for name, values in COLUMNS.items()}, client="user")
    assert clients.fingerprint() == expected.fingerprint()
    some = fr.Clients.from_dataframe(frame, client="item", columns=["rating"])
    assert list(some.columns) == ["rating"]
    assert some.names.tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="has no column 'who'; it has: user, item, rating"):
        fr.Clients.from_dataframe(frame, client="who", columns=[])


def test_one_column_is_no_data_frame():
    with pytest.raises(ValueError, match=r"`frame` must be a data frame .*got Series"):
        fr.Clients.from_dataframe(frames()[0]["item"])


def test_items_that_are_text_must_be_numbered_and_the_error_says_how():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"user": [1, 1, 2, 2], "item": list("xyxz"), "rating": [1.0, 2.0, 3.0, 4.0]})
    descent = fr.gradient_descent(optax.sgd(0.1), batch_size=2)

    def train(frame, model):
        algorithm = fr.federated_reconstruction(model, reconstruct=descent, update=descent, server=optax.sgd(1.0))
        return fr.train(algorithm, fr.Clients.from_dataframe(frame), rounds=1)

    model = fr.models.matrix_factorization(3, dim=2)
    for one in (model, model._replace(lookups={})):
        with pytest.raises(
            ValueError, match=r"'item', which holds text, not .* Number them from 0 first: ids, numbers"
        ):
            train(frame, one)
    ids, frame["item"] = np.unique(frame["item"], return_inverse=True)
    assert ids.tolist() == ["x", "y", "z"]
    assert train(frame, model).rounds == 1


def test_dates_become_seconds_and_lists_rows():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"time": pandas.to_datetime(["1970-01-02T00:00", "1970-01-01T00:01"]), "x": [[1, 2], [3, 4]]}
    )
    columns = frame_columns(frame)
    assert columns["time"].tolist() == [86_400, 60]
    assert columns["x"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1.0, None]}, "column 'a' has 1 empty"),
        ({"a": ["x", None]}, "column 'a' has 1 empty"),
        ({"a": [[1], [1, 2]]}, "column 'a' must hold"),
        ({"a": [{}, {}]}, "`frame`|column 'a'"),
        ({"a": ["x", 1]}, "`frame`"),
    ],
)
def test_what_cannot_be_a_column_is_refused(columns, message):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=message):
        frame_columns(pandas.DataFrame(columns))


def test_columns_must_be_told_apart_and_frames_be_frames():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"`frame`|several columns 'a'"):
        frame_columns(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(ValueError, match="`frame`"):
        frame_columns(3)


def test_one_long_text_is_refused_before_it_becomes_a_column(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "MAX_TEXT_BYTES", 10_000)
    path = tmp_path / "a.csv"
    path.write_text("user,x\n" + "a,1\n" * 100)
    assert read_csv(path, ",", None)["user"].tolist() == ["a"] * 100
    path.write_text("user,x\n" + "a,1\n" * 100 + "b" * 100 + ",1\n")
    with pytest.raises(ValueError, match=r"a\.csv: column 'user' has an entry of 100 characters"):
        read_csv(path, ",", None)
    path.write_text("user,x\na,1\nb\n")
    with pytest.raises(ValueError, match=r"a\.csv cannot be read: .* Expected 2 columns, got 1"):
        read_csv(path, ",", {"x": str})


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 10)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        fr.Clients.from_parquet(tmp_path / "a.parquet")


def test_damage_to_saved_clients_is_found_when_they_are_opened(tmp_path):
    clients = fr.Clients.from_columns({"x": np.arange(100.0)}, client=np.arange(100) % 7)
    clients.save(tmp_path / "saved")
    for file in sorted((tmp_path / "saved").glob("*.npy")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=rf"{file.name} is damaged: its content is not what was written"):
            fr.Clients.open(tmp_path / "saved")
        file.write_bytes(content[:-1])
        with pytest.raises(ValueError, match=rf"{file.name} is damaged: it has"):
            fr.Clients.open(tmp_path / "saved")
        file.write_bytes(content)
    assert fr.Clients.open(tmp_path / "saved").fingerprint() == clients.fingerprint()
