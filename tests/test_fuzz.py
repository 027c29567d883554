"""Damaged files of every kind: a loader gives a result or a sentence, in bounded time and memory."""

import os
import resource
from collections import Counter

import pytest

from fedrecon.data import prepare_text
from fuzz_loaders import TARGETS, run_case, run_corpus_case

CASES = int(os.environ.get("FEDRECON_FUZZ_CASES", "25"))
MOST_MEMORY = 600_000  # kB that all cases of a loader may take beyond what was there


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_give_a_result_or_a_sentence(name, tmp_path):
    before, outcomes = peak(), Counter()
    for number in range(CASES):
        try:
            outcomes[run_case(name, number, tmp_path)] += 1
        except Exception as problem:
            raise AssertionError(f'run_case("{name}", {number}, folder): {problem!r}') from problem
    assert peak() - before < MOST_MEMORY
    assert set(outcomes) <= {"result", "sentence"}
    assert outcomes["sentence"], "no case was refused: the damage does nothing"


def test_damage_to_a_prepared_corpus_is_found(tmp_path):
    path = tmp_path / "posts.jsonl"
    path.write_text("\n".join(f'{{"client": "c{k % 9}", "text": "word{k % 5} and word{k % 3}."}}' for k in range(60)))
    prepare_text(path, tmp_path / "good")
    outcomes = Counter(run_corpus_case(number, tmp_path / "good", tmp_path) for number in range(2 * CASES))
    assert outcomes["sentence"] > CASES
