"""Tracks which policy version exists, which was published, and which each engine holds.

Version v is the policy after v updates. The trainer makes versions, the publisher announces some with a digest, engines
report the version that they hold. A report that does not match the announcement is a `WeightMismatch`: plausible but
wrong weights are the worst kind of silent error.
"""

from __future__ import annotations

from collections import Counter

from omni_async.types import SampleResult, WeightReport


class WeightMismatch(RuntimeError):
    """An engine holds other weights than were published."""


class Versions:
    def __init__(self, start: int = 0) -> None:
        self.trained = start
        self._digests: dict[int, str] = {}
        self.engines: dict[str, int] = {}  # the version of each, -1 before its first weights
        # Version -> number of engines that hold it: two or three versions, however many engines.
        self._holders: Counter[int] = Counter()
        # The initial engines of a run wait for each other; nobody waits for an engine that joins later.
        self._begun = False
        self.published: int | None = None
        # The oldest version that any engine may still use; None before all have begun, or without engines.
        self.held: int | None = None
        # At some moment no engine held a version older than this; slots rely on that.
        self._left_behind = -1

    def join(self, engine: str) -> None:
        """Add an engine, which holds nothing yet."""
        self.leave(engine)
        self.engines[engine] = -1
        self._count(-1, 1)

    def leave(self, engine: str) -> None:
        version = self.engines.pop(engine, None)
        if version is not None:
            self._count(version, -1)

    def _count(self, version: int, change: int) -> int:
        self._holders[version] = holders = self._holders[version] + change
        if holders == 0:
            del self._holders[version]
        if holders == 0 or holders == change:  # a version disappeared or appeared
            self._begun |= bool(self._holders) and min(self._holders) >= 0
            self.held = min((v for v in self._holders if v >= 0), default=None) if self._begun else None
            self._left_behind = max(self._left_behind, -1 if self.held is None else self.held)
        return holders

    def of(self, engine: str) -> int:
        """Return the version that the engine holds.

        It is -1 if the engine has no weights yet, or is not (or no longer) part of this run."""
        return self.engines.get(engine, -1)

    def knows(self, engine: str) -> bool:
        return engine in self.engines

    def announce(self, version: int, digest: str) -> None:
        if self.published is not None and version <= self.published:
            raise ValueError(f"version {version} published after {self.published}")
        if version > self.trained:
            raise ValueError(
                f"version {version} published before its update was reported: the newest version is {self.trained}"
            )
        self._digests[version] = digest
        self.published = version

    def report(self, report: WeightReport) -> None:
        """Record the version that an engine holds.

        Raises WeightMismatch unless it is a published version with the published digest, no older than before. A new
        engine's report is ignored if all other engines are past its version: its samples could reach the trainer too
        old."""
        if self.engines.get(report.engine) == -1 and report.version < self._left_behind:
            return  # its digest may be forgotten already
        if report.engine not in self.engines:
            raise WeightMismatch(
                f"engine {report.engine} is not an engine of this run: {', '.join(self.engines) or 'it has none'}"
            )
        expected = self._digests.get(report.version)
        if expected is None:
            raise WeightMismatch(
                f"engine {report.engine} holds version {report.version}, which was never published (latest:"
                f" {self.published})"
            )
        if report.digest != expected:
            raise WeightMismatch(
                f"engine {report.engine} holds version {report.version} with digest {report.digest}, published was"
                f" {expected}: its weights are wrong"
            )
        if report.version < self.engines[report.engine]:
            raise WeightMismatch(
                f"engine {report.engine} went back from version {self.engines[report.engine]} to {report.version}"
            )
        before = self.engines[report.engine]
        self.engines[report.engine] = report.version
        self._count(report.version, 1)
        if self._count(before, -1) == 0 and self.held is not None:
            # No engine can report an older version than `held` any more.
            self._digests = {v: d for v, d in self._digests.items() if v >= self.held}

    def require_made(self, result: SampleResult) -> None:
        """Raise WeightMismatch if a step claims a version that the trainer has not made."""
        for version, _ in result.step_versions.spans:
            if version > self.trained:
                raise WeightMismatch(
                    f"sample {result.sample_id} of {result.engine} claims version {version}, newest is {self.trained}"
                )
