"""How long the documents are that sequences are packed from: a CSV of lengths and counts."""

from __future__ import annotations

import csv
from pathlib import Path

from shardwise.data.faults import InputError, unreadable
from shardwise.data.workload import MAX_LENGTHS, MAX_SEQUENCE

COLUMNS = ("length", "count")
MAX_FILE_BYTES = 1_000_000
MAX_COUNT = 10**12
MAX_FAULTS = 20

Lengths = tuple[tuple[int, int], ...]


def read_lengths(path: Path | str) -> Lengths:
    """The (length, count) pairs of a CSV with these two columns, in order.

    Raises
    ------
    InputError
        Naming every line that is not a pair of whole numbers, up to twenty.
    """
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: the file is larger than {MAX_FILE_BYTES} bytes")
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError([f"{path}: column {name} is missing" for name in missing])
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a readable CSV: {unreadable(error)}") from None
    if not 0 < len(rows) <= MAX_LENGTHS:
        raise InputError(f"{path}: {len(rows)} lengths, between 1 and {MAX_LENGTHS} are read")
    faults: list[str] = []
    pairs = []
    for line, row in rows:
        cells = [_whole(row[name], most) for name, most in zip(COLUMNS, (MAX_SEQUENCE, MAX_COUNT), strict=True)]
        faults += [
            f"{path}, line {line}: {name}={row[name]!r} must be a whole number between 1 and {most}"
            for name, cell, most in zip(COLUMNS, cells, (MAX_SEQUENCE, MAX_COUNT), strict=True)
            if cell is None
        ]
        if None not in cells:
            pairs.append((cells[0] or 0, cells[1] or 0))
    if len(faults) > MAX_FAULTS:
        faults = [*faults[:MAX_FAULTS], f"{path}: {len(faults) - MAX_FAULTS} more like these"]
    if faults:
        raise InputError(faults)
    return tuple(pairs)


def _whole(cell: str | None, most: int) -> int | None:
    """A cell as a whole number from 1 to `most`, or None."""
    text = (cell or "").strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(most)) else 0
    return value if 0 < value <= most else None
