"""The examples of the documentation run as they are written, page by page, in an empty folder.

A fenced block with a title is a file; `console` holds commands and what they print; `python` is a doctest. In what is
printed `...` stands for anything, and seconds that a search took are not compared. A command ends with exit code 0 unless
`echo $?` follows. What cannot run is preceded by a comment, `<!-- not run: why -->`. `make examples` writes what is
printed now into the pages.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from decision_map import SEQ_LEN, in_words, solved
from typer.testing import CliRunner

from shardwise.solver.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>.*)$")
TITLE = re.compile(r'title="([^"/]+)"')
NOT_RUN = re.compile(r"<!-- not run: \S.*-->")
SECONDS = re.compile(r"; \d+\.\d\d s$", re.MULTILINE)
WIDTH = "80"


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line before it that is not empty."""

    line: int
    language: str
    title: str | None
    text: str
    before: str

    @property
    def not_run(self) -> bool:
        return NOT_RUN.fullmatch(self.before) is not None


def blocks(text: str) -> Iterator[Block]:
    before, opened, held = "", None, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence is None:
            before = line.strip() or before
        elif opened is None and fence is not None:
            opened, held = (number, fence), []
        elif opened is not None and fence is not None and not fence["language"]:
            start, fence = opened
            title = TITLE.search(fence["rest"])
            yield Block(start, fence["language"], title and title[1], "\n".join(held) + "\n", before)
            opened, before = None, ""
        elif opened is not None:
            held.append(line.removeprefix(opened[1]["indent"]))
    assert opened is None, f"the block of line {opened} is not closed"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, with what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = next(n for n, line in enumerate(lines) if not line.endswith("\\"))
        yield " ".join(line.rstrip("\\").strip() for line in lines[: end + 1]), "\n".join(lines[end + 1 :])


def run_console(text: str, where: str, printed: Callable[[str, str, str], None] | None = None) -> None:
    code, printed = 0, printed or assert_printed
    asked = list(commands(text))
    assert asked, f"{where}: no command"
    for index, (command, want) in enumerate(asked):
        if command == "echo $?":
            assert want.strip() == str(code), f"{where}: exit code {code}"
            continue
        first, _, rest = command.partition(" | ")
        words = shlex.split(first)
        if words[0] == "shardwise":
            result = CliRunner().invoke(app, words[1:], env={"COLUMNS": WIDTH})
            code, got = result.exit_code, result.output
            if rest:
                got = subprocess.run(["bash", "-c", rest], input=got, capture_output=True, text=True, check=True).stdout
        else:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
            code, got = done.returncode, done.stdout + done.stderr
        told = index + 1 < len(asked) and asked[index + 1][0] == "echo $?"
        assert told or code == 0, f"{where}: {command}: exit code {code}\n{got}"
        if want.strip():
            printed(want, got, f"{where}: {command}")


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def as_printed(want: str, got: str) -> bool:
    want, got = (SECONDS.sub("; 0.00 s", stripped(text)) for text in (want, got))
    return doctest.OutputChecker().check_output(want + "\n", got + "\n", doctest.ELLIPSIS)


def assert_printed(want: str, got: str, where: str) -> None:
    if not as_printed(want, got):
        example, checker = doctest.Example("", stripped(want) + "\n"), doctest.OutputChecker()
        got = stripped(got)
        pytest.fail(f"{where}\n{checker.output_difference(example, got, doctest.ELLIPSIS)}", pytrace=False)


def run_python(text: str, names: dict[str, Any], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, where, where, 0)
    assert test.examples, f"{where}: no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    told: list[str] = []
    runner.run(test, out=told.append, clear_globs=False)
    names.update(test.globs)
    assert not runner.summarize(verbose=False).failed, "".join(told)


def pages() -> list[Path]:
    return sorted(page for page in DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def executed(block: Block) -> bool:
    return block.language in ("console", "python") and not block.not_run


@pytest.mark.parametrize(
    "page", [page for page in pages() if any(map(executed, blocks(page.read_text(encoding="utf-8"))))], ids=name_of
)
def test_the_examples_of_a_page_are_true(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").symlink_to(DOCS)  # as in a checkout
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{name_of(page)}:{block.line}"
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif executed(block) and block.language == "console":
            run_console(block.text, where)
        elif executed(block):
            run_python(block.text, names, where)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_what_looks_like_an_example_is_one(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.text.startswith(("$ ", ">>> ")) and not block.not_run:
            assert block.language in ("console", "python"), (
                f"{name_of(page)}:{block.line} is neither run nor said not to be"
            )


def test_no_example_is_lost() -> None:
    run = [block for page in pages() for block in blocks(page.read_text(encoding="utf-8")) if executed(block)]
    assert sum(block.language == "python" for block in run) >= 8
    assert sum(len(list(commands(block.text))) for block in run if block.language == "console") >= 40


def test_an_output_that_differs_is_told() -> None:
    assert_printed("a\n...\nd 2 s; 0.10 s", "a\nb\nc\nd 2 s; 3.10 s", "here")
    with pytest.raises(pytest.fail.Exception, match="here"):
        assert_printed("a\n...\nd", "a\nb\nc", "here")
    with pytest.raises(AssertionError, match="exit code 2"):
        run_console("$ shardwise catalog nothing\n", "here")


class Fetched(HTMLParser):
    """The addresses that a browser fetches by itself when it opens a page: not those of links to follow."""

    LOADS = frozenset({("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")})
    RELATIONS = frozenset({"stylesheet", "preload", "prefetch", "preconnect", "dns-prefetch", "icon", "modulepreload"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name, value in given.items():
            relations = set((given.get("rel") or "").split())
            if (tag, name) in self.LOADS and value and (tag != "link" or relations & self.RELATIONS):
                self.found.append(value)


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    built = list(site.rglob("*.html"))
    assert len(built) >= len(pages())
    for page in built:
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found, page
        outside = [address for address in parser.found if re.match(r"(?:[a-z]+:)?//", address)]
        assert outside == [], page
    for style in site.rglob("*.css"):
        addresses = re.findall(r"""url\(\s*["']?([^"')]+)""", style.read_text(encoding="utf-8"))
        assert [address for address in addresses if re.match(r"(?:https?:)?//", address)] == [], style


def test_cells_of_the_decision_map_are_still_so() -> None:
    """Three of the cheapest; `make bench-map` solves all of them."""
    page = (DOCS / "decision-map.md").read_text(encoding="utf-8")
    for model, column, devices in (("llama-3.2-1b", 0, 8), ("llama-3.1-8b", 0, 8), ("llama-3.1-70b", 0, 8)):
        line = next(line for line in page.splitlines() if line.startswith(f"| {model} |"))
        told = line.split("|")[2 + column].strip()
        kind, words = in_words(solved(model, SEQ_LEN, devices, seconds=600), devices)
        assert told == f"**{kind}** {words}".strip()
