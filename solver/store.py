"""The store of a batch: one SQLite file in a folder, written by many processes, read by pandas.

Three tables: `cells` has one row a finished cell, flat (`COLUMNS`); `documents` the whole result of the cell, the JSON of
`plan --json`, compressed; `claims` who is at work on what. A finished cell is one transaction over all three, so a process that
ends in the midst of it leaves nothing of it, and SQLite's write-ahead log leaves readers alone.

A claim belongs to an owner, a process that holds the lock of a small database of its own in `owners/` for as long as it
lives. The operating system drops the lock when the process ends, however it ends: claims of the dead are free at once, and
a process that is slow or stopped keeps its own. No clock is asked, so there is no lease to expire too early or too late.
The log of SQLite needs all processes on one machine; a batch on many has one driver that writes (`solver.ray_engine`).
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardwise.data.faults import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import pandas as pd

FILE, OWNERS = "store.sqlite", "owners"
APPLICATION_ID, FORMAT = 0x53574231, 1
BUSY_S = 60.0
"""How long a process waits for another one's transaction, each of which takes milliseconds."""
MAX_DOCUMENT_BYTES = 2**28
CELL_DIGITS = 32
"""Hexadecimal digits of the key of a cell."""

Claim = Literal["mine", "done", "taken"]


class Column(NamedTuple):
    """`dtype` is that of `load_store`."""

    name: str
    dtype: str
    what: str


COLUMNS = (
    Column("cell", "string", "key of the cell: a digest of instance, objective, search settings, seed and versions"),
    Column("model", "category", "as the model calls itself"),
    Column("cluster", "category", "as the cluster calls itself, `family:nodes` for one of the catalogue"),
    Column("family", "category", "`clusters` entry of the catalogue file"),
    Column("nodes", "Int64", "nodes of the cluster"),
    Column("devices", "Int64", "devices of the cluster"),
    Column("accelerator", "category", "type of the devices"),
    Column("params", "float64", "parameters of the model"),
    Column("active_params", "float64", "of these, those that one token touches"),
    Column("seq_len", "Int64", "tokens of a sequence"),
    Column("global_batch", "Int64", "sequences of a step"),
    Column("precision", "category", "of the matrix products"),
    Column("optimizer", "category", "of the workload"),
    Column("attention", "category", "kernel of attention"),
    Column("rules", "category", "rule pack and its version"),
    Column("profile", "category", "software constants"),
    Column("limits", "string", "limits of the user, separated by commas"),
    Column("objective", "category", "what was minimised or maximised"),
    Column("deadline_s", "float64", "longest step allowed, s"),
    Column("price_usd_per_hour", "float64", "of one device, given or of the catalogue"),
    Column("status", "category", "OPTIMAL, FEASIBLE, INFEASIBLE, UNKNOWN, or FAILED with its `reason`"),
    Column("value", "float64", "of the objective, in `unit`"),
    Column("bound", "float64", "proven, in `unit`"),
    Column("gap", "float64", "between value and bound, as a share"),
    Column("unit", "category", "of value and bound"),
    Column("sense", "category", "minimise or maximise"),
    Column("step_time_s", "float64", "of the plan, s"),
    Column("tokens_per_s", "float64", "of all devices"),
    Column("tokens_per_s_per_device", "float64", "of a device that the plan uses"),
    Column("model_flops_utilization", "float64", "as a share of the peak"),
    Column("joules_per_token", "float64", "at the wall, J"),
    Column("watts_per_device", "float64", "at the wall, mean over the step, W"),
    Column("usd_per_million_tokens", "float64", "at `price_usd_per_hour`, devices used only"),
    Column("devices_used", "Int64", "by the plan"),
    Column("idle_devices", "Int64", "left over"),
    Column("nodes_used", "Int64", "by the plan"),
    Column("dp", "Int64", "degree"),
    Column("tp", "Int64", "degree"),
    Column("pp", "Int64", "degree"),
    Column("cp", "Int64", "degree"),
    Column("ep", "Int64", "degree"),
    Column("etp", "Int64", "degree"),
    Column("vpp", "Int64", "chunks a stage"),
    Column("micro_batch", "Int64", "sequences"),
    Column("micro_batches", "Int64", "a step and replica"),
    Column("zero", "Int64", "ZeRO stage, 3 for FSDP"),
    Column("dp_replicate", "Int64", "whole copies among the replicas (HSDP)"),
    Column("cp_comm_type", "category", "algorithm of context parallelism"),
    Column("cp_a2a", "Int64", "ranks that exchange sequence for heads under a2a+p2p"),
    Column("sequence_parallel", "boolean", "with tensor parallelism"),
    Column("schedule", "category", "of the pipeline"),
    Column("recompute", "string", "modes of the stages, separated by commas"),
    Column("compute_s", "float64", "part of the step on its busiest stage, s; the next ones likewise"),
    Column("tensor_parallel_s", "float64", "exposed communication"),
    Column("context_parallel_s", "float64", "exposed communication"),
    Column("expert_parallel_s", "float64", "exposed communication"),
    Column("weight_gather_s", "float64", "exposed communication"),
    Column("host_s", "float64", "waiting for launches"),
    Column("recompute_s", "float64", "of activations"),
    Column("transfers_s", "float64", "between stages"),
    Column("fill_and_drain_s", "float64", "waiting for other stages"),
    Column("gradient_sync_s", "float64", "exposed communication"),
    Column("optimizer_s", "float64", "update of the weights"),
    Column("overhead_s", "float64", "of the framework"),
    Column("peak_memory_gb", "float64", "of the worst device, 10^9 bytes"),
    Column("capacity_gb", "float64", "of a device, within the limits of the user, 10^9 bytes"),
    Column("memory_verdict", "category", "fits or tight, by the band of the prediction"),
    Column("binds", "string", "limits that the plan sits on the edge of, separated by semicolons"),
    Column("alternatives", "Int64", "other layouts told of; missing where none were asked for"),
    Column("ties", "Int64", "of these, as good as the plan"),
    Column("expected_regret", "float64", "of the plan against its alternatives under drawn constants"),
    Column("reason", "string", "why there is no plan, or why the cell failed"),
    Column("candidates", "Int64", "degree tuples enumerated"),
    Column("solved", "Int64", "of these, closed by CP-SAT"),
    Column("time_limit_s", "float64", "missing without a limit"),
    Column("workers", "Int64", "of CP-SAT"),
    Column("seed", "Int64", "of CP-SAT and the draws of constants"),
    Column("wall_s", "float64", "that the cell took, s"),
    Column("cpu_s", "float64", "that the cell took, s"),
    Column("finished_at", "datetime64[ns, UTC]", "when the cell was stored"),
    Column("shardwise", "category", "version"),
    Column("ortools", "category", "version"),
    Column("numpy", "category", "version"),
    Column("python", "category", "version"),
    Column("machine", "category", "architecture"),
)

