"""The examples of the documentation run as they are written."""

import doctest
from pathlib import Path


def test_the_python_examples_are_true() -> None:
    failed, tried = doctest.testfile(str(Path(__file__).parent.parent / "docs" / "python.md"), module_relative=False)
    assert tried > 10
    assert failed == 0
