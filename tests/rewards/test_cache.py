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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.config import schema
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.cache import ScoreCache, digest_of, identity_of, key_of
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.scorers.jpeg_size import JpegSizeScorer
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, PromptImage, Score
from tests.support.images import as_media

SCORE = Score(0.25, {"a": 1.0}, "read", (2.0,))


def cache(path: Path | None = None, **config: Any) -> ScoreCache:
    async def report(text: str) -> None: ...

    return ScoreCache(schema.ScoreCache(path=None if path is None else str(path), **config), Threads("cache"), report)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


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


def test_the_file_stays_within_its_size_and_keeps_the_newest(tmp_path):
    kept = cache(tmp_path / "scores", memory=0, size=2**18)
    for number in range(400):
        kept.put({key(number): Score(1.0, text="x" * 2000)})
    assert kept.problem is None
    kept.close()
    assert (tmp_path / "scores").stat().st_size < 1.3 * 2**18
    found = cache(tmp_path / "scores").get([key(number) for number in range(400)])
    assert 50 < len(found) < 140 and key(399) in found and key(0) not in found


def test_a_damaged_entry_is_none_and_is_replaced(tmp_path):
    kept = cache(tmp_path / "scores", memory=0)
    kept.put({key(number): SCORE for number in range(9)})
    with sqlite3.connect(tmp_path / "scores") as file:
        [(whole,)] = file.execute("SELECT value FROM scores WHERE key = ?", [key(0)])
        other = cache()
        other.put({key(5): Score(9.0)})
        for number, value in enumerate(
            [whole[:-1] + bytes([whole[-1] ^ 1]), whole[:9], b"", "text", other._memory[key(5)]]
        ):
            file.execute("UPDATE scores SET value = ? WHERE key = ?", [value, key(number)])
        for number, value in ((6, "NULL"), (7, "7"), (8, "CAST(x'ff' AS TEXT)")):
            file.execute(f"UPDATE scores SET value = {value} WHERE key = ?", [key(number)])
    assert kept.get([key(number) for number in range(9)]) == {key(5): SCORE} and kept.problem is None
    kept.put({key(1): Score(3.0)})
    assert kept.get([key(1)]) == {key(1): Score(3.0)} and kept.problem is None


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

    async def report(text: str) -> None:
        said.append(text)

    (tmp_path / "folder").mkdir()
    kept = ScoreCache(schema.ScoreCache(path=str(tmp_path / "folder")), Threads("cache"), report)
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


@pytest.mark.parametrize(
    "score",
    [
        {"value": math.nan},
        {"value": -math.inf},
        {"value": 1.0, "parts": {"a": math.nan}},
        {"value": 1.0, "parts": {"a": 1e160}},
        {"value": 1.0, "parts": {"\x00": 1.0}},
        {"value": 1.0, "parts": {str(i): 1.0 for i in range(257)}},
        {"value": 1.0, "parts": {str(i): 1.0 for i in range(5000)}},
        {"value": 1.0, "values": [math.nan]},
        {"value": 1.0, "text": "x" * 2**19},
    ],
    ids=range(9),
)
def test_an_entry_that_no_scorer_may_give_is_none(tmp_path, score):
    content = msgspec.msgpack.encode(score)
    entry = blake2b(key(0) + content, digest_size=8).digest() + content
    kept = cache(tmp_path / "scores", memory=0)
    kept.put({key(0): SCORE})
    assert kept.get([key(0)]) == {key(0): SCORE}
    with sqlite3.connect(tmp_path / "scores") as file:
        file.execute("UPDATE scores SET value = ?", [entry])
    assert kept.get([key(0)]) == {} and kept.problem is None


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE scores RENAME TO old; CREATE VIEW scores AS SELECT * FROM old",
        "CREATE TRIGGER t AFTER INSERT ON scores BEGIN DELETE FROM scores; END",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "CREATE INDEX i ON scores (hex(value))",
        "DROP TABLE scores; CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB AS (zeroblob(9)))",
        "DROP TABLE scores; CREATE TABLE scores (id INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB CHECK (hex(key)))",
    ],
)
def test_a_database_that_computes_something_is_not_used(tmp_path, change):
    first = cache(tmp_path / "scores", memory=0)
    first.put({key(0): SCORE})
    first.close()
    with sqlite3.connect(tmp_path / "scores") as file:
        file.executescript(change)
    kept = cache(tmp_path / "scores", memory=0)
    assert kept.get([key(0)]) == {} and "another program" in str(kept.problem)


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_a_cache_whose_journal_is_a_pipe_or_a_link_is_not_used(tmp_path, suffix):
    first = cache(tmp_path / "scores", memory=0)
    first.put({key(0): SCORE})
    first.close()
    beside, victim = tmp_path / f"scores{suffix}", tmp_path / "victim"
    victim.write_bytes(b"precious")
    for make in (lambda: os.mkfifo(beside), lambda: beside.symlink_to(victim)):
        make()
        kept = cache(tmp_path / "scores", memory=0)
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