DATE: Literal["datetime64[ns, UTC]"] = "datetime64[ns, UTC]"

TAKEN = ("wall_s", "cpu_s", "finished_at")
"""Columns that tell of the run, not of the result: two runs of one cell differ in these alone."""

_SQL = {"Int64": "INTEGER", "boolean": "INTEGER", "float64": "REAL"}
_ORDER = "model, cluster, nodes, seq_len, global_batch, precision, objective, cell"


class Held(NamedTuple):
    """What the store knows of a finished cell."""

    status: str
    time_limit_s: float | None


class Store:
    """A store opened for writing, and the owner of what it claims. Use it as a context manager, in one thread.

    Parameters
    ----------
    folder
        Made where it is missing.
    max_pages
        Of the database; for tests of a full disk.

    Raises
    ------
    InputError
        From every method, when the folder or its file cannot be written or is not a store.
    """

    def __init__(self, folder: Path, *, max_pages: int | None = None) -> None:
        self.folder = folder
        self.owner = uuid.uuid4().hex
        with told(folder):
            (folder / OWNERS).mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._owner_file(self.owner))
        try:
            with told(folder):
                self._db = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None)
                self._create()
                if max_pages is not None:
                    self._db.execute(f"PRAGMA max_page_count = {max_pages}")
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(sqlite3.Error):  # the lock of the owner goes in any case, and the claims with it
            self._db.execute("DELETE FROM claims WHERE owner = ?", (self.owner,))
        self._db.close()
        self._unlock()

    def _create(self) -> None:
        """Make the tables of a new file; refuse a file that is something else."""
        if _is_new(self._db):
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                if _is_new(self._db):
                    columns = ", ".join(f"{c.name} {_SQL.get(c.dtype, 'TEXT')}" for c in COLUMNS[1:])
                    self._db.execute(f"CREATE TABLE cells (cell TEXT PRIMARY KEY, {columns}) WITHOUT ROWID")
                    self._db.execute("CREATE TABLE documents (cell TEXT PRIMARY KEY, document BLOB NOT NULL)")
                    self._db.execute("CREATE TABLE claims (cell TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID")
                    self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
        _check(self._db, self.folder)

    def held(self) -> dict[str, Held]:
        """Every finished cell."""
        with told(self.folder):
            return _held(self._db)

    def reasons(self) -> dict[str, str]:
        """Why cells failed."""
        with told(self.folder):
            return dict(self._db.execute("SELECT cell, reason FROM cells WHERE status = 'FAILED' ORDER BY cell"))

    def claim(self, cell: str, wanted: Callable[[Held | None], bool]) -> Claim:
        """Ask for a cell: "mine" to solve now, "done" where it is not `wanted` any more, "taken" by another living owner."""
        with told(self.folder), self._transaction():
            row = self._db.execute("SELECT status, time_limit_s FROM cells WHERE cell = ?", (cell,)).fetchone()
            if not wanted(None if row is None else Held(*row)):
                return "done"
            claimed = self._db.execute("SELECT owner FROM claims WHERE cell = ?", (cell,)).fetchone()
            if claimed is not None and claimed[0] != self.owner:
                if self._lives(claimed[0]):
                    return "taken"
                self._db.execute("DELETE FROM claims WHERE owner = ?", (claimed[0],))
            self._db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (cell, self.owner))
            return "mine"

    def finish(self, row: dict[str, Any], document: dict[str, Any]) -> None:
        """Keep a result; the row and its claim change together."""
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode())
        names = ", ".join(c.name for c in COLUMNS)
        marks = ", ".join(f":{c.name}" for c in COLUMNS)
        whole = dict.fromkeys((c.name for c in COLUMNS), None) | row
        whole["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        with told(self.folder), self._transaction():
            self._db.execute(f"INSERT OR REPLACE INTO cells ({names}) VALUES ({marks})", whole)
            self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (row["cell"], packed))
            self._db.execute("DELETE FROM claims WHERE cell = ? AND owner = ?", (row["cell"], self.owner))

    def release(self, cell: str) -> None:
        """Leave a cell to others."""
        with told(self.folder), self._transaction():
            self._db.execute("DELETE FROM claims WHERE cell = ? AND owner = ?", (cell, self.owner))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _owner_file(self, owner: str) -> Path:
        return self.folder / OWNERS / f"{owner}.lock"

    def _lives(self, owner: str) -> bool:
        """Whether the process of an owner still runs; the file of a dead one goes."""
        path = self._owner_file(owner)
        if not path.exists():
            return False
        try:
            _locked(path).close()
        except sqlite3.OperationalError:
            return True
        path.unlink(missing_ok=True)
        return False

    def _unlock(self) -> None:
        self._lock.close()
        self._owner_file(self.owner).unlink(missing_ok=True)


