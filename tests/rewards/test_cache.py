"""Tests the score cache: it is bounded, shared by processes, and no damage to it becomes a score."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from hashlib import blake2b

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config import reward as sections
from omni_async.media import Media
from omni_async.rewards.cache import ScoreCache, digest_of, identity_of, key_of
from omni_async.rewards.score_file import ScoreFile
from omni_async.rewards.scorers.jpeg_size import JpegSizeScorer
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, PromptImage, Score
from tests.runtime.runtime_world import write_world

SCORE = Score(0.25, {"a": 1.0}, "read", (2.0,))


async def silent(text): ...


def cache(path=None, report=silent, **config):
    return ScoreCache(sections.ScoreCache(path=None if path is None else str(path), **config), Threads("cache"), report)


def key(number):
    return number.to_bytes(16, "little")


@pytest.fixture
def written(tmp_path):
    """A file with one entry."""
    kept = cache(tmp_path / "scores", memory=0)
    kept.put({key(0): SCORE})
    kept.close()
    return tmp_path / "scores"


def long(numbers):
    return {key(number): Score(1.0, text="x" * 2000) for number in numbers}


def test_the_newest_answers_stay_in_memory_and_those_that_were_used():
    kept = cache(memory=1000)
    kept.put({key(0): SCORE, key(1): SCORE})
    for number in range(2, 50):
        kept.put({key(number): SCORE})
        assert kept.get([key(0)]) == {key(0): SCORE}
    found = kept.get([key(number) for number in range(50)])
    assert 2 <= len(found) <= 5 and {key(0), key(49)} <= found.keys()
    nothing = cache(memory=0)
    nothing.put({key(0): SCORE})
    assert nothing.get([key(0)]) == {}


def test_texts_and_their_ends_have_digests_of_their_own():
    image = np.zeros((3, 1, 1), np.uint8)
    media = [
        *(Media(text=text, finish=finish) for text in ("", "4", "2") for finish in ("stop", "length")),
        Media(image=image),
        Media(image=image, text="4", finish="stop"),
    ]
    assert len({digest_of(one) for one in media}) == len(media)
    assert digest_of(Media(text="4", finish="stop")) == digest_of(media[2])


def test_the_file_stays_within_its_size_and_keeps_the_newest(tmp_path):
    kept = cache(tmp_path / "scores", memory=0, size=2**18)
    for number in range(400):
        kept.put(long([number]))
    assert kept.problem is None
    kept.close()
    assert (tmp_path / "scores").stat().st_size < 1.3 * 2**18
    found = cache(tmp_path / "scores").get([*map(key, range(400))])
    assert 50 < len(found) < 140 and key(399) in found and key(0) not in found
    file = ScoreFile(tmp_path / "large", 2**26)
    file.put({b"k": b"x", b"large": bytes(2**20 + 1)})
    assert file.get([b"k", b"large"]) == {b"k": b"x"}


def test_a_smaller_bound_is_reached_little_by_little(tmp_path):
    large = cache(tmp_path / "scores", memory=0)
    large.put(long(range(300)))
    large.close()
    kept, counts = cache(tmp_path / "scores", memory=0, size=2**18), []
    for number in range(300, 360):
        kept.put(long([number]))
        counts.append(len(kept.get([*map(key, range(360))])))
    assert counts[0] > 250 and counts[-1] < 100 and key(359) in kept.get([key(359)])


def test_a_database_of_another_program_and_a_broken_one_are_given_up_with_a_reason(tmp_path):
    with sqlite3.connect(tmp_path / "theirs") as file:
        file.execute("CREATE TABLE scores (key, value)")
    (tmp_path / "broken").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("theirs", "broken", "folder", "pipe", "device"):
        kept = cache(tmp_path / name)
        kept.put({key(0): SCORE})
        assert kept.problem is not None and kept.problem.startswith(str(tmp_path / name))
        assert kept.get([key(0)]) == {key(0): SCORE}, "memory goes on"
    with sqlite3.connect(tmp_path / "theirs") as file:
        assert file.execute("SELECT count(*) FROM scores").fetchone() == (0,)


async def test_an_unusable_file_is_reported_once(tmp_path):
    said = []

    async def report(text):
        said.append(text)

    kept = cache(tmp_path, report)
    media, prompts = [Media(image=np.full((3, 4, 4), i, np.uint8)) for i in range(2)], [Prompt(0, "a"), Prompt(1, "b")]
    keys, known = await kept.find(b"scorer", media, prompts)
    assert known == [None, None]
    for _ in range(2):
        await kept.keep(keys, [SCORE, None])
    assert await kept.find(b"scorer", media, prompts) == (keys, [SCORE, None])
    assert await kept.find(None, media, prompts) == ([None, None], [None, None])
    (text,) = said
    assert text.startswith(f"warning: reward.cache.path: {tmp_path}") and text.endswith("scores are not kept there")
    kept.close()


def entry(score, number=0):
    content = msgspec.msgpack.encode(score)
    return blake2b(key(number) + content, digest_size=8).digest() + content


WHOLE = entry({"value": 0.25})


@pytest.mark.parametrize(
    "value",
    [
        WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
        WHOLE[:9],
        b"",
        "text",
        None,
        7,
        entry({"value": 9.0}, 1),
        entry({"value": math.nan}),
        entry({"value": -math.inf}),
        entry({"value": 1.0, "parts": {"a": math.nan}}),
        entry({"value": 1.0, "parts": {"a": 1e160}}),
        entry({"value": 1.0, "parts": {"\x00": 1.0}}),
        entry({"value": 1.0, "parts": {str(i): 1.0 for i in range(257)}}),
        entry({"value": 1.0, "values": [math.nan]}),
        entry({"value": 1.0, "text": "x" * 2**19}),
    ],
    ids=range(15),
)
def test_an_entry_that_is_damaged_or_that_no_scorer_may_give_is_none_and_is_replaced(written, value):
    with sqlite3.connect(written) as file:
        file.execute("UPDATE scores SET value = ?", [WHOLE])
    assert cache(written, memory=0).get([key(0)]) == {key(0): Score(0.25)}
    with sqlite3.connect(written) as file:
        file.execute("UPDATE scores SET value = ?", [value])
    kept = cache(written, memory=0)
    assert kept.get([key(0)]) == {}
    kept.put({key(0): Score(3.0)})
    assert kept.get([key(0)]) == {key(0): Score(3.0)} and kept.problem is None


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key, i AS value, i AS id FROM n"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE scores RENAME TO old; CREATE VIEW scores AS SELECT * FROM old",
        f"DROP TABLE scores; CREATE VIEW scores AS {ENDLESS}",
        "CREATE TRIGGER t AFTER INSERT ON scores BEGIN DELETE FROM scores; END",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "CREATE INDEX i ON scores (hex(value))",
        "DROP TABLE scores; CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB AS (zeroblob(9)))",
        "DROP TABLE scores; CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB CHECK (hex(key)))",
    ],
)
def test_a_database_that_computes_something_is_not_used(written, change):
    with sqlite3.connect(written) as file:
        file.executescript(change)
    kept = cache(written, memory=0)
    assert kept.get([key(0)]) == {} and "another program" in str(kept.problem)


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_cache_whose_journal_is_a_pipe_or_a_link_is_not_used(written, tmp_path, suffix):
    beside, victim = tmp_path / f"scores{suffix}", tmp_path / "victim"
    victim.write_bytes(b"precious")
    for make in (lambda: os.mkfifo(beside), lambda: beside.symlink_to(victim)):
        make()
        kept = cache(written, memory=0)
        kept.put({key(1): SCORE})
        assert kept.get([key(0)]) == {} and "not a file" in str(kept.problem)
        beside.unlink()
    assert victim.read_bytes() == b"precious"


def test_a_file_that_stays_locked_is_given_up_and_one_that_is_busy_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("omni_async.rewards.score_file._LOCK_S", 0.0)  # a lock is there for good, or not at all
    kept = cache(tmp_path / "scores", memory=0)
    kept.put({key(0): SCORE})
    with closing(sqlite3.connect(tmp_path / "scores", isolation_level=None)) as other:
        for numbers in ((1, 2), (4, 5)):
            other.execute("BEGIN IMMEDIATE")
            for number in numbers:
                kept.put({key(number): SCORE})
            other.execute("ROLLBACK")
            kept.put({key(numbers[-1] + 1): SCORE})
            assert kept.problem is None
        other.execute("BEGIN IMMEDIATE")
        for number in (7, 8, 9):
            kept.put({key(number): SCORE})
    assert kept.problem is not None and "locked" in kept.problem
    assert cache(tmp_path / "scores").get([key(number) for number in range(10)]).keys() == {key(0), key(3), key(6)}


WRITER = """
import sys
from omni_async.config import ConfigError, reward as sections
from omni_async.rewards import score_file
from omni_async.rewards.cache import ScoreCache
from omni_async.rewards.threads import Threads
from omni_async.types import Score
score_file._LOCK_S = 60.0
first, last = int(sys.argv[2]), int(sys.argv[3])
kept = ScoreCache(sections.ScoreCache(path=sys.argv[1]), Threads("cache"), print)
for number in range(first, last):
    kept.put({number.to_bytes(16, "little"): Score(float(number), text="x" * 500)})
    assert kept.problem is None, kept.problem
    print(number, flush=True)
