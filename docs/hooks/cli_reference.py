"""What `make docs` adds to the page of commands: their options, written by typer from the commands themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

from shardwise.solver.cli import app

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

PAGE = "reference/cli.md"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put the options of every command below the text of the page."""
    if page.file.src_uri != PAGE:
        return markdown
    command = get_command(app)
    context = Context(command, info_name="shardwise")
    options = get_docs_for_click(obj=command, ctx=context, name="shardwise")
    return markdown + options.split("\n", 1)[1]  # its heading is that of the page
