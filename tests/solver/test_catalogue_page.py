"""The page of a store: its data against pandas, and what a browser shows of it after every kind of click."""

from __future__ import annotations

import json
import re
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import HOSTILE, Page, asks_for_nothing, driven, needs_chromium, opened
from typer.testing import CliRunner

import shardwise as sw
from shardwise.solver.cli import app
from shardwise.solver.report import MAX_PAGE_BYTES, catalogue, catalogue_page
from shardwise.solver.report.catalogue import FIGURES, TABLE
from shardwise.solver.store import COLUMNS, DATE, Store

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

CATALOGUE = """
name = "pages"
models = ["llama-3.2-1b"]
clusters = ["dgx-a100", "dgx-h100"]
nodes = [1, 2]
seq_lens = [2048]
global_batches = [32]
precisions = ["bf16", "fp8"]
objectives = ["step-time", "cost"]
limits = ["pp=1"]

[[grid]]

[[grid]]
models = ["llama-3.1-405b"]
nodes = [1]
precisions = ["bf16"]
"""
SECTIONS = ("headline", "filters", "matrix", "plot", "cells")
MANY = 10_000
DIGITS_KEPT = 1e-5


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 cells really solved: optimal ones, ones that fit nowhere, and ones of a precision that A100 has not."""
    folder = tmp_path_factory.mktemp("catalogue")
    (folder / "pages.toml").write_text(CATALOGUE)
    assert sw.batch(folder / "pages.toml", folder / "runs").finished
    return folder / "runs"


@pytest.fixture(scope="module")
def cells(store: Path) -> pd.DataFrame:
    found = sw.load_store(store)
    assert set(found.status.unique()) == {"OPTIMAL", "INFEASIBLE", "FAILED"}
    return found


@pytest.fixture(scope="module")
def page(cells: pd.DataFrame, store: Path) -> str:
    return catalogue_page(cells, str(store))


@pytest.fixture(scope="module")
def many(cells: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Copies of the solved cells under other names, with other figures in every column of them."""
    rows = cells.drop(columns="finished_at").astype(object)
    solved: list[dict[str, Any]] = rows.where(rows.notna(), None).to_dict("records")  # type: ignore[assignment]
    figures = [column.name for column in COLUMNS if column.dtype == "float64"]
    random = Random(0)
    folder = tmp_path_factory.mktemp("many")
    with Store(folder) as kept:
        for index in range(MANY):
            row = dict(random.choice(solved))
            model, nodes = f"model-{index % 40}", 2 ** (index // 40 % 8)
            row |= {"cell": f"{random.getrandbits(128):032x}", "model": model, "nodes": nodes, "devices": 8 * nodes}
            row |= {"cluster": f"{row['family']}:{nodes}", "seq_len": random.choice((4096, 8192, 131072))}
            row |= {name: random.uniform(0.3, 3) * row[name] for name in figures if row[name] is not None}
            if row["dp"] is not None:
                row |= {"dp": 2 ** random.randint(0, 9), "sequence_parallel": int(row["sequence_parallel"])}
            kept.finish(row, {})
    return sw.load_store(folder)


@pytest.fixture(scope="module")
def many_page(many: pd.DataFrame) -> str:
    return catalogue_page(many, "runs")


def held(text: str) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def unpacked(data: dict[str, Any], name: str) -> list[Any]:
    column = data["columns"][name]
    if "levels" not in column:
        return list(column.get("numbers", column.get("texts")))
    codes = column["codes"] if isinstance(column["codes"], list) else [column["codes"]] * data["cells"]
    return [None if code < 0 else column["levels"][code] for code in codes]


@pytest.mark.parametrize("which", ["cells", "many"])
def test_the_page_holds_what_the_store_holds(which: str, request: pytest.FixtureRequest) -> None:
    cells: pd.DataFrame = request.getfixturevalue(which)
    data = held(request.getfixturevalue("many_page" if which == "many" else "page"))
    assert data["cells"] == len(cells)
    for column in COLUMNS:
        shown = unpacked(data, column.name)
        series = cells[column.name]
        assert [value is None for value in shown] == series.isna().tolist(), column.name
        known = series.dropna().tolist()
        told = [value for value in shown if value is not None]
        if column.dtype == "float64":
            tolerance = 1e-3 if column.name.endswith("_s") else DIGITS_KEPT
            np.testing.assert_allclose(told, known, rtol=tolerance, atol=1e-12, err_msg=column.name)
        elif column.dtype == DATE:
            assert told == [value.isoformat() for value in known]
        elif column.name == "cell":
            assert len(set(told)) == len(cells)
            assert all(whole.startswith(short) for whole, short in zip(known, told, strict=True))
        else:
            assert told == known, column.name


def test_degrees_are_those_that_commands_print(cells: pd.DataFrame, page: str) -> None:
    shown = unpacked(held(page), "degrees")
    for index, row in enumerate(cells.itertuples()):
        if row.status != "OPTIMAL":
            assert shown[index] is None
            continue
        assert (
            f"tp={row.tp}{' sp' if row.sequence_parallel else ''} pp={row.pp} vpp={row.vpp} dp={row.dp} "
            in shown[index]
        )


def test_names_with_numbers_stand_in_their_order(many_page: str) -> None:
    levels = held(many_page)["columns"]
    assert levels["model"]["levels"][:3] == ["model-0", "model-1", "model-2"]
    assert [name.rpartition(":")[2] for name in levels["cluster"]["levels"][:8]] == [str(2**n) for n in range(8)]


def test_sections_captions_scopes_and_labels_are_there(page: str) -> None:
    found = Page(page)
    assert tuple(section["id"] for section in found.all("section")) == SECTIONS
    assert asks_for_nothing(page)
    heads = found.all("th")
    assert len(heads) > len(TABLE)
    assert all("scope" in head for head in heads)
    labelled = {label["for"] for label in found.all("label")}
    controls = {control["id"] for tag in ("select", "input") for control in found.all(tag)}
    assert controls == labelled
    assert {"filter-model", "filter-status", "filter-binds", "filter-precision", "words", "most-devices"} < controls
    assert "filter-optimizer" not in controls  # all cells have the same
    assert len([tag for tag, given in found.tags if given.get("role") == "status"]) == 2
    assert len(found.all("noscript")) == 1


def test_hostile_names_come_out_as_text(cells: pd.DataFrame, tmp_path: Path) -> None:
    hostile = cells.copy()
    for name in ("model", "cluster", "family", "binds", "reason", "limits", "rules"):
        hostile[name] = [HOSTILE, *hostile[name].astype(object)[1:]]
    text = catalogue_page(hostile, str(tmp_path / HOSTILE.replace("/", "")))
    found = Page(text)
    kinds = [script.get("type") for script in found.all("script")]
    assert kinds == ["application/json", None]
    assert not found.all("img")
    assert not [attributes for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert HOSTILE in unpacked(held(text), "model")
    assert "{{ 7 * 7 }}" in "".join(found.words)


def test_ten_thousand_cells_take_less_than_the_largest_page(many_page: str) -> None:
    assert held(many_page)["cells"] == MANY
    assert len(many_page.encode()) < MAX_PAGE_BYTES


def test_a_page_that_would_be_too_large_is_refused(cells: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MAX_CATALOGUE_BYTES", 10_000)
    with pytest.raises(sw.InputError, match="store runs: the page of 20 cells would be larger than 10,000 bytes"):
        catalogue_page(cells, "runs")


def test_report_takes_a_store_and_a_cell_of_it(cells: pd.DataFrame, store: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(
        app, ["report", str(store), "-o", str(tmp_path / "i.html"), "--json", str(tmp_path / "i.json")]
    )
    assert done.exit_code == 0
    assert "bytes" in done.output
    statuses = json.loads((tmp_path / "i.json").read_text())
    assert statuses == {"store": str(store), "cells": 20, "statuses": cells.status.value_counts().to_dict()}
    assert Page((tmp_path / "i.html").read_text()).values["status_OPTIMAL"] == [(cells.status == "OPTIMAL").sum()]
    key = cells.cell[(cells.status == "OPTIMAL") & (cells.objective == "cost")].iloc[0][:12]
    assert runner.invoke(app, ["report", f"{store}/{key}", "-o", str(tmp_path / "c.html")]).exit_code == 0
    text = (tmp_path / "c.html").read_text()
    assert "USD per million tokens" in text
    assert "does not match" not in text


def test_an_empty_store_has_a_page_and_no_store_has_none(tmp_path: Path) -> None:
    with Store(tmp_path / "empty"):
        pass
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(tmp_path / "empty"), "-o", str(tmp_path / "i.html")])
    assert done.exit_code == 0, done.output
    assert "no finished cell yet" in (tmp_path / "i.html").read_text()
    assert held((tmp_path / "i.html").read_text())["cells"] == 0
    (tmp_path / "other").mkdir()
    assert runner.invoke(app, ["report", str(tmp_path / "other"), "-o", str(tmp_path / "j.html")]).exit_code == 2


SET = """
const set = (id, value) => {
  const control = document.getElementById(id);
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
};
const pick = (id, text) => {
  const option = [...document.getElementById(id).options].find((one) => one.textContent === text);
  set(id, option.value);
};
const words = (row) => [...row.cells].map((box) => box.textContent);
const rows = (id = "cells-table") => [...document.getElementById(id).tBodies[0].rows].map(words);
const text = (id) => document.getElementById(id).textContent;
const click = (selector) => document.querySelector(selector).click();
"""


@needs_chromium
class TestInABrowser:
    def test_the_page_as_written_logs_nothing_and_draws_every_section(self, page: str, tmp_path: Path) -> None:
        shown, logged = opened(page, tmp_path)
        assert logged == ""
        found = Page(shown)
        assert tuple(section["id"] for section in found.all("section")) == SECTIONS
        assert len(found.all("caption")) == len(found.all("table"))
        assert len(found.all("circle")) > 1
        assert len([button for button in found.all("button") if "data-cell" in button]) > 24

    def test_filters_let_through_what_pandas_does(self, cells: pd.DataFrame, page: str, tmp_path: Path) -> None:
        script = (
            SET
            + """
        seen.start = [text("count"), rows().length];
        pick("filter-model", "llama-3.2-1b");
        pick("filter-precision", "bf16");
        seen.two = [text("count"), rows().length];
        set("most-devices", "4");
        seen.few = [text("count"), rows().length];
        click("#show-all");
        seen.again = [text("count"), rows().length];
        pick("filter-status", "with a plan");
        seen.planned = rows().map((row) => row[7]);
        pick("filter-status", "INFEASIBLE");
        seen.reasons = rows().map((row) => row.at(-1));
        click("#show-all");
        set("words", "a100 FP8");
        seen.words = [text("count"), rows().length];
        set("words", "no-such-word");
        seen.nothing = [text("count"), rows().length, text("page-of"), document.querySelectorAll("circle").length];
        set("words", "");
        pick("filter-binds", "devices");
        seen.binds = rows().map((row) => row.at(-2));
        """
        )
        found = driven(page, script, tmp_path)
        assert found["errors"] == []
        assert found["start"] == found["again"] == ["20 of 20 cells", 20]
        two = cells[(cells.model == "llama-3.2-1b") & (cells.precision == "bf16")]
        assert found["two"] == [f"{len(two)} of 20 cells: model llama-3.2-1b, precision bf16", len(two)]
        few = two[two.devices_used <= 4]
        assert found["few"][1] == len(few)
        assert 0 < len(few) < len(two)
        assert found["planned"] == ["OPTIMAL"] * (cells.status == "OPTIMAL").sum()
        assert found["reasons"] == cells.reason[cells.status == "INFEASIBLE"].tolist()
        words = cells[cells.cluster.str.contains("a100") & (cells.precision == "fp8")]
        assert found["words"] == [f"{len(words)} of 20 cells: with a100 fp8", len(words)]
        assert found["nothing"] == ["0 of 20 cells: with no-such-word", 0, "no rows", 0]
        bound = cells.binds.fillna("").str.split("; ").map(lambda parts: "devices" in parts)
        assert found["binds"] == cells.binds[bound].tolist()
        assert bound.any()

    def test_headers_sort_by_exact_values_with_what_is_missing_last(
        self, many: pd.DataFrame, many_page: str, tmp_path: Path
    ) -> None:
        names = [column.name for column in TABLE]
        script = (
            SET
            + """
        set("per-page", "500");
        seen.sorted = {};
        for (const name of ["tokens_per_s", "cluster", "usd_per_million_tokens"]) {
          const head = document.querySelector(`#cells-table button[data-column=${name}]`);
          for (let turn = 0; turn < 2; turn++) {
            head.click();
            const way = head.parentElement.getAttribute("aria-sort");
            seen.sorted[`${name} ${way}`] = rows().map((row) => row[head.parentElement.cellIndex]);
          }
        }
        seen.marked = document.querySelectorAll("#cells-table [aria-sort]").length;
        for (let turn = 0; turn < 30; turn++) click("#next");
        seen.last = [text("page-of"), rows().length, document.getElementById("next").disabled];
        seen.end = rows().at(-1);
        click("#previous");
        seen.before = text("page-of");
        """
        )
        found = driven(many_page, script, tmp_path, 1200)
        assert found["errors"] == []
        assert found["marked"] == 1
        for name in ("tokens_per_s", "usd_per_million_tokens"):
            for way, ascending in (("ascending", True), ("descending", False)):
                told = [float(value.replace(",", "")) for value in found["sorted"][f"{name} {way}"]]
                wanted = many[name].dropna().sort_values(ascending=ascending)[:500].tolist()
                assert told == pytest.approx(wanted, rel=1e-3)
        clusters = found["sorted"]["cluster ascending"]
        assert clusters == ["dgx-a100:1"] * 500
        assert found["sorted"]["cluster descending"][0] == "dgx-h100:128"
        assert found["last"] == ["rows 9,501 to 10,000 of 10,000", 500, True]
        assert found["end"][names.index("usd_per_million_tokens")] == ""
        assert found["before"] == "rows 9,001 to 9,500 of 10,000"

    def test_matrix_and_plot_show_the_best_of_each_group(
        self, many: pd.DataFrame, many_page: str, tmp_path: Path
    ) -> None:
        script = (
            SET
            + """
        const told = (one) => [one.getAttribute("aria-label"), Number(one.dataset.cell)];
        const best = (name) => [...document.querySelectorAll(name)].map(told);
        set("matrix-figure", "tokens_per_s");
        set("matrix-rows", "family");
        set("matrix-columns", "devices");
        seen.matrix = best("#matrix-table tbody button");
        seen.caption = document.getElementById("matrix-table").caption.textContent;
        set("plot-series", "seq_len");
        seen.plot = [...document.querySelectorAll("#plot-drawing circle")].map((one) => Number(one.dataset.cell));
        seen.table = best("#plot-table tbody button").map(([, cell]) => cell);
        set("plot-series", "model");
        seen.note = text("plot-note");
        """
        )
        found = driven(many_page, script, tmp_path, 1200)
        assert found["errors"] == []
        assert found["caption"] == "tokens per second, cluster families by devices"
        groups = many[many.status == "OPTIMAL"].groupby(["family", "devices"], observed=True).tokens_per_s
        assert [many.tokens_per_s[cell] for _, cell in found["matrix"]] == pytest.approx(
            groups.max().tolist(), rel=1e-5
        )
        per_row = [label for label, _ in found["matrix"] if "best of the row" in label]
        assert len(per_row) == many.family.nunique()
        points = many[many.status == "OPTIMAL"].groupby(["seq_len", "devices"]).usd_per_million_tokens.min()
        assert found["plot"] == found["table"]
        assert [many.usd_per_million_tokens[cell] for cell in found["plot"]] == pytest.approx(points.tolist(), rel=1e-5)
        assert "The first 12 of 40 models are drawn" in found["note"]

    def test_every_figure_and_axis_can_be_chosen(self, page: str, tmp_path: Path) -> None:
        script = (
            SET
            + """
        seen.drawn = [];
        const count = (name) => document.querySelectorAll(name).length;
        for (const id of ["matrix-figure", "matrix-rows", "matrix-columns", "plot-figure", "plot-across", "plot-series"])
          for (const option of document.getElementById(id).options) {
            set(id, option.value);
            seen.drawn.push(count("#matrix-table button") * count("circle"));
          }
        """
        )
        found = driven(page, script, tmp_path)
        assert found["errors"] == []
        assert len(found["drawn"]) > 2 * len(FIGURES)
        assert all(found["drawn"])

    def test_a_cell_opens_with_its_row_and_commands_and_gives_the_focus_back(
        self, cells: pd.DataFrame, page: str, tmp_path: Path
    ) -> None:
        script = (
            SET
            + """
        const dialog = document.getElementById("cell");
        const open = (row) => {
          const button = document.querySelectorAll("#cells-table tbody button")[row];
          button.focus();
          button.click();
          const told = { open: dialog.open, said: text("cell-result"), commands: text("cell-commands") };
          told.rows = Object.fromEntries(rows("cell-table"));
          dialog.close();
          return { ...told, back: document.activeElement === button };
        };
        seen.cells = [...document.querySelectorAll("#cells-table tbody button")].map((_, row) => open(row));
        click("#matrix-table tbody button");
        seen.matrix = [dialog.open, text("cell-heading")];
        """
        )
        found = driven(page, script, tmp_path)
        assert found["errors"] == []
        assert found["matrix"][0]
        for told, row, key in zip(found["cells"], cells.itertuples(), cells.cell.str[:12], strict=True):
            assert told["open"]
            assert told["back"]
            assert told["rows"]["status"] == row.status
            assert f"shardwise report runs/{key} -o cell.html" in told["commands"]
            if row.status == "OPTIMAL":
                assert float(told["rows"]["tokens_per_s"]) == pytest.approx(row.tokens_per_s, rel=DIGITS_KEPT)
                assert f"shardwise export runs/{key} --to" in told["commands"]
            else:
                assert row.reason in told["said"]
                assert "export" not in told["commands"]

    def test_a_store_without_cells_is_drawn_too(self, cells: pd.DataFrame, tmp_path: Path) -> None:
        found = driven(catalogue_page(cells[:0], "runs"), SET + "seen.end = [text('count'), text('page-of')]", tmp_path)
        assert found == {"errors": [], "end": ["0 of 0 cells", "no rows"]}

    def test_a_phone_scrolls_tables_and_not_the_page(self, page: str, tmp_path: Path) -> None:
        assert driven(page, "seen.wide = document.documentElement.scrollWidth", tmp_path)["wide"] <= 500

    def test_hostile_names_run_nothing(self, cells: pd.DataFrame, tmp_path: Path) -> None:
        hostile = cells.copy()
        for name in ("model", "cluster", "reason", "binds"):
            hostile[name] = [HOSTILE, *hostile[name].astype(object)[1:]]
        shown, logged = opened(catalogue_page(hostile, "runs"), tmp_path)
        assert logged == ""
        assert not Page(shown).all("img")
        assert HOSTILE in "".join(Page(shown).words)