"""


def writer(path, first, last):
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_one_file_and_what_was_written_survives_a_kill(tmp_path):
    killed, other = writer(tmp_path / "scores", 1000, 10**6), writer(tmp_path / "scores", 0, 200)
    said = [killed.stdout.readline() for _ in range(50)]
    killed.send_signal(signal.SIGKILL)
    said += killed.communicate()[0].splitlines()
    other.communicate()
    assert other.returncode == 0
    written = [*range(200), *map(int, said[:-1])]  # the last line may be half of one
    kept = cache(tmp_path / "scores")
    found = kept.get([*map(key, written)])
    assert [found[key(number)].value for number in written] == [float(number) for number in written]
    kept.put({key(10**7): SCORE})
    assert kept.problem is None and key(10**7) in cache(tmp_path / "scores").get([key(10**7)])


# ---- questions -------------------------------------------------------------------------------------------------------


def test_a_key_is_of_all_that_an_answer_follows_from_and_of_nothing_else():
    image, longer = np.zeros((3, 4, 6), np.uint8), np.zeros((3, 6, 4), np.uint8)
    media = [Media(image=one) for one in (image, longer, image + 1)]
    media += [Media(video=image[None], fps=fps) for fps in (8, 9)]
    media += [Media(audio=np.zeros((1, 8), np.float32), sample_rate=rate) for rate in (8, 9)]
    endings = (("a", "stop", 1), ("b", "stop", 1), ("a", "length", 1), ("a", "stop", 2), ("a", "stop", None))
    media += [Media(text=text, finish=finish, tokens=tokens) for text, finish, tokens in endings]
    digests = [digest_of(one) for one in media]
    assert len({*digests}) == len(digests)
    strided = np.zeros((3, 8, 12), np.uint8)[:, ::2, ::2]
    assert digest_of(Media(image=strided)) == digests[0], "however it lies in memory"
    prompt = Prompt(0, "a", "b", {"x": 1, "y": [2]}, (PromptImage("/p", "d"),))
    same = [
        replace(prompt, index=1),
        replace(prompt, metadata={"y": [2], "x": 1}),
        replace(prompt, images=(PromptImage("/q", "d"),)),
    ]
    others = [
        replace(prompt, text="c"),
        replace(prompt, target=None),
        replace(prompt, metadata={"x": 2, "y": [2]}),
        replace(prompt, images=(PromptImage("/p", "e"),)),
    ]
    mine = key_of(b"scorer", digests[0], prompt)
    assert {key_of(b"scorer", digests[0], one) for one in same} == {mine}
    found = {key_of(b"scorer", digests[0], one) for one in others} | {key_of(b"judge", digests[0], prompt)}
    assert len(found | {mine, key_of(b"scorer", digests[1], prompt)}) == 7
    assert key_of(b"scorer", digests[0], replace(prompt, metadata={"x": object()})) is None


def test_a_scorer_is_known_by_its_parameters_version_and_source(tmp_path, monkeypatch):
    config = sections.Scorer(name="jpeg_size")
    scorer = JpegSizeScorer()
    mine = identity_of(config, scorer)
    assert mine is not None and identity_of(config, JpegSizeScorer()) == mine
    assert identity_of(sections.Scorer(name="jpeg_size", params={"quality": 90}), scorer) != mine
    scorer.version = "another"
    assert identity_of(config, scorer) != mine
    monkeypatch.setenv("QUALITY", "90")
    by_name = sections.Scorer(name="jpeg_size", params={"quality": "env:QUALITY"})
    first = identity_of(by_name, JpegSizeScorer())
    monkeypatch.setenv("QUALITY", "91")
    assert identity_of(by_name, JpegSizeScorer()) != first
    assert identity_of(config, object()) is None

    shared = tmp_path / "media.py"
    monkeypatch.setattr("omni_async.rewards.cache._MEDIA", shared)
    found = []
    for text in ("one", "other"):
        shared.write_text(text)
        found.append(identity_of(config, JpegSizeScorer()))
    assert found[0] != found[1], "what scorers of this package share"

    module = tmp_path / "judge_of_today.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for answer in (1, 2):
        module.write_text(f"class Judge:\n    deterministic = True\n    answer = {answer}\n")
        sys.modules.pop("judge_of_today", None)
        judge = __import__("judge_of_today").Judge()
        found.append(identity_of(sections.Scorer(name="judge_of_today:Judge"), judge))
    assert None not in found and found[0] != found[1]


def test_sizes_are_bounded(tmp_path):
    assert write_world(tmp_path, reward={"cache": {"path": "kept"}}).reward.cache.path == str(tmp_path / "kept")
    for given in (-1, "many"):
        with pytest.raises(ConfigError, match=r"reward\.cache\.memory: "):
            write_world(tmp_path, reward={"cache": {"memory": given}})
