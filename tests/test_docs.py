"""The pages: every Python block runs, every command parses, output shown is output made, every link leads somewhere.

The blocks of a page run in order, in one namespace and one empty folder. A block with a title (```json title="a.json")
is a file in that folder. A `text` block right after a Python block is what that block prints; numbers may differ a
little, since devices add up in different orders.
"""

import contextlib
import importlib
import inspect
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import studies.__main__
import studies.audit
import studies.leakage

import fedrecon as fr
from fedrecon._src.app.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
RUN = ["docs/quickstart.md"]  # pages whose commands are run, not only parsed
FENCED = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(fedrecon .*)$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    title: str | None
    text: str
    line: int  # of its first line in the page
    follows: bool  # whether nothing but white space is between it and the block before


def blocks_of(page):
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for match in FENCED.finditer(text):
        title = re.search(r'title="([^"]+)"', match[2])
        line = text.count("\n", 0, match.start(3)) + 1
        follows = bool(found) and not text[end : match.start()].strip()
        found.append(Block(match[1], title and title[1], match[3], line, follows))
        end = match.end()
    return found


def commands_of(text):
    lines = text.replace("\\\n", "").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("fedrecon ")]


def name_of(page):
    return str(page.relative_to(ROOT))


def having(language, pages=PAGES):
    chosen = [page for page in pages if any(block.language == language for block in blocks_of(page))]
    return pytest.mark.parametrize("page", chosen, ids=name_of)


def write_files(blocks):
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")


def run_block(block, page, names):
    """Run a block and return what it prints; an error names the page and its line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, name_of(page), "exec"), names)
        else:
            for _, *arguments in commands_of(block.text):
                assert main(arguments) == 0, arguments
    return printed.getvalue()


def assert_says(printed, shown, where):
    """Compare output word by word, and numbers with a fraction to within a twentieth."""
    found, expected = printed.split(), shown.split()
    for one, other in zip(found, expected, strict=False):
        fraction = re.fullmatch(r"(\D*?)(-?\d+\.\d+)(\D*)", other)
        if fraction and (same := re.fullmatch(r"(\D*?)(-?\d+\.\d+)(\D*)", one)):
            assert float(same[2]) == pytest.approx(float(fraction[2]), rel=0.05, abs=0.005), f"{where}: {printed}"
            assert (same[1], same[3]) == (fraction[1], fraction[3]), f"{where}: {printed}"
        else:
            assert one == other, f"{where}: {printed}"
    assert len(found) == len(expected), f"{where}: {printed}"


def run_page(page):
    """Run a page's blocks in the working folder; return the names that are left and all that was printed."""
    names, outputs, blocks = {"__name__": "__main__"}, [], blocks_of(page)
    write_files(blocks)
    for block in blocks:
        if block.language == "python" or (block.language == "sh" and name_of(page) in RUN):
            outputs.append(run_block(block, page, names))
        elif block.language == "text" and block.follows:
            assert_says(outputs[-1], block.text, f"{name_of(page)}, line {block.line}")
    return names, outputs


@pytest.mark.slow
@having("python", [page for page in PAGES if page.name != "README.md"])
def test_every_python_block_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    run_page(page)


@pytest.mark.slow
def test_the_examples_of_the_readme_beat_the_mean_and_recommend_titles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    python, shown, by_hand, by_hand_shown = [b for b in blocks_of(page) if b.language in ("python", "text")]
    names = {"__name__": "__main__"}
    printed = run_block(python, page, names).splitlines()
    first_table = "\n".join(printed).partition("RMSE after")[0]
    rows = dict(re.findall(r"^(\w.*?)  +([\d.]+)", first_table, re.MULTILINE))
    assert float(rows["model"]) < float(rows["item + user bias"]) < float(rows["global mean"])
    table, films = shown.text.splitlines()[:-5], printed[-5:]  # ties between films are decided by the last bits
    assert_says("\n".join(printed[:-5]), "\n".join(table), "README.md")
    assert all(re.fullmatch(r"[45]\.\d [A-Z].*", film) for film in films)
    assert not any(title in film for title in names["liked"] for film in films)
    result = run_block(by_hand, page, names)
    assert_says(result, by_hand_shown.text, "README.md")
    rmse, mean = (float(number) for number in re.findall(r"\d\.\d+", result))
    assert rmse < 0.95 * mean


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_language_that_is_looked_at(page):
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= {"python", "sh", "text", "csv", "json"}
    assert len(re.findall("^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(blocks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_in_a_block_is_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    write_files(blocks)
    commands = [command for block in blocks if block.language == "sh" for command in commands_of(block.text)]
    commands += [shlex.split(line, comments=True) for line in INDENTED.findall(page.read_text(encoding="utf-8"))]
    for _, command, *arguments in commands:
        importlib.import_module(f"fedrecon._src.app.cli.{command}").parse(arguments)


@pytest.fixture(scope="module")
def help_texts():
    """Return what each command says of itself, for each task that it has."""
    texts = {}
    for command in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main([command, "--help"])
            if command == "train":
                main([command, "--task", "text", "--help"])
                main([command, "--task", "clicks", "--help"])
        texts[command] = printed.getvalue()
    printed = io.StringIO()
    for study in (studies.__main__, studies.audit, studies.leakage):
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            study.main(["--help"])
    return texts | {"studies": printed.getvalue()}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_option_named_within_a_sentence_exists(page, help_texts):
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for words in re.findall(r"`(fedrecon [^`]+|--[^`]+)`", prose):
        command = (*words.split(), "")[1]
        known = (
            help_texts[command]
            if command in COMMANDS
            else " ".join([*help_texts.values(), "--version --debug --no-compilation-cache"])
        )
        for option in re.findall(r"(?<!\S)--[a-z][\w.-]*", words):
            # `--data.*` stands for a group
            assert re.search(rf"(?<!\S){option}" + ("" if option.endswith(".") else r"(?![\w.-])"), known), words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_source_file_named_within_a_sentence_exists(page):
    folders = [ROOT, ROOT / "tests", ROOT / "src" / "fedrecon" / "_src", ROOT / "src-device", ROOT / "src"]
    folders.append(ROOT / "src-device" / "fedrecon_device")
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    names = set(re.findall(r"`([a-z][\w-]*/[\w/.-]+\.(?:py|ipynb|js|sbatch|conf))`", prose))
    assert not [name for name in names if not any((folder / name).is_file() for folder in folders)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_to_one(page):
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_changelog_begins_with_the_version():
    assert re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == fr.__version__


# ---- the reference ----


def public_names():
    """Return what users may use, by its public path."""
    names = {}
    for module in (fr, fr.models, fr.data, fr.split, fr.aggregators, fr.recommend):
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and (getattr(value, "__module__", None) or "").startswith("fedrecon"):
                names[f"{module.__name__}.{name}"] = value
    return {path: value for path, value in names.items() if hasattr(value, "__qualname__")}


def test_every_public_name_is_in_the_reference_once():
    entries = [path for page in REFERENCE for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(entries) == len(set(entries))
    assert not set(public_names()) - set(entries)


def test_every_entry_of_the_reference_exists():
    for page in REFERENCE:
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, name = path.rsplit(".", 1)
            assert hasattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("path", [path for path, value in public_names().items() if inspect.isfunction(value)])
def test_every_argument_of_a_public_function_is_explained(path):
    function = public_names()[path]
    arguments = inspect.getdoc(function).partition("Args:\n")[2]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^ +\**{name}: ", arguments, re.MULTILINE), name
