"""Tables: CSV and other delimited text, Parquet files and data frames, read in batches of pyarrow arrays.

Text is read in chunks of whole lines, so that only what is wanted stays in memory. pyarrow parses a chunk; where it
fails, or a value is refused later, the chunk is split row by row with Python's `csv`, which names the line of an error
and can read what pyarrow cannot: rows of different lengths, and quoted fields with line feeds across chunks.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypedDict

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fedrecon._src.core.checks import check_number
from fedrecon._src.core.tabular import to_arrow
from fedrecon._src.data.sources import (
    ALWAYS_ALLOWED,
    MAX_EXPANSION,
    DataError,
    RowErrors,
    check_file,
    is_stream,
    open_bytes,
    read_text,
)

PARQUET = b"PAR1"
BATCH_ROWS = 1 << 20
BYTES_PER_VALUE = 8
SAMPLE_ROWS, SAMPLE_CHARACTERS = 100, 1 << 16  # from which columns of numbers are told
SEPARATOR = "\x1f"  # replaces delimiters of several characters
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")  # how most dates begin
_SPACES = re.compile(r'("[^"\n]*+")|[^\S\n]++')


class TextOptions(TypedDict, total=False):
    """How a table of text is written.

    Attributes:
      delimiter: what separates fields; " " stands for any run of white space. None looks for tab, comma, semicolon or
        `::` in the first line, then for white space.
      header: whether the first line names the columns; None takes a line without any number for a header.
      encoding: the encoding of the text.
      skip_lines: how many lines to skip before the header or the data.

    Example:
      >>> import fedrecon as fr
      >>> options = fr.data.TextOptions(delimiter="|", header=False)
      >>> options["delimiter"]
      '|'
    """

    delimiter: str | None
    header: bool | None
    encoding: str
    skip_lines: int


class JsonLinesError(DataError):
    """A file of JSON objects, where a table was expected."""


class Batch(NamedTuple):
    """Some rows of a table.

    Attributes:
      columns: by what each is for.
      lines: the line of each row in a text file; None if it is not known.
      reread: reads the same rows with their lines, where that is possible.
    """

    columns: dict[str, pa.Array]
    lines: list[int] | None = None
    reread: Callable[[], "Batch"] | None = None

    def describe_row(self, row: int, before: int) -> str:
        """Name a row for a message: its line, or its number after so many rows of earlier batches."""
        return f"row {before + row + 1}" if self.lines is None else f"line {self.lines[row]}"


@contextmanager
def open_table(source: Any, **options: Any) -> Iterator["Table"]:
    """Open a text file or a Parquet file (a path, a pipe, or "-" for standard input), or a data frame.

    Args:
      source: the file or the data frame.
      **options: `TextOptions`.
    """
    if not isinstance(source, str | Path):
        frame = to_arrow(source)
        yield ArrowTable(frame, frame.schema, "the data frame")
        return
    name = "standard input" if str(source) == "-" else str(source)
    if not is_stream(source):
        check_file(source, "a table (text or Parquet)")
    with open_bytes(source) as stream:
        if Path(source).suffix not in (".parquet", ".pq") and stream.peek(4)[:4] != PARQUET:  # type: ignore[attr-defined]
            yield TextTable(stream, name, **options)
            return
        with _arrow_errors(name):
            content = pa.BufferReader(stream.read()) if is_stream(source) else pa.OSFile(str(source))
            with pa.parquet.ParquetFile(content) as file:
                rows, size, schema = file.metadata.num_rows, content.size(), file.schema_arrow
        if rows * BYTES_PER_VALUE > max(ALWAYS_ALLOWED, size * MAX_EXPANSION):
            raise DataError(f"{name} declares {rows:,} rows in {size:,} bytes, which no real data has.")
        yield ArrowTable(content, schema, name)


@contextmanager
def _arrow_errors(source: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, IndexError, OverflowError, UnicodeError) as problem:
        raise DataError(f"cannot read {source}: {problem}") from None


# ---- Parquet and data frames ----


class ArrowTable:
    """A Parquet file, or a pyarrow table."""

    def __init__(self, content: pa.Table | pa.NativeFile, schema: pa.Schema, source: str) -> None:
        self.content, self.schema, self.source, self.typed = content, schema, source, True
        self.names, self.width = list(schema.names), len(schema.names)

    def is_numeric(self, position: int) -> bool:
        """Tell whether a column holds numbers."""
        kind = self.schema.field(position).type
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    def batches(self, positions: Mapping[str, int], errors: RowErrors) -> Iterator[Batch]:
        """Yield the columns at these positions, by what they are for."""
        del errors
        names = {role: self.names[position] for role, position in positions.items()}
        for role, name in names.items():
            if self.names.count(name) > 1:
                raise DataError(f"{self.source} has several columns {name!r}; rename all but the one for {role}.")
        with _arrow_errors(self.source):
            for batch in self._read(list(dict.fromkeys(names.values()))):
                yield Batch({role: batch.column(name) for role, name in names.items()})

    def _read(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        if isinstance(self.content, pa.Table):
            yield from self.content.select(names).to_batches(BATCH_ROWS)
            return
        # Text that is stored once is read as it is stored: unpacked, few bytes could become any number of gigabytes.
        texts = [name for name in names if is_text(self.schema.field(name).type)]
        with pa.parquet.ParquetFile(self.content, read_dictionary=texts) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=names)


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a type is text, stored plainly or once."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# ---- text ----


class TextTable:
    """A table of text. Its first line that is not blank tells the delimiter, and whether it is a header."""

    def __init__(
        self,
        stream: IO[bytes],
        source: str,
        *,
        delimiter: str | None = None,
        header: bool | None = None,
        encoding: str = "utf-8",
        skip_lines: int = 0,
        quoting: bool = True,
    ) -> None:
        if delimiter is not None and (not delimiter or set(delimiter) & set('\r\n\0"')):
            raise DataError(f"`delimiter` must be neither quotes nor line ends (got {delimiter!r}).")
        check_number("skip_lines", skip_lines)
        self.source, self.typed = source, False
        self._chunks, self._line = read_text(stream, source, encoding), 1  # what is not read yet, and where it begins
        chunk = self._begin_data(skip_lines)
        first = chunk[: chunk.index("\n")]
        if _is_json_object(first):
            raise JsonLinesError(f"{source} holds JSON objects; expected a table, one row per line")
        self._set_delimiter(delimiter or _find_delimiter(first, source), quoting)
        fields = self._split(self._convert(first))
        if not any(fields):
            rule = "expected the names of columns, or values"
            raise DataError(f"{source} line {self._line} has only empty fields; {rule}.")
        if header is None:
            header = not any(map(_is_number, fields))
        self.names, self.width = fields if header else None, len(fields)
        if header:
            chunk = chunk[len(first) + 1 :]
            self._line += 1
        self._chunks = itertools.chain([chunk], self._chunks)
        lines = chunk[:SAMPLE_CHARACTERS].split("\n")[: SAMPLE_ROWS + 1][:-1]
        self._sample = [self._split(self._convert(line)) for line in lines if line.strip()]

    def _begin_data(self, skip_lines: int) -> str:
        """Skip the first lines, and blank ones after them; return the rest of the chunk."""
        for chunk in self._chunks:
            skip = min(skip_lines, chunk.count("\n"))
            start = re.match(rf"(?:.*\n){{{skip}}}(?:[^\S\n]*\n)*", chunk).end()  # type: ignore[union-attr]
            skip_lines -= skip
            self._line += chunk.count("\n", 0, start)
            if start < len(chunk):
                return chunk[start:]
        raise DataError(f"{self.source} is empty; expected one row per line.")

    def _set_delimiter(self, delimiter: str, quoting: bool) -> None:
        self.delimiter, self.quoting = delimiter, quoting and (len(delimiter) == 1 or delimiter.isspace())
        self._convert: Callable[[str], str] = str
        if delimiter.isspace() and delimiter != "\t":
            self._convert, self.delimiter = _convert_spaces, SEPARATOR
        elif len(delimiter) > 1:
            self._convert, self.delimiter = partial(_convert_marks, delimiter), SEPARATOR
        mark = re.escape(self.delimiter)
        # every line feed ends a row, and quotes surround whole fields
        self._plain = re.compile(rf'(?:(?:[^"\n{mark}]*+|"(?:[^"\n]++|"")*+")[{mark}\n])*+')

    def _reader(self, lines: Iterable[str]) -> Any:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quoting else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True, quoting=quoting)

    def _split(self, line: str) -> list[str]:
        try:
            fields: list[str] = next(self._reader([line]), [])
        except csv.Error:  # a field that is too long
            fields = line.split(self.delimiter)
        return [field.strip() for field in fields]

    def is_numeric(self, position: int) -> bool:
        """Tell whether the first entries of a column are numbers."""
        return bool(self._sample) and all(len(row) > position and _is_number(row[position]) for row in self._sample)

    def batches(self, positions: Mapping[str, int], errors: RowErrors) -> Iterator[Batch]:
        """Yield the columns at these positions, by what they are for; report rows that are too short."""
        for chunk in map(self._convert, self._chunks):
            first = self._line
            self._line += chunk.count("\n")
            if chunk and not chunk.isspace():
                columns = self._parse(chunk, positions)
                reread = partial(self._parse_rows, chunk, first, positions, errors)
                yield reread() if columns is None else Batch(columns, None, reread)

    def _parse(self, chunk: str, positions: Mapping[str, int]) -> dict[str, pa.Array] | None:
        """Parse a chunk with pyarrow; None if it might read it differently than row by row."""
        distinct = len(set(positions.values())) == len(positions)
        hexadecimal = "time" in positions and ("0x" in chunk or "0X" in chunk)  # a number to pyarrow
        if "\0" in chunk or hexadecimal or not distinct or not self.delimiter.isascii():
            return None
        quoted = self.quoting and '"' in chunk
        if quoted and not self._plain.fullmatch(chunk):
            return None
        fields = self._split(next(line for line in io.StringIO(chunk) if line != "\n"))
        if max(positions.values()) >= len(fields):
            return None
        data = chunk.encode()
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(data),
                pa.csv.ReadOptions(column_names=[str(k) for k in range(len(fields))], block_size=len(data) + 1),
                pa.csv.ParseOptions(delimiter=self.delimiter, quote_char='"' if quoted else False),
                pa.csv.ConvertOptions(
                    column_types={str(k): _arrow_type(role, fields[k]) for role, k in positions.items()},
                    include_columns=[str(k) for k in positions.values()],
                    null_values=[],
                ),
            )
        except pa.ArrowException:
            return None
        return {role: table.column(str(position)).combine_chunks() for role, position in positions.items()}

    def _read_on(self, chunk: str) -> Iterator[str]:
        """Yield the lines of a chunk and, if a reader needs more because a quoted field is open, of those after it."""
        yield from io.StringIO(chunk)
        for more in self._chunks:
            self._line += more.count("\n")
            yield from io.StringIO(self._convert(more))

    def _parse_rows(self, chunk: str, first: int, positions: Mapping[str, int], errors: RowErrors) -> Batch:
        """Split a chunk row by row, and with it those after it that begin within a quoted field."""
        rows, lines, last = [], [], max(positions.values())
        reader = self._reader(self._read_on(chunk))
        try:
            while (line := first + reader.line_num) < self._line:
                fields = [field.strip() for field in next(reader)]
                if len(fields) > last and any(fields):
                    rows.append([fields[position] for position in positions.values()])
                    lines.append(line)
                elif any(fields):
                    reason = f"expected at least {last + 1} fields, but there are {len(fields)}"
                    errors.add(f"{self.source} line {line}", reason)
        except csv.Error as problem:
            raise DataError(f"{self.source} after line {line - 1}: {problem}; is a quote left open?") from None
        entries = zip(*rows, strict=True) if rows else [[] for _ in positions]
        columns = {role: pa.array(column, pa.string()) for role, column in zip(positions, entries, strict=True)}
        return Batch(columns, lines)


Table = TextTable | ArrowTable


def _arrow_type(role: str, example: str) -> pa.DataType:
    if role == "time":
        return pa.timestamp("us") if DATE.match(example) else pa.int64()
    return pa.float64() if role == "rating" else pa.dictionary(pa.int32(), pa.string())


def _find_delimiter(line: str, source: str) -> str:
    delimiter = max(("::", "\t", ",", ";"), key=lambda mark: line.count(mark) * len(mark))
    if delimiter in line:
        return delimiter
    if len(line.split()) > 1:
        return " "
    advice = "name it with delimiter=..."
    raise DataError(f"{source}: cannot tell what separates fields in {line[:60]!r}; {advice}", ["delimiter"])


def _convert_marks(delimiter: str, text: str) -> str:
    return text.replace(SEPARATOR, " ").replace(delimiter, SEPARATOR)


def _convert_spaces(text: str) -> str:
    """Replace runs of white space outside of quotes, and remove those around lines."""
    text = _SPACES.sub(lambda match: match[1] or SEPARATOR, text)
    return re.sub(rf"(?m)^{SEPARATOR}|{SEPARATOR}$", "", text)


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
