"""`Posts.xml` of a Stack Exchange data dump: one post per line, its text as HTML in an attribute."""

import re
from collections.abc import Collection, Iterator
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

from fedrecon._src.core.progress import Progress
from fedrecon._src.data.dates import seconds
from fedrecon._src.data.text.records import BadRecords, client_name, read_lines
from fedrecon._src.data.text.runs import Post
from fedrecon._src.data.text.words import split_text

QUESTION, ANSWER = 1, 2
AROUND = (b"<?xml", b"<posts", b"</posts", b"\xef\xbb\xbf<?xml")  # how the lines that hold no post begin
# A tag: quoted attributes may hold ">". Possessive, and without "<" in it, so that no character is looked at twice.
_TAG = re.compile(
    r"""(?P<comment><!--)|<(?P<slash>/?)(?P<name>[A-Za-z][A-Za-z0-9]*+)(?:[^<>"']++|"[^"<]*+"|'[^'<]*+')*+>"""
)
BLOCKS = frozenset("address blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table td th tr ul".split())  # noqa: SIM905


def read_posts(path: str | Path, types: Collection[int], bad: BadRecords, progress: Progress) -> Iterator[Post]:
    """Yield the posts that have an owner, with the owners as clients.

    Args:
      path: the file. Every `<row .../>` has a line of its own, as published.
      types: the values of PostTypeId that are wanted.
      bad: is told about lines that cannot be read; counts what is left out.
      progress: a display of how much of the file is read.
    """
    wanted = set(map(str, types))
    for number, line in read_lines(path, bad, progress):
        line = line.strip()
        if line.startswith(AROUND):
            continue
        try:
            row = _attributes(line)
            if row["PostTypeId"] not in wanted:
                bad.skipped["posts_of_other_types"] += 1
                continue
            owner = row.get("OwnerUserId", "")
            if not owner or owner.startswith("-"):  # a deleted user, or the site itself
                bad.skipped["posts_without_owner"] += 1
                continue
            sentences = split_text(row.get("Title", "")) + split_text(plain_text(row["Body"]))
            post = Post(client_name(owner), seconds(row["CreationDate"]), sentences)
        except KeyError as missing:
            bad.found(f"{path} line {number}", f"a row without {missing.args[0]}")
            continue
        except (ValueError, OverflowError) as problem:
            bad.found(f"{path} line {number}", problem)
            continue
        if not sentences:
            bad.skipped["posts_without_words"] += 1
        yield post


def _attributes(line: bytes) -> dict[str, str]:
    """Return the attributes of a row, or raise ValueError if the line is not a row."""
    if not line.startswith(b"<row"):
        raise ValueError(f"{line[:40]!r} is not a <row .../>, which has a line of its own in a published Posts.xml")
    try:
        return ElementTree.fromstring(line).attrib
    except ElementTree.ParseError as problem:
        raise ValueError(f"not XML ({problem.msg})") from None


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment: blocks on lines of their own, blocks of code and comments left out.

    Every character is looked at once. A parser of all of HTML would look for the end of every `<!--` that has none, to
    the end of the text each time.
    """
    pieces: list[str] = []
    depth = place = 0  # how many <pre> are open: that is where Stack Exchange puts blocks of code
    for tag in _TAG.finditer(html):
        if tag.start() < place:
            continue  # within a comment
        _add(pieces, html[place : tag.start()], depth)
        place = tag.end()
        if tag["comment"]:
            end = html.find("-->", place)
            place = len(html) if end < 0 else end + 3
            if end < 0:
                break
            continue
        name = tag["name"].lower()
        if name == "pre":
            depth = max(0, depth + (-1 if tag["slash"] else 1))
        if name in BLOCKS:
            pieces.append("\n")
    _add(pieces, html[place:], depth)
    return "".join(pieces)


def _add(pieces: list[str], text: str, depth: int) -> None:
    if text and not depth:
        # a line that only the source breaks is not a line of the text
        pieces.append(unescape(text).replace("\r", " ").replace("\n", " "))