def _locked(path: Path) -> sqlite3.Connection:
    """A connection that holds the only lock of a database until it is closed or its process ends."""
    lock = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        lock.execute("PRAGMA journal_mode = MEMORY")  # so that no second file is left behind
        lock.execute("BEGIN EXCLUSIVE")
    except BaseException:
        lock.close()
        raise
    return lock


def _is_new(db: sqlite3.Connection) -> bool:
    return not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _check(db: sqlite3.Connection, folder: Path) -> None:
    """Refuse a database that is not a store of this format."""
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if application != APPLICATION_ID:
        raise InputError(f"store {folder}: {FILE} is a database, but not a store of shardwise")
    if version != FORMAT:
        raise InputError(f"store {folder}: {FILE} has format {version}; this release reads format {FORMAT}")


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Faults of the file in words, under the name of the folder."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"store {folder}: {_in_words(error)}") from None
    except OSError as error:
        raise InputError(f"store {folder}: cannot be written: {error.strerror}") from None


def _in_words(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "")
    kept = "finished cells are kept and can be read"
    if name == "SQLITE_FULL":
        return f"the disk is full; {kept}"
    if name.startswith("SQLITE_IOERR"):
        return f"{FILE} cannot be written or read ({error}; the disk may be full); {kept}"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"{FILE} cannot be written ({error}): check who owns the folder and its files"
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return f"{FILE} is not a store, or is damaged ({error})"
    return f"{FILE}: {error}"


