import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.app.cli import main, show
from fedrecon._src.core.display import lay_out, listed_counts, plain, readable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Alien [1979]", "Alien [1979]"),
        ("[bold]loud[/bold] [/foo] [tags]", "[bold]loud[/bold] [/foo] [tags]"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1b(Bb\x1bcc", "abc"),
        ("two\nlines\tand\r\nmore", "two lines and more"),
        ("bell\x07 back\x08 nul\x00", "bell back nul"),
        ("\u202eevil\u2066", "evil"),
        ("half \ud800", "half "),
        ("Amélie 天空 🎬", "Amélie 天空 🎬"),
        ("\x1b", ""),
        ("\x1b[", ""),
    ],
)
def test_terminals_are_shown_text_and_given_no_commands(text, shown):
    assert plain(text) == shown


@given(st.text(st.characters(), max_size=60))
def test_nothing_that_is_left_can_be_a_command(text):
    shown = plain(text)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in shown)
    assert plain(shown) == shown
    shown.encode()


def test_a_long_row_of_escapes_takes_no_time_to_speak_of():
    assert plain("\x1b]" * 200_000 + "\x1b[" * 200_000) == ""


def test_tables_print_titles_as_they_are(capsys):
    titles = ["[/foo]", "[tags] and [bold]", ":smile:", "\x1b[31mred", "two\nlines"]
    show.table("what [/they] say", ("title", "[n]"), [(title, "1") for title in titles])
    printed = capsys.readouterr().out
    for expected in ("what [/they] say", "[/foo]", "[tags] and [bold]", ":smile:", "red", "two lines", "[n]"):
        assert expected in printed
    assert "\x1b" not in printed


def test_errors_print_names_from_files_without_escapes(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("\x1b[31mevil,[/foo],c\n1,2,3\n")
    assert main(["train", str(tmp_path / "a.csv"), "--out", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().err
    assert "it has: evil, [/foo], c" in printed
    assert "\x1b" not in printed


def test_plain_tables_are_aligned():
    assert lay_out([("a", "n"), ("bb", "10")], right=True) == ["a    n", "--  --", "bb  10"]


def test_counts_of_nothing_are_not_listed():
    assert listed_counts({"bad_rows": 1, "unknown_items": 0, "duplicates": 3}) == "bad rows (1), duplicates (3)"
    assert listed_counts({"bad_rows": 0}) == ""


@pytest.mark.parametrize(
    ("value", "digits", "told"),
    [
        (0.0, 4, "0"),
        (-0.0, 4, "0"),
        (10.0, 4, "10"),
        (0.5, 4, "0.5"),
        (0.91283, 4, "0.9128"),
        (3.2999, 2, "3.3"),
        (160.2, 2, "160"),
        (12345.6, 4, "12,346"),
        (-3.14159, 3, "-3.14"),
        (1e-9, 4, "1e-09"),
        (float("nan"), 4, "nan"),
    ],
)
def test_numbers_are_written_as_a_person_would(value, digits, told):
    assert readable(value, digits) == told
