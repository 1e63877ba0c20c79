from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import shardwise as sw
from shardwise.solver import store as stores
from shardwise.solver.store import COLUMNS, FILE, Held, Store, load_store, stored_result

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"


def absent(held: Held | None) -> bool:
    return held is None


def row(index: int, **values: Any) -> dict[str, Any]:
    return {"cell": f"{index:032x}", "model": "m", "status": "OPTIMAL", "value": 1.5 * index} | values


def filled(folder: Path, count: int) -> Path:
    with Store(folder) as store:
        for index in range(count):
            store.finish(row(index, dp=index, sequence_parallel=index % 2), {"status": "OPTIMAL", "value": index})
    return folder


def test_the_table_has_the_documented_columns_and_dtypes(tmp_path: Path) -> None:
    text = (DOCS / "batch.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert documented == [tuple(column) for column in COLUMNS]
    for count in (0, 3):
        table = load_store(filled(tmp_path / str(count), count))
        assert len(table) == count
        assert [(name, str(dtype)) for name, dtype in table.dtypes.items()] == [(c.name, c.dtype) for c in COLUMNS]


def test_a_stored_result_is_found_by_the_first_digits_of_its_key(tmp_path: Path) -> None:
    filled(tmp_path, 20)
    assert stored_result(tmp_path, f"{7:032x}")["value"] == 7
    with Store(tmp_path) as store:
        store.finish({"cell": "ab" + "0" * 30, "status": "FAILED"}, {"status": "UNKNOWN"})
    assert stored_result(tmp_path, "ab") == {"status": "UNKNOWN"}
    for cell, told in (("0", "more than one"), ("c", "no cell"), ("xy", "digits"), ("", "digits")):
        with pytest.raises(sw.InputError, match=told):
            stored_result(tmp_path, cell)


def test_a_table_reads_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a store of 10,000 cells quick to open: benchmarks/store.py has the seconds."""
    filled(tmp_path, 50)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as db, db:
        db.execute("UPDATE documents SET document = x'00'")
    asked: list[str] = []
    reading = stores._reading

    def traced(folder: Path) -> sqlite3.Connection:
        db = reading(folder)
        db.set_trace_callback(asked.append)
        return db

    monkeypatch.setattr(stores, "_reading", traced)
    assert len(load_store(tmp_path)) == 50
    assert len(asked) == 1
    with pytest.raises(sw.InputError, match="damaged"):
        stored_result(tmp_path, f"{7:032x}")


def test_a_table_goes_through_parquet_and_keeps_its_dtypes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = load_store(filled(tmp_path, 5))
    table.to_parquet(tmp_path / "t.parquet")
    again = pd.read_parquet(tmp_path / "t.parquet")
    plain = [c.name for c in COLUMNS if c.dtype != "category"]  # empty categories come back as another kind of nothing
    pd.testing.assert_frame_equal(again[plain], table[plain])
    assert again.status.tolist() == table.status.tolist()


def test_pandas_reads_the_file_itself(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert pd.read_sql("SELECT dp FROM cells WHERE value > 1 ORDER BY dp", db).dp.tolist() == [1, 2]


def test_a_cell_belongs_to_one_owner_until_it_is_done_or_left(tmp_path: Path) -> None:
    with Store(tmp_path) as a, Store(tmp_path) as b:
        assert a.claim("aa", absent) == "mine"
        assert b.claim("aa", absent) == "taken"
        assert b.claim("bb", absent) == "mine"
        a.release("aa")
        assert b.claim("aa", absent) == "mine"
        b.finish(row(0xAA) | {"cell": "aa"}, {})
        assert a.claim("aa", absent) == "done"
        assert a.claim("bb", absent) == "taken"
    with Store(tmp_path) as c:
        assert c.claim("bb", absent) == "mine"  # whoever closes a store leaves its claims
    assert not list((tmp_path / "owners").iterdir())


OWNER = """
import sys, time
from pathlib import Path
from shardwise.solver.store import Store
store = Store(Path(sys.argv[1]))
print(store.claim("aa", lambda held: held is None), flush=True)
time.sleep(600)
"""


def test_claims_of_a_killed_owner_are_free_and_those_of_a_stopped_one_are_not(tmp_path: Path) -> None:
    with Store(tmp_path) as mine:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        owner.send_signal(signal.SIGSTOP)
        assert mine.claim("aa", absent) == "taken"
        owner.kill()
        owner.wait()
        owner.stdout.close()
        assert mine.claim("aa", absent) == "mine"
        assert len(list((tmp_path / "owners").iterdir())) == 1


def test_a_full_disk_keeps_every_finished_cell(tmp_path: Path) -> None:
    stored, told = 0, ""
    with Store(tmp_path, max_pages=60) as store:
        while not told:
            try:
                store.claim(f"{stored:032x}", absent)
                store.finish(row(stored), {"text": os.urandom(500).hex()})
                stored += 1
            except sw.InputError as error:
                told = str(error)
    assert told == f"store {tmp_path}: the disk is full; finished cells are kept and can be read"
    assert stored
    assert load_store(tmp_path).value.tolist() == [1.5 * index for index in range(stored)]
    with Store(tmp_path) as store:
        assert store.claim(f"{stored:032x}", absent) == "mine"


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions do not bind root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_told_and_can_be_read() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        filled(folder, 4)
        folder.chmod(0o555)
        (folder / FILE).chmod(0o444)
        (folder / "owners").chmod(0o555)
        with unprivileged():
            for where in (folder, folder / "new"):
                with pytest.raises(sw.InputError, match=re.escape(str(where)) + ".*cannot be"):
                    Store(where)
            assert len(load_store(folder)) == 4
            assert stored_result(folder, f"{2:032x}")["value"] == 2
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path, told: str) -> None:
        for use in (load_store, Store):
            with pytest.raises(sw.InputError, match=told) as error:
                use(folder)
            assert str(folder) in str(error.value)

    with pytest.raises(sw.InputError, match="there is no"):
        load_store(tmp_path / "nothing")
    text = tmp_path / "text"
    text.mkdir()
    (text / FILE).write_text("not a database, and long enough to be told from an empty one" * 100)
    refused(text, "not a store")
    other = tmp_path / "other"
    other.mkdir()
    with contextlib.closing(sqlite3.connect(other / FILE)) as db, db:
        db.execute("CREATE TABLE cells (cell TEXT)")
    refused(other, "not a store of shardwise")
    newer = filled(tmp_path / "newer", 1)
    with contextlib.closing(sqlite3.connect(newer / FILE)) as db:
        db.execute("PRAGMA user_version = 99")
    refused(newer, "format 99")
    damaged = filled(tmp_path / "damaged", 200)
    content = bytearray((damaged / FILE).read_bytes())
    content[4096 * 2 :] = os.urandom(len(content) - 4096 * 2)
    (damaged / FILE).write_bytes(content)
    with pytest.raises(sw.InputError, match="damaged"):
        load_store(damaged)
    with pytest.raises(sw.InputError, match="cannot be written"):
        Store(Path(os.devnull) / "store")


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    with Store(tmp_path) as store, store._transaction():
        assert len(load_store(tmp_path)) == 3
