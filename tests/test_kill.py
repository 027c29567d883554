"""A few kills of a training; `make kill` does more."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_training_that_is_killed_again_and_again_loses_nothing():
    script = Path(__file__).parent / "kill.py"
    done = subprocess.run([sys.executable, script, "--kills", "6", "--seed", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all with the same bits") == 2
