"""Stores the entries of a score cache in one SQLite file, which several workers of one machine share.

Owns the connection. Blocking: waits at most five seconds for the file, until its other users unblock it. SQLite's
journal keeps the file intact when one of them is killed. A file that is locked, broken, another program's, or on a full
disk costs entries, and raises nothing. A file that stays locked is given up, because every attempt takes five seconds.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from omni_async.config.reading import require_file, require_plain

_APPLICATION = 0x6F614331  # marks our files, so that no other program's database is written to
_TABLE = "CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB)"
_LOCK_S = 5.0
_MOST_ASKED = 500  # keys in one query
_LARGEST = 2**18  # bytes of an entry: a text, and 256 parts with their names
_MOST_LOCKED = 3  # times that the file may be locked without a write in between
_MOST_ROUNDS = 8  # of deleting as many entries as were added


class ScoreFile:
    """Entries by key. The file is opened at the first call, and given up when it is unusable.

    For one thread at a time. `problem`: why the file was given up, otherwise None."""

    def __init__(self, path: Path, bound: int) -> None:
        self.problem: str | None = None
        self._path, self._bound, self._locked = path, bound, 0
        self._database: sqlite3.Connection | None = None

    def get(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """Return the entries found."""
        found: dict[bytes, bytes] = {}
        try:
            if (database := self._opened()) is not None:
                for start in range(0, len(keys), _MOST_ASKED):
                    some = keys[start : start + _MOST_ASKED]
                    marks = ",".join("?" * len(some))
                    asked = f"SELECT key, value FROM scores WHERE key IN ({marks}) AND length(value) <= {_LARGEST}"
                    rows = database.execute(asked, some)
                    found |= {key: value for key, value in rows if isinstance(value, bytes)}  # damage may change types
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
        return found

    def put(self, entries: Mapping[bytes, bytes]) -> None:
        """Add entries, all of them or none; delete the oldest if the file would grow beyond its bound."""
        try:
            if (database := self._opened()) is not None:
                with database:
                    database.executemany("INSERT OR REPLACE INTO scores (key, value) VALUES (?, ?)", entries.items())
                    self._make_room(database, len(entries))
                self._locked = 0
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _opened(self) -> sqlite3.Connection | None:
        if self._database is None and self.problem is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self._path):  # SQLite opens pipes and devices, too
                require_file(self._path)
            real = os.path.realpath(self._path)
            for beside in (f"{real}-journal", f"{real}-wal", f"{real}-shm"):  # SQLite writes through such links, too
                if os.path.lexists(beside):
                    require_plain(os.lstat(beside), beside)
            database = sqlite3.connect(self._path, timeout=_LOCK_S, check_same_thread=False)
            try:
                self._prepare(database)
            except BaseException:
                database.close()
                raise
            self._database = database
        return self._database

    @staticmethod
    def _prepare(database: sqlite3.Connection) -> None:
        database.text_factory = bytes  # a damaged entry may be a text that is not UTF-8
        # Read the tables first: a worker that is creating the file marks it before it adds a table. Reading views,
        # virtual tables, columns and indexes can run code; so can triggers on writing.
        own = f"name = 'scores' AND sql = '{_TABLE}' OR name = 'sqlite_autoindex_scores_1' AND sql IS NULL"
        [odd] = database.execute(f"SELECT count(*) FROM sqlite_master WHERE ({own}) IS NOT TRUE").fetchone()
        [tables] = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        [application] = database.execute("PRAGMA application_id").fetchone()
        if odd or (application != _APPLICATION and (application or tables)):
            raise sqlite3.DatabaseError("it is the database of another program")
        with suppress(sqlite3.OperationalError):  # another worker is switching it; SQLite does not wait
            database.execute("PRAGMA journal_mode = WAL").close()
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA application_id = {_APPLICATION}")
        database.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
        database.commit()

    def _make_room(self, database: sqlite3.Connection, count: int) -> None:
        """Delete the oldest entries while the file is too large, `count` at a time.

        Deletes at most a small multiple of the added entries, because other workers wait meanwhile."""
        for _ in range(_MOST_ROUNDS):
            if self._used(database) <= self._bound:
                return
            database.execute("DELETE FROM scores WHERE id IN (SELECT id FROM scores ORDER BY id LIMIT ?)", [count])

    @staticmethod
    def _used(database: sqlite3.Connection) -> int:
        """Return the bytes of the pages in use; pages of deleted entries are reused."""
        asked = ("page_count", "freelist_count", "page_size")
        count, free, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in asked)
        return int((count - free) * size)

    def _failed(self, error: Exception) -> None:
        """Give the file up, unless it is locked only now and then."""
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            self._locked += 1
            if self._locked < _MOST_LOCKED:
                return
        self.problem = f"{self._path}: {error}"
        self.close()
