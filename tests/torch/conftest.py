"""These tests need the torch that they were written against; `make test-torch` brings it, `make test` does without."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

TORCH = "2.13.0"


@pytest.fixture(scope="session", autouse=True)
def torch_of_the_right_version() -> None:
    try:
        found = version("torch").split("+")[0]
    except PackageNotFoundError:
        pytest.skip("torch is not installed: run make test-torch")
    if found != TORCH:
        pytest.skip(f"torch {found} is installed, these counts are of {TORCH}: run make test-torch")
