"""Defines the messages about one sample: its request, its result, its score.

The control plane holds them by the ten thousand, so the garbage collector does not track them (`gc=False`). They are
frozen and created after their contents, so they are part of no cycle unless an object behind a reference leads back to
a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise, repeat
from typing import Any, Literal

import msgspec

from omni_async.types.prompts import Prompt

SampleKind = Literal["train", "validation"]
# How to handle a sample without a score:
#   retry    score it again after a pause; counts against `reward.retries`
#   outage   a scorer is down: score it later, without counting the failure
#   replace  its media are gone: generate it again
#   reject   another try would not help: reject its group
Fault = Literal["retry", "outage", "replace", "reject"]


class VersionSpans(msgspec.Struct, frozen=True, gc=False):
    """The policy versions of consecutive steps, run-length encoded: (version, number of steps) of each span, in order.

    Versions change a few times in a sample however many steps it has, so a thousand steps cost as much as ten.

    Equal lists of versions have equal spans: no span is empty, and neighbours differ. ValueError otherwise.

    Most samples have one span, and the control plane reads several properties of each: that case has no loop."""

    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.spans) == 1 and self.spans[0][1] > 0:
            return
        if any(count < 1 for _, count in self.spans):
            raise ValueError("a span of versions has no steps")
        if any(one == following for (one, _), (following, _) in pairwise(self.spans)):
            raise ValueError("neighbouring spans have the same version")

    @classmethod
    def of(cls, versions: Iterable[int]) -> VersionSpans:
        """Return the spans of a version per step."""
        return cls(tuple((version, sum(1 for _ in run)) for version, run in groupby(versions)))

    @classmethod
    def same(cls, version: int, num_steps: int) -> VersionSpans:
        """Return the spans of `num_steps` steps that one version took."""
        return cls(((version, num_steps),) if num_steps else ())

    def __iter__(self) -> Iterator[int]:
        """Yield the version of every step."""
        for version, count in self.spans:
            yield from repeat(version, count)

    def __len__(self) -> int:
        return self.num_steps

    def __bool__(self) -> bool:
        return bool(self.spans)

    @property
    def num_steps(self) -> int:
        return self.spans[0][1] if len(self.spans) == 1 else sum(count for _, count in self.spans)

    @property
    def first(self) -> int:
        """Return the version of the first step. IndexError without steps."""
        return self.spans[0][0]

    def of_steps(self, steps: range) -> VersionSpans:
        """Return the spans of the consecutive steps `steps`, as far as they exist."""
        kept, begin = [], 0
        for version, count in self.spans:
            overlap = min(begin + count, steps.stop) - max(begin, steps.start)
            if overlap > 0:
                kept.append((version, overlap))
            begin += count
        return VersionSpans(tuple(kept))


class SdeWindow(msgspec.Struct, frozen=True, gc=False):
    """Denoising steps `start <= i < start + size` are taken with noise and trained.

    Every other step is a plain Euler step."""

    start: int
    size: int

    @property
    def steps(self) -> range:
        return range(self.start, self.start + self.size)


class SampleRequest(msgspec.Struct, frozen=True, gc=False):
    """Everything an engine needs to generate one sample; two equal requests give the same sample on any engine.

    `group` is the group's admission number (or the validation round's id for `kind="validation"`); `seed` is a 63-bit
    integer. `spec` is the family's `SamplingSpec`. `window` is None for a noise-free (ODE) sample. `fields` are the
    trajectory tensors that the objective requires. `initial_seed`, if given, seeds the initial noise instead of `seed`,
    so that samples of a group can share it. `calls`: number of calls in which a rollout program generates the sample,
    each of `num_inference_steps`; engines only get requests of one call. `encoded_for`, if given, is the spec that the
    prompt is encoded for instead of `spec`."""

    sample_id: str
    kind: SampleKind
    group: int
    sample: int
    prompt: Prompt
    seed: int
    spec: Any
    num_inference_steps: int
    noise_level: float
    sde_kind: str
    window: SdeWindow | None
    fields: tuple[str, ...] = ()
    attempt: int = 1
    initial_seed: int | None = None
    calls: int = 1
    encoded_for: Any = None


class SampleResult(msgspec.Struct, frozen=True, gc=False):
    """A generated sample.

    `step_versions` are the policy versions that took the trained steps, in call order; `version` took step 0. In a
    training sample without a window every step counts as trained, because its final latents are trained on; the steps
    of an answer are its tokens. `nbytes` counts its trajectory without `shared`: names and bytes of objects that other
    samples may share. `media_bytes` counts its media; after the score, media that will not be shown are None.
    `encoded`: number of its prompts that were encoded for it, not reused from an earlier sample. `shared_steps`: number
    of its denoising steps, in all calls, that another sample took for it."""

    sample_id: str
    engine: str
    trajectory: Any
    media: Any
    version: int
    step_versions: VersionSpans
    started: float
    finished: float
    nbytes: int = 0
    encoded: int = 0
    shared_steps: int = 0
    media_bytes: int = 0
    shared: tuple[tuple[str, int], ...] = ()


class ScoreJob(msgspec.Struct, frozen=True, gc=False):
    """A sample to score: number `sample`, from 0, of the group or validation round `group`.

    `attempt` is the sample's. A sample that was lost and generated again has other media.

    `alone`: this sample has cost workers, so the next worker scores nothing concurrently with it."""

    sample_id: str
    kind: SampleKind
    prompt: Prompt
    media: Any
    attempt: int = 1
    alone: bool = False
    group: int = 0
    sample: int = 0


class Score(msgspec.Struct, frozen=True, gc=False):
    """A finite reward, its per-scorer parts (named numbers, logged as metrics) and the text the scorer read.

    `text` is shown in captions. `values` are the unweighted inputs of `omni_async.control.reward_formula`; None for a
    scorer that was not called or is left out. A single scorer's own score leaves `values` empty."""

    value: float
    parts: dict[str, float] = {}
    text: str | None = None
    values: tuple[float | None, ...] = ()


class Answer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A sample's score, of one scorer or of the whole reward, or the reason why it has none.

    Exactly one of `score` and `error` is set: a failed score is never a number. `fault` is how to handle the error.
    `wrong`: the scorer has scored no generated sample yet, and failed this one twice with the same error. `cached`:
    number of scorer answers that came from the cache."""

    score: Score | None = None
    error: str | None = None
    fault: Fault = "retry"
    wrong: bool = False
    cached: int = 0


class ScoreResult(Answer, frozen=True, gc=False):
    """The answer to a `ScoreJob`, whose `attempt` it has."""

    sample_id: str
    attempt: int


class ScorerReport(msgspec.Struct, frozen=True):
    """The activity of one scorer in one worker since the last report.

    `in_flight`: samples now waiting for an answer; `queued` of them wait for a call. `calls` scored `samples`; `failed`
    answers have no score, `cached` answers needed no call. `tokens`: tokens that a judge read and wrote. `call_s`:
    seconds of each call. `answer_s`: seconds from a sample's request to its answer, including the wait for a call."""

    scorer: str
    in_flight: int = 0
    queued: int = 0
    calls: int = 0
    samples: int = 0
    failed: int = 0
    cached: int = 0
    tokens: float = 0.0
    call_s: tuple[float, ...] = ()
    answer_s: tuple[float, ...] = ()
