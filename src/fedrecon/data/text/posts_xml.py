"""`Posts.xml` of a Stack Exchange data dump: one post a line, its text as HTML in an attribute."""

from collections.abc import Collection, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from fedrecon.data.text.records import BadRecords, client_name, read_lines, seconds
from fedrecon.data.text.runs import Post
from fedrecon.data.text.words import split_text
from fedrecon.progress import Progress

QUESTION, ANSWER = 1, 2
AROUND = (b"<?xml", b"<posts", b"</posts", b"\xef\xbb\xbf<?xml")  # how the lines that hold no post begin
BLOCKS = frozenset("address blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table td th tr ul".split())  # noqa: SIM905


def read_posts(path: str | Path, types: Collection[int], bad: BadRecords, progress: Progress) -> Iterator[Post]:
    """Yield the posts that somebody owns, with their owners as clients.

    Args:
      path: the file. Every `<row .../>` has a line of its own, as published.
      types: the values of PostTypeId that are wanted.
      bad: told of lines that cannot be read; counts what is left out.
      progress: opens a display of how much of the file is read.
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
        except ValueError as problem:
            bad.found(f"{path} line {number}", problem)
            continue
        if not sentences:
            bad.skipped["posts_without_words"] += 1
        yield post


def _attributes(line: bytes) -> dict[str, str]:
    """Return the attributes of a row, or raise ValueError if the line is none."""
    if not line.startswith(b"<row"):
        raise ValueError(f"{line[:40]!r} is not a <row .../>, which has a line of its own in a published Posts.xml")
    try:
        return ElementTree.fromstring(line).attrib
    except ElementTree.ParseError as problem:
        raise ValueError(f"not XML ({problem.msg})") from None


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment: blocks on lines of their own, blocks of code left out."""
    stripper = _Stripper()
    stripper.feed(html)
    stripper.close()
    return "".join(stripper.pieces)


class _Stripper(HTMLParser):
    """Collects text outside `<pre>`, where Stack Exchange puts blocks of code; code within a sentence stays."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.depth = 0  # of <pre>

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "pre":
            self.depth += 1
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.depth = max(0, self.depth - 1)
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            # a line that only the source breaks is not a line of the text
            self.pieces.append(data.replace("\r", " ").replace("\n", " "))