def test_a_smaller_bound_is_reached_little_by_little(tmp_path):
    large = cache(tmp_path / "scores", memory=0)
    large.put({key(number): Score(1.0, text="x" * 2000) for number in range(300)})
    large.close()
    kept, counts = cache(tmp_path / "scores", memory=0, size=2**18), []
    for number in range(300, 360):
        kept.put({key(number): Score(1.0, text="x" * 2000)})
        counts.append(len(kept.get([key(one) for one in range(360)])))
    assert counts[0] > 250 and counts[-1] < 100 and key(359) in kept.get([key(359)])


WRITER = """
import sys
from omni_async.config import schema
from omni_async.rewards import score_file
from omni_async.rewards.cache import ScoreCache
from omni_async.rewards.threads import Threads
from omni_async.types import Score
score_file._LOCK_S = 60.0
first, last = int(sys.argv[2]), int(sys.argv[3])
kept = ScoreCache(schema.ScoreCache(path=sys.argv[1]), Threads("cache"), print)
for number in range(first, last):
    kept.put({number.to_bytes(16, "little"): Score(float(number), text="x" * 500)})
    assert kept.problem is None, kept.problem
    print(number, flush=True)
"""


def writer(path: Path, first: int, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_one_file(tmp_path):
    both = [writer(tmp_path / "scores", 0, 200), writer(tmp_path / "scores", 200, 400)]
    for one in both:
        one.communicate()
    assert [one.returncode for one in both] == [0, 0]
    found = cache(tmp_path / "scores").get([key(number) for number in range(400)])
    assert {score.value for score in found.values()} == {float(number) for number in range(400)}


def test_what_was_written_survives_a_kill_in_the_middle(tmp_path):
    process = writer(tmp_path / "scores", 0, 10**6)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    said += process.communicate()[0].splitlines()
    written = [int(line) for line in said[:-1]]  # the last line may be half of one
    kept = cache(tmp_path / "scores")
    found = kept.get([key(number) for number in range(len(written) + 2)])
    assert {number: found[key(number)].value for number in written} == {number: float(number) for number in written}
    kept.put({key(10**7): SCORE})
    assert kept.problem is None and key(10**7) in cache(tmp_path / "scores").get([key(10**7)])


# ---- questions -------------------------------------------------------------------------------------------------------


def test_a_key_is_of_all_that_an_answer_follows_from_and_of_nothing_else():
    image, longer = np.zeros((3, 4, 6), np.uint8), np.zeros((3, 6, 4), np.uint8)
    sound = np.zeros((1, 8), np.float32)
    digests = [
        digest_of(one)
        for one in (
            Media(image=image),
            Media(image=longer),
            Media(image=image + 1),
            Media(video=image[None], fps=8),
            Media(video=image[None], fps=9),
            Media(audio=sound, sample_rate=8),
            Media(audio=sound, sample_rate=9),
        )
    ]
    assert len({*digests}) == len(digests)
    assert digest_of(Media(image=np.zeros((3, 8, 12), np.uint8)[:, ::2, ::2])) == digests[0], (
        "however it lies in memory"
    )
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
    config = schema.Scorer(name="jpeg_size")
    scorer = JpegSizeScorer()
    mine = identity_of(config, scorer)
    assert mine is not None and identity_of(config, JpegSizeScorer()) == mine
    assert identity_of(schema.Scorer(name="jpeg_size", params={"quality": 90}), scorer) != mine
    scorer.version = "another"
    assert identity_of(config, scorer) != mine
    monkeypatch.setenv("QUALITY", "90")
    by_name = schema.Scorer(name="jpeg_size", params={"quality": "env:QUALITY"})
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
        found.append(identity_of(schema.Scorer(name="judge_of_today:Judge"), judge))
    assert None not in found and found[0] != found[1]


def test_answers_of_every_built_in_scorer_are_kept_but_those_of_another_machine():
    declared = {name: getattr(registry._load(name), "deterministic", False) for name in registry._BUILT_IN}
    assert declared == {name: name not in ("http", "vlm_judge") for name in registry._BUILT_IN}


@pytest.mark.parametrize(("given", "said"), [(-1, "memory"), ("many", "memory")])
def test_sizes_are_bounded(given, said, tmp_path):
    from omni_async.config import ConfigError
    from tests.runtime.runtime_world import write_world

    assert write_world(tmp_path, reward={"cache": {"path": "kept"}}).reward.cache.path == str(tmp_path / "kept")
    with pytest.raises(ConfigError, match=f"reward.cache.{said}: "):
        write_world(tmp_path, reward={"cache": {said: given}})


async def silent(text: str) -> None: ...


async def test_answers_of_scorers_that_are_built_already_are_not_cached_because_their_parameters_are_unknown():
    config, prompt = schema.Reward(), Prompt(0, "a")
    image = as_media(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8))
    both = LoadedReward.of(config, *(JpegSizeScorer(sign="max", quality=quality) for quality in (30, 95)))
    async with Panel("p", both, config, WallClock(), silent) as panel:
        low, high, again = [await panel.scorers[i].score(image, prompt) for i in (0, 1, 1)]
    assert low.score != high.score == again.score and not again.cached
