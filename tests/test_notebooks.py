"""The notebooks are stored as they should be read: without outputs, as a story, and listed. `make test` executes them."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def test_they_are_numbered_and_listed_in_the_documentation() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02d}_" for number in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 5
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in page] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_tells_a_story_in_words(path: Path) -> None:
    first, *rest = cells(path)
    assert first["cell_type"] == "markdown"
    assert "".join(first["source"]).startswith("# ")
    words = [cell for cell in rest if cell["cell_type"] == "markdown"]
    assert sum("".join(cell["source"]).startswith("## ") for cell in words) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_the_public_names_and_the_kernel_that_every_environment_has(path: Path) -> None:
    source = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")
    assert "import shardwise as sw" in source
    assert "from shardwise" not in source
    assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]["name"] == "python3"
