"""docs/cases.md lists what the tests of this folder hold."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LISTED = (TESTS.parent.parent / "docs" / "cases.md").read_text(encoding="utf-8")
HELD = {
    case
    for file in TESTS.glob("test_*.py")
    for line in file.read_text(encoding="utf-8").splitlines()
    if (found := re.match(r' +"""((?:[a-z0-9]+(?:-[a-z0-9]+)+(?:, |: |$))+)', line.split("http")[0]))
    for case in re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", found[1])
}


def test_every_case_that_a_test_holds_is_listed() -> None:
    assert len(HELD) > 40
    assert [case for case in sorted(HELD) if not re.search(rf"\b{re.escape(case)}\b", LISTED)] == []


def test_every_case_listed_with_a_test_of_this_folder_has_one() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) .*\| (?:held|part) \[[LMPS]\]", LISTED, re.MULTILINE)
    assert len(rows) > 40
    assert [case for case in rows if case not in HELD] == []