def _reading(folder: Path) -> sqlite3.Connection:
    """A connection that cannot write, to a store that may lie in a folder that nobody can write."""
    path = folder / FILE
    if not path.is_file():
        raise InputError(f"store {folder}: there is no {FILE}; `shardwise batch --store` makes one")
    uri = path.absolute().as_uri()
    with told(folder):
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=BUSY_S)
        try:
            _check(db, folder)
        except sqlite3.OperationalError:
            db.close()
            # Without a log beside it the file is all there is, and SQLite need not make the log that it may not make.
            log = path.with_name(f"{FILE}-wal")
            if log.exists() and log.stat().st_size:
                raise
            db = sqlite3.connect(f"{uri}?immutable=1", uri=True)
            _check(db, folder)
        except BaseException:
            db.close()
            raise
    return db


def finished_cells(folder: Path) -> dict[str, Held]:
    """Every finished cell of a store, which is only read."""
    with contextlib.closing(_reading(folder)) as db, told(folder):
        return _held(db)


def _held(db: sqlite3.Connection) -> dict[str, Held]:
    rows = db.execute("SELECT cell, status, time_limit_s FROM cells").fetchall()
    return {cell: Held(status, limit) for cell, status, limit in rows}


def of_store(path: Path) -> bool:
    """Whether a path names a cell of a store, as STORE/CELL, and no file."""
    return not path.exists() and (path.parent / FILE).is_file()


def load_store(folder: str | Path) -> pd.DataFrame:
    """The finished cells of a batch, one row each, ordered by model, cluster and workload.

    Parameters
    ----------
    folder
        That of `shardwise batch --store`; a batch may be writing to it.

    Returns
    -------
    pandas.DataFrame
        Columns and dtypes of `COLUMNS`, docs/batch.md, whatever the cells hold; `df.to_parquet` keeps them.

    Raises
    ------
    InputError
        When there is no store, or it cannot be read.
    """
    import pandas as pd

    folder = Path(folder)
    names = [c.name for c in COLUMNS]
    with contextlib.closing(_reading(folder)) as db, told(folder):
        rows = db.execute(f"SELECT {', '.join(names)} FROM cells ORDER BY {_ORDER}").fetchall()
    values = zip(*rows, strict=True) if rows else ([] for _ in names)
    return pd.DataFrame({c.name: _series(list(own), c.dtype) for c, own in zip(COLUMNS, values, strict=True)})


def _series(values: Collection[Any], dtype: str) -> pd.Series[Any]:
    import pandas as pd

    if dtype.startswith("datetime64"):
        return pd.Series(pd.to_datetime(list(values), utc=True, format="ISO8601")).astype(DATE)
    if dtype == "boolean":
        values = [None if value is None else bool(value) for value in values]
    return pd.Series(values, dtype=dtype)


def stored_result(folder: str | Path, cell: str) -> dict[str, Any]:
    """The document of one cell, as `plan --json` writes it; the first digits of its key are enough.

    Raises
    ------
    InputError
        When there is no store, or no such cell, or more than one.
    """
    folder = Path(folder)
    if not cell or len(cell) > CELL_DIGITS or set(cell) - set("0123456789abcdef"):
        raise InputError(f"store {folder}: cell {cell!r:.40} must be digits of a key, such as the column `cell` has")
    with contextlib.closing(_reading(folder)) as db, told(folder):
        found = db.execute(
            "SELECT cell, document FROM documents WHERE cell >= ? AND cell < ? LIMIT 2", (cell, cell + "g")
        ).fetchall()
    if len(found) != 1:
        raise InputError(f"store {folder}: {'more than one' if found else 'no'} cell begins with {cell}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(found[0][1], MAX_DOCUMENT_BYTES)
        document = json.loads(text) if unpacker.eof else None
    except (zlib.error, ValueError, TypeError):
        document = None
    if not isinstance(document, dict):
        raise InputError(f"store {folder}: the document of cell {found[0][0]} is damaged")
    return document
