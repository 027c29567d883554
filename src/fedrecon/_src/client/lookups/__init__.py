"""Tables that are read by rows: how they are found, fetched and changed."""
