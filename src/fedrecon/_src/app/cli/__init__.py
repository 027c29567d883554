"""The command line: dispatches commands, parses options, turns exceptions into messages and exit codes."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from fedrecon._version import __version__

COMMANDS = {  # a module of this package each, with `parse(argv)` and `run(options) -> exit code`
    "train": "train a model of ratings, clicks or text whose local parameters never leave the clients",
    "tune": "find settings for your own ratings or clicks, on validation users",
    "evaluate": "evaluate a trained model on held-out clients",
    "recommend": "recommend items to the users of a file of ratings or clicks",
    "complete": "suggest next words, including the person's own vocabulary",
    "bundle": "write a folder that reconstructs and predicts without Python or JAX, or check one",
    "page": "serve a web page to try a model in the browser",
    "demo": "train on MovieLens small, compare with baselines and recommend, in about a minute",
    "privacy": "plan the noise for a privacy budget",
    "plan": "write a plan for training over several nodes that keep their data",
    "keys": "make keys and certificates for a server and its nodes",
    "serve": "run a plan: coordinate training over nodes, or devices, that keep their data",
    "join": "join a training as a node; your file stays on this machine",
    "helper": "run the second server of device sums, which opens masks and never sees a report",
}
WITHOUT_JAX = ("keys", "helper")  # commands that compute nothing and start quickly
FAILED = 3  # the exit code of a training or evaluation that went wrong for more than a few
BUG = 70
MOST_CACHED = 2**29  # bytes of compiled programs
HELP = """\
usage: fedrecon COMMAND [OPTIONS]

Partially local federated learning: train the global part of a model, reconstruct the local part on each client.

commands:
{commands}

examples:
  fedrecon train movielens-small --out runs/small
  fedrecon recommend runs/small --ratings my-ratings.csv -n 5
  fedrecon train posts.jsonl.gz --task text --out runs/words
  fedrecon complete runs/words --text my-mail.txt --prompt "see you"

fedrecon COMMAND --help lists the options of a command.
fedrecon --version prints the version. With any command, --debug shows the traceback of an error, and
--no-compilation-cache recompiles programs instead of reusing those in the user's cache.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 if all is well, 1 for an error, 2 for wrong use, 3 for a training that failed, 70 for a bug in fedrecon, 130 for
    Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        code = _run(args)
        sys.stdout.flush()  # report a failed write ourselves, instead of leaving it to Python's exit
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output closed the pipe
        _drop_output()
        return 141
    except Exception as problem:
        if "--debug" in args or os.environ.get("FEDRECON_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        code = _fail(*_sentence(problem))
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return code


def _run(args: Sequence[str]) -> int:
    """Run a command, or print the list of commands."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())), end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"fedrecon {__version__}")
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        return _fail(f"there is no command {args[0]!r}; {hint}", 2)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return _run_command(*args)
    except SystemExit as leaving:  # how a help text ends, and some errors of use
        return _fail(leaving.code, 1) if isinstance(leaving.code, str) else leaving.code or 0


def _run_command(name: str, *argv: str) -> int:
    """Parse a command's options and run it. Parsing needs no JAX, so that help and refused options are quick."""
    from fedrecon._src.app.cli.options import parse_common

    command = importlib.import_module(f"fedrecon._src.app.cli.{name}")
    common, rest = parse_common(argv)
    options = command.parse(rest)
    if name not in WITHOUT_JAX:
        _prepare_jax(common.compilation_cache)
    return command.run(options)


def _prepare_jax(compilation_cache: bool) -> None:
    """Keep compiled programs for the next command, unless JAX's own settings name a cache or turn it off."""
    import jax

    from fedrecon._src.data.sources import DataError, private_cache
    from fedrecon._src.simulation.divergence import DivergenceWarning

    warnings.simplefilter("ignore", DivergenceWarning)  # commands say it themselves, with their options
    settings: Any = jax.config
    has_cache = settings.jax_compilation_cache_dir is not None
    if has_cache or not compilation_cache or not settings.jax_enable_compilation_cache:
        return
    with contextlib.suppress(OSError, DataError):  # a command works without it, if more slowly
        jax.config.update("jax_compilation_cache_dir", str(private_cache("compiled")))
        jax.config.update("jax_compilation_cache_max_size", MOST_CACHED)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _drop_output() -> None:
    """Discard pending output, so that Python does not fail to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(problem: Exception) -> tuple[str, int]:
    """Return the error message and the exit code."""
    from fedrecon._src.app.cli import options

    if isinstance(problem, options.UsageError):
        return str(problem), 2
    if isinstance(problem, options.ConfigError) and not problem.source:
        return problem.describe(options.flag_of(problem.field)), 2
    from fedrecon._src.core.checks import install_hint

    if isinstance(problem, ImportError) and (hint := install_hint(problem.name)):
        return hint, 1
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror, 1
    if isinstance(problem, ValueError):
        return options.describe_error(problem), 1
    if isinstance(problem, RecursionError):
        return "something in the input is nested too deeply", 1
    if isinstance(problem, MemoryError) or "RESOURCE_EXHAUSTED" in str(problem):
        return f"there is not enough memory: {problem or 'none is left'}", 1
    advice = "this is a bug in fedrecon: please report it, with the output of the same command with --debug"
    return f"{type(problem).__name__}: {problem} ({advice})", BUG


def _warn(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
    """Show a warning as a sentence."""
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    print(f"fedrecon: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _fail(sentence: str, code: int) -> int:
    from fedrecon._src.core.display import plain

    print(f"fedrecon: {plain(' '.join(sentence.split()))}", file=sys.stderr)
    return code
