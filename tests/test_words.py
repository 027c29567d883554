import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrecon._src.data.sentences import word_hash
from fedrecon.data import split_text


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\t ", []),
        ("Hello World", ["hello world"]),
        ("One. Two! Three? Four", ["one .", "two !", "three ?", "four"]),
        ("one line\nanother\r\nthird", ["one line", "another", "third"]),
        ("i slept. then i woke", ["i slept .", "then i woke"]),
        ('He said "go." Then left. (Or not.) End', ['he said " go . "', "then left .", "( or not . )", "end"]),
        ("So... it goes on... But here not", ["so ... it goes on ...", "but here not"]),
        ("wait.... what… no.. yes", ["wait ... what ... no ... yes"]),
        ("It's rock'n'roll, well-known; 'quoted'", ["it's rock'n'roll , well-known ; ' quoted '"]),
        ("It’s “fine”", ['it\'s " fine "']),
        ("what?!! no!!!! ,,, a--b", ["what ? !", "no !", ", a - b"]),
        ("3.5 or 1,000 and C++", ["3 . 5 or 1 , 000 and c +"]),
        ("snake_case stays", ["snake_case stays"]),
        ("see http://a.b/c?d=1. And (www.x.com/y)!", ["see <URL> .", "and ( <URL> ) !"]),
        ("literally <URL>", ["literally < url >"]),
        ("naïve café e\u0301", ["naïve café é"]),
        ("नमस्ते दुनिया", ["नमस्ते दुनिया"]),
        ("中文，好。", ["中文 ， 好 。"]),
        ("fine 👍👍 \u200bok\ufeff so\xadft", ["fine 👍 ok soft"]),
        ("half \ud83d a pair, a\x00b", ["half a pair , ab"]),
        ("İstanbul ΣΑΣ", ["i̇stanbul σας"]),
    ],
)
def test_text_becomes_sentences_of_words(text, sentences):
    assert split_text(text) == [sentence.split(" ") for sentence in sentences]


@given(st.text())
def test_words_are_never_empty_and_can_be_written_to_a_file_of_lines(text):
    for sentence in split_text(text):
        assert sentence
        for word in sentence:
            assert word.encode("utf-8").decode("utf-8").split() == [word]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("fedrecon", 1117940090),  # printf fedrecon | b2sum -l 32 gives 7a69a2c2, read from the right, without 1 bit
        ("jax", 2132677045),
        ("naïve", 920363459),
        ("中文", 599231293),
        ("<URL>", 1926362796),
    ],
)
def test_the_hash_of_a_word_is_the_same_everywhere(word, value):
    assert word_hash(word) == value


@given(st.text())
def test_a_hash_has_31_bits(word):
    assert 0 <= word_hash(word) < 2**31
