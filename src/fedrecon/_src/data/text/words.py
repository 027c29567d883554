"""Words: text into sentences and lower-cased words, and a hash of a word that is the same everywhere.

The words look like those of federated Stack Overflow: lower-cased, every punctuation mark a word of its own, but
apostrophes and hyphens inside a word part of it, and web addresses replaced by one word. Unlike there, letters of all
scripts are kept. Emphasis is simplified: a repeated mark counts once ("!!!" is "!"), and any row of dots is one
word "...".

A sentence ends at the end of a line, and after ".", "!", "?" or "..." (with the quotes and brackets that close
there) before white space, except that "..." before a lower-case letter does not end it. Abbreviations are not known:
"Mr. Smith" is two sentences.
"""

import hashlib
import re
import unicodedata

URL = "<URL>"  # upper case, so that no lower-cased word can be the same
HASH_BITS = 31

# Marks stand alone; everything else that is not white space makes up words. Listed by code point rather than by
# Unicode's categories, so that combining marks stay in their words and all versions of Python agree.
_MARKS = (
    "!-/:-@\\[-^`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u2027\u2030-\u205e\u20a0-\u20cf"
    "\u2100-\u2bff\u2e00-\u2e7f\u3001-\u3004\u3008-\u3020\u3030\ufe10-\ufe19\ufe30-\ufe6f\uff01-\uff0f\uff1a-\uff20"
    "\uff3b-\uff40\uff5b-\uff65\ufffc\ufffd\U0001f000-\U0001faff"
)
_LETTERS = f"[^\\s{_MARKS}]+"
_WORD = re.compile(f"{URL}|{_LETTERS}(?:['-]{_LETTERS})*|\\.\\.\\.|[{_MARKS}]")
_DOTS = re.compile(r"\.{2,}|…")
_REPEATED = re.compile(f"([{_MARKS}])(?<!\\.)\\1+")
_WEB = re.compile(r"""(?:https?://|www\.)\S*[^\s.,;:!?"')\]>]""")
_END = re.compile(r"""([.!?]["')\]]*)(?!(?<=\.\.\.)\s+[a-z])\s+""")
# What is invisible or cannot be written to a file: controls, soft hyphens, zero widths, halves of surrogate pairs.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f\x80-\x84\x86-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_STRAIGHT = str.maketrans("‘’‛ʼ“”„‟", "''''\"\"\"\"")


def split_text(text: str) -> list[list[str]]:
    """Split text into sentences, and those into words; sentences without words are left out.

    Args:
      text: of any length; its words come back in lower case.
    """
    text = _INVISIBLE.sub("", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_STRAIGHT)
    text = _END.sub(r"\1\n", _DOTS.sub("...", text)).lower()
    if "http" in text or "www." in text:
        text = _WEB.sub(f" {URL} ", text)
    text = _REPEATED.sub(r" \1 ", text)
    return [words for line in text.splitlines() if (words := _WORD.findall(line))]


def word_hash(word: str) -> int:
    """Return 31 bits that depend on the word alone: the same on every machine and with every Python."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % (1 << HASH_BITS)
