"""The table of CONTRIBUTING.md, "where things go", names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
ROWS = [line for line in (PAGE.read_text().splitlines() if PAGE.is_file() else []) if line.startswith("| a")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_what_a_row_names_is_there(row: str) -> None:
    """Paths lead to something; `make` has the targets; every other name is a word of a file that the row names."""
    names = re.findall(r"`([^`]+)`", row)
    paths = [name for name in names if re.search(r"[/.]\w*$", name)]
    found = {path: list(ROOT.glob(path)) for path in paths}
    assert all(found.values()), [path for path, files in found.items() if not files]
    files = [
        file for own in found.values() for entry in own for file in ([entry] if entry.is_file() else entry.iterdir())
    ]
    text = "\n".join(file.read_text() for file in files if file.suffix in (".py", ".yml"))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = {*re.findall(r"\w+", text), *(f"make {target}" for target in targets)}
    assert set(names) - set(paths) <= words


def test_there_are_rows() -> None:
    assert len(ROWS) > 25 or not PAGE.is_file()
