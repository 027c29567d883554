"""The command line: finds the command, parses its options, and turns errors into sentences."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from fedrecon._version import __version__

COMMANDS = {  # a module of this package each, with `parse(argv)` and `run(options) -> exit code`
    "train": "train a model, of ratings or text, whose personal parameters never leave the clients",
    "tune": "find settings for one's own ratings on validation users",
    "evaluate": "measure a trained model on clients it has never met",
    "recommend": "recommend items to the users of a ratings file",
    "complete": "suggest next words to a person, their own words among them",
    "bundle": "write what reconstructs and predicts without Python or JAX, or check such a folder",
    "page": "serve a bundle's page on this machine and open it in the browser",
    "demo": "train on real ratings, compare with baselines, recommend: under a minute",
    "privacy": "plan the noise that a privacy budget takes",
    "plan": "agree on a training over several nodes that keep their data",
    "keys": "make the keys and certificates of a server and its nodes",
    "server": "train a plan over nodes, which keep their data",
    "node": "take part in a server's training with a file that stays here",
    "reproduce": "run a study of the paper: its rows and figures, next to its numbers",
}
FAILED = 3  # the exit code of a training or evaluation that went wrong for more than a few
BUG = 70
HELP = """\
usage: fedrecon COMMAND [OPTIONS]

Partially local federated learning: train the global part of a model, reconstruct the local part on the client.

commands:
{commands}

examples:
  fedrecon train movielens-small --out runs/small
  fedrecon recommend runs/small --ratings my-ratings.csv -n 5
  fedrecon train posts.jsonl.gz --task text --out runs/words
  fedrecon complete runs/words --text my-mail.txt --prompt "see you"

fedrecon COMMAND --help tells all about a command.
fedrecon --version prints the version; --debug with any command shows where an error came from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 if all is well, 1 for an error, 2 for wrong use, 3 for a training that failed, 70 for a fault of fedrecon's own,
    130 for Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("FEDRECON_DEBUG", "") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())), end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"fedrecon {__version__}")
        return 0
    if args[0] not in COMMANDS:
        return _fail(f"there is no command {args[0]!r}; there are: {', '.join(COMMANDS)}", 2)
    command = importlib.import_module(f"fedrecon.app.cli.{args[0]}")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return command.run(command.parse(args[1:]))
    except SystemExit as leaving:  # how a help text ends, and some errors of use
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever reads our output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as problem:
        if debug:
            traceback.print_exc()
        return _fail(*_sentence(problem))


def _sentence(problem: Exception) -> tuple[str, int]:
    """Say what went wrong and with which exit code."""
    from fedrecon.app.cli.options import UsageError

    if isinstance(problem, UsageError):
        return str(problem), 2
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror, 1
    if isinstance(problem, ValueError):
        return str(problem), 1
    if isinstance(problem, RecursionError):
        return "something in the input is nested too deeply", 1
    if isinstance(problem, MemoryError) or "RESOURCE_EXHAUSTED" in str(problem):
        return f"there is not enough memory: {problem or 'none is left'}", 1
    return (
        f"{type(problem).__name__}: {problem} (this is a fault of fedrecon's: please report it, with what the same "
        "command says with --debug)",
        BUG,
    )


def _warn(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
    """Show a warning as a sentence."""
    del filename, lineno, file, line
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    print(f"fedrecon: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _fail(sentence: str, code: int) -> int:
    from fedrecon.printing import plain

    print(f"fedrecon: {plain(' '.join(sentence.split()))}", file=sys.stderr)
    return code
