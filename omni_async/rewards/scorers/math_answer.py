"""Scores whether a text answer is mathematically equal to the prompt's target, by math-verify.

math-verify runs in a process, see `math_process`. A comparison that takes too long ends the process, and the next
comparison starts another.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from importlib import metadata
from typing import Annotated, Any

from msgspec import Meta

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers import math_process
from omni_async.rewards.scorers.text_answers import Tag, TextScorer, content_of, target_of, text_of
from omni_async.types import Prompt, Score

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # most targets, which need no time to parse
_SHOWN = 100


class MathAnswerScorer(TextScorer):
    """A scorer with value 1 if the answer equals the target, else 0.

    The target is a formula in LaTeX, with or without delimiters. math-verify reads an answer's last formula in
    `\\boxed{}`, else after "answer", else at all. `tag`: only the content of the last `<tag>...</tag>` is the answer,
    and it is read as a target is. An answer that math-verify cannot parse or compare is wrong. `limit_s`: seconds of
    CPU time of a comparison; ScoreError if it takes longer.

    Part: `answered`, whether the answer has a formula."""

    name = "math_answer"
    needs = ("target",)
    version = f"math-verify {metadata.version('math-verify')}"

    def __init__(self, *, tag: Tag | None = None, limit_s: Annotated[float, Meta(ge=0.1, le=600)] = 5.0) -> None:
        self._tag = tag
        self._process = _Process(limit_s)

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require a target that math-verify can parse."""
        target = target_of(prompt)
        is_parsed = _NUMBER.fullmatch(target) or math_process.parsed_target(target)
        return None if is_parsed else _unparsed(target)

    def _score(self, media: Media, prompt: Prompt) -> Score:
        target, text = target_of(prompt), content_of(text_of(media), self._tag)
        if text is not None and self._tag is not None:
            text = math_process.delimited(text)
        parsed, answered, equal = self._process.compared(target, text or "")
        if not parsed:
            raise ScoreError(_unparsed(target))
        return Score(float(equal), {"answered": float(answered)})

    def close(self) -> None:  # type: ignore[override]
        self._process.close()


def _unparsed(target: str) -> str:
    return f"math-verify cannot parse the target {target[:_SHOWN]!r}"


class _Process:
    """The process of `math_process`; thread-safe."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None

    def compared(self, target: str, answer: str) -> tuple[bool, bool, bool]:
        """Return `math_process.compared`. ScoreError if the process ends instead."""
        line = json.dumps([target, answer, self._limit_s]) + "\n"  # ASCII, without line ends
        with self._lock:
            running = self._running = self._running or _started()
            assert running.stdin is not None and running.stdout is not None, "both are pipes"
            try:
                running.stdin.write(line)
                running.stdin.flush()
                reply = running.stdout.readline()
            except BrokenPipeError:
                reply = ""
            if not reply:
                self._running = None
                raise ScoreError(self._end_of(running))
        parsed, answered, equal = json.loads(reply)
        return parsed, answered, equal

    def _end_of(self, ended: subprocess.Popen[str]) -> str:
        _close(ended)
        if ended.returncode == -math_process.OVER:
            return f"comparing the answer takes more than {self._limit_s:g} s of CPU time (limit_s)"
        return f"the process that compares ended with status {ended.returncode}"

    def close(self) -> None:
        if (running := self._running) is not None:
            running.kill()  # which ends the call of a thread that still reads from it
            with self._lock:
                _close(running)


def _started() -> subprocess.Popen[str]:
    # -P: the script's folder has modules with the names of Python's.
    command = [sys.executable, "-P", math_process.__file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii")


def _close(process: subprocess.Popen[str]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # of a line that was not sent
            pipe.close()  # type: ignore[union-attr]
