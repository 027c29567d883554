"""Privacy against the server: secure sums, integers to add up, noise, accounting.

Each module says what it needs; the extra `privacy` installs all of it (`pip install fedrecon[privacy]`).
"""
