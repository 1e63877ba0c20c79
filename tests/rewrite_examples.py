"""Write what the commands of the documentation print now into its pages: `make examples`, then read the difference.

Where an example leaves out with `...`, each of its lines becomes the line most like it, `...` left where it is.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from pathlib import Path

from tests.test_docs import DOCS, as_printed, blocks, commands, executed, name_of, pages, run_console, stripped


def rewritten(want: str, got: str) -> str:
    """What the page should say is printed."""
    if "..." not in want:
        return stripped(got)
    return "\n".join(like(line, stripped(got).splitlines()) for line in stripped(want).splitlines())


def like(line: str, among: list[str]) -> str:
    if line == "..." or line in among:
        return line
    start, dots, end = line.partition("...")
    found = difflib.get_close_matches(
        start + end if not dots else start, [own[: len(start)] if dots else own for own in among], 1, 0.3
    )
    if not found:
        return line
    return found[0] + dots + end


def rewrite(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    changed = text

    def keep(want: str, got: str, where: str) -> None:
        nonlocal changed
        if not as_printed(want, got):
            print(where)
            changed = changed.replace(stripped(want), rewritten(want, got))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "docs").symlink_to(DOCS)
        os.chdir(folder)
        for block in blocks(text):
            if block.title:
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif executed(block) and block.language == "console":
                run_console(block.text, name_of(page), keep)
        os.chdir(DOCS)
    page.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    for own in [DOCS / name for name in sys.argv[1:]] or pages():
        if any(executed(block) and list(commands(block.text)) for block in blocks(own.read_text(encoding="utf-8"))):
            rewrite(own)
