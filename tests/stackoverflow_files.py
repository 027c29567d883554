"""Small databases in exactly the format of federated Stack Overflow, written without TensorFlow."""

import sqlite3
import struct

SCHEMA = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""
INDICES = """
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
"""


def varint(number):
    number %= 1 << 64
    groups = [number & 127]
    while number := number >> 7:
        groups.append(number & 127)
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


def nested(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def feature(values, packed=True):
    if all(isinstance(value, bytes) for value in values):
        return nested(1, b"".join(nested(1, value) for value in values))
    if all(isinstance(value, float) for value in values):
        numbers, kind, field = [struct.pack("<f", value) for value in values], 5, 2
    else:
        numbers, kind, field = [varint(value) for value in values], 0, 3
    if packed:
        return nested(field, nested(1, b"".join(numbers)))
    return nested(field, b"".join(varint(1 << 3 | kind) + number for number in numbers))


def example(features, packed=True):
    entries = [nested(1, name.encode()) + nested(2, feature(values, packed)) for name, values in features.items()]
    return nested(1, b"".join(nested(1, entry) for entry in entries))


def blob(date, tokens):
    return example(
        {
            "creation_date": [date.encode()],
            "score": [-3],
            "tags": [b"sql|css"],
            "title": [b"a title"],
            "tokens": [tokens.encode()],
            "type": [b"answer"],
        }
    )


def write_database(path, rows, indexed=True):
    """Write rows of (split, client, date, tokens), or (split, client, serialized example)."""
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA + (INDICES if indexed else ""))
    sizes = {}
    for split, client, *content in rows:
        data = blob(*content) if len(content) == 2 else content[0]
        connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, data))
        sizes[client, split] = sizes.get((client, split), 0) + 1
    keys = [(client, split, size) for (client, split), size in sizes.items()]
    connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", keys)
    connection.commit()
    connection.close()
    return path
