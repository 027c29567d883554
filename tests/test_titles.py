import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.app.cli import main
from fedrecon.data import DataError, load_titles, unique_labels


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_titles_are_read_by_item(tmp_path):
    text = 'item,title\n7,"Alien, the first"\nx9,\n\nx9,Brazil\nz,\n'
    assert load_titles(write(tmp_path / "a.csv", text)) == {"7": "Alien, the first", "x9": "Brazil"}
    other = write(tmp_path / "b.txt", "year::name::id\n1979::Alien::7\n")
    assert load_titles(other, item="id", title=1) == {"7": "Alien"}


def test_items_may_have_another_common_name(tmp_path):
    (tmp_path / "movies.csv").write_text("movieId,Title\n1,Alien\n")
    assert load_titles(tmp_path / "movies.csv") == {"1": "Alien"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("item,name\n1,a\n", "no column 'title'; it has: item, name"),
        ("item,title,title\n1,a,b\n", "several columns 'title', at 1 and 2"),
        ("item,title\n1\n", "line 2: expected at least 2 fields, but there are 1"),
        ("item,title\n,a\n", "line 2: item '' must be"),
        ('item,title\n1,"' + "a" * 200_000, "is a quote left open?"),
        ('{"item": 1, "title": "a"}\n', "holds JSON objects; expected a table, one row per line"),
    ],
)
def test_a_bad_file_of_titles_is_refused_with_a_sentence(tmp_path, text, message):
    with pytest.raises(DataError, match=re.escape(message)) as error:
        load_titles(write(tmp_path / "titles.csv", text))
    assert "titles.csv" in str(error.value)
    with pytest.raises(DataError, match="is not a file; expected a table \\("):
        load_titles(tmp_path / "none.csv")


def test_only_repeated_titles_get_their_id():
    assert unique_labels(["Hamlet", "Brazil", "Hamlet", ""], [1, 2, 3, 4]) == [
        "Hamlet [1]",
        "Brazil",
        "Hamlet [3]",
        "4",
    ]
    with pytest.raises(ValueError, match=r"same length \(got 2 and 1\)"):
        unique_labels(["a", "b"], [1])


@given(st.lists(st.sampled_from(["", "a", "a [0]", "a [1]", "a [0] [0]", "1", "2"]), max_size=6))
def test_labels_are_different_whatever_titles_are(titles):
    labels = unique_labels(titles, range(len(titles)))
    assert len(set(labels)) == len(titles)


@pytest.mark.slow
def test_recommendations_name_ones_own_items(tmp_path, capsys):
    rows = [f"{user},{item},{1 + (user * item) % 5}" for user in range(30) for item in range(8) if (user + item) % 3]
    ratings = write(tmp_path / "ratings.csv", "\n".join(["exported today", "user,item,rating", *rows]))
    titles = write(tmp_path / "items.csv", "item,title\n" + "".join(f"{k},film [{k % 4}]\n" for k in range(8)))
    run, skip = str(tmp_path / "run"), ["--data.skip-lines", "1"]
    options = ["--rounds", "2", "--model.dim", "2", "--titles", str(titles), *skip]
    assert main(["train", str(ratings), "--out", run, *options]) == 0
    capsys.readouterr()
    command = ["recommend", run, "--ratings", str(ratings), "--user", "1", "-n", "3", *skip]
    assert main([*command, "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["users"][0]["recommendations"]
    assert [item["title"] for item in items] == [f"film [{item['item'] % 4}] [{item['item']}]" for item in items]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert all(item["title"] in printed for item in items)
    write(titles, "item,title\nother,x\n")
    assert main(["train", str(ratings), "--out", str(tmp_path / "other"), *options]) == 1
    assert "has no title for any item" in capsys.readouterr().err
