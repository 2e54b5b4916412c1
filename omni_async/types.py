"""Defines the messages that travel between roles: plain msgspec structs, importable without torch or Ray.

Messages contain no tensors. A message carries *references* (`Any`: a Ray `ObjectRef`, or the object itself in the
one-process runtime) which only the data plane, `omni_async.store`, opens. Message types that the control plane holds by
the ten thousand are not tracked by the garbage collector (`gc=False`). They are frozen and created after their
contents, so they are part of no cycle unless an object behind a reference leads back to a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, repeat
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

# ---- bounded numbers and texts: msgspec refuses a struct from a file that exceeds them -------------------------------

# The squares of larger numbers, summed, may overflow.
LARGEST = 1e100
# Beyond it, a float cannot resolve microseconds, and calendars have no year.
FARTHEST_S = 1e11
MOST = 2**53
LONGEST = 100_000

Value = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=FARTHEST_S)]
Time = Annotated[float, Meta(ge=-FARTHEST_S, le=FARTHEST_S)]
Count = Annotated[int, Meta(ge=0, lt=MOST)]
Text = Annotated[str, Meta(max_length=LONGEST)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]  # of a group, a prompt or a version: 32 bits in tables


def finite(value: Any) -> float | None:
    """Return a number in range; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def count(value: Any) -> int | None:
    """Return a non-negative integer below 2**53; None for anything else, booleans included."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


# ---- messages --------------------------------------------------------------------------------------------------------

SampleKind = Literal["train", "validation"]
Terminal = Literal["trained", "rejected", "dropped"]
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


class PromptFile(msgspec.Struct, frozen=True, gc=False):
    """A file that a prompt carries: its absolute path, and the digest of its bytes.

    Without a file, as for a generated image, `content` holds the bytes, and `path` describes them."""

    part: ClassVar[str]

    path: str
    digest: str
    content: bytes | None = None


class PromptImage(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "image"


class PromptAudio(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "audio"


class PromptVideo(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "video"


class Prompt(msgspec.Struct, frozen=True):
    """One row of a table of prompts.

    `index` is the row's position among the non-empty rows; grouping never uses `text`. `negative_prompt` replaces that
    of the sampling spec; None: the spec's."""

    index: int
    text: str
    target: str | None = None
    metadata: dict[str, Any] = {}
    images: tuple[PromptImage, ...] = ()
    negative_prompt: str | None = None
    audio: tuple[PromptAudio, ...] = ()
    video: tuple[PromptVideo, ...] = ()

    @property
    def files(self) -> tuple[PromptFile, ...]:
        """Return its files in the order of the model's input."""
        return *self.images, *self.video, *self.audio

    @property
    def content(self) -> list[Any]:
        """Return all of it but its position, for digests: files by their digests, and nothing for an absent part."""
        negative = [] if self.negative_prompt is None else [self.negative_prompt]
        heard = [[one.digest for one in self.audio]] if self.audio else []
        seen = [["video", *(one.digest for one in self.video)]] if self.video else []
        images = [image.digest for image in self.images]
        return [self.text, self.target, self.metadata, images, *negative, *heard, *seen]

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digests of its files."""
        return tuple(one.digest for one in self.files)


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
    of an answer are its tokens. `nbytes` counts its trajectory and its media. `encoded`: number of its prompts that
    were encoded for it, not reused from an earlier sample. `shared_steps`: number of its denoising steps, in all calls,
    that another sample took for it."""

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


class ReadySample(msgspec.Struct, frozen=True, gc=False):
    sample_id: str
    trajectory: Any
    media: Any
    score: Score
    step_versions: VersionSpans
    nbytes: int = 0


class ReadyGroup(msgspec.Struct, frozen=True):
    """A whole prompt group, generated and scored, as the trainer takes it.

    `bucket` is the position of its `SamplingSpec` in `rollout.specs`."""

    group: int
    prompt: Prompt
    window: SdeWindow | None
    admitted_version: int
    samples: tuple[ReadySample, ...]
    bucket: int = 0

    @property
    def rewards(self) -> list[float]:
        return [s.score.value for s in self.samples]

    @property
    def oldest_version(self) -> int:
        """Return the oldest version of any trained step.

        Samples that no policy generated (a dataset's) count with the version they were admitted under."""
        taken = {span[0] for sample in self.samples for span in sample.step_versions.spans}
        return min(taken) if taken else self.admitted_version


class TrainGroup(msgspec.Struct, frozen=True):
    """The part of a ready group that is trained on; a rank fetches its trajectories separately.

    One entry per chosen sample, in the same order everywhere.

    `version` is the policy version trained from; `step_versions` are the versions that took each sample's trained
    steps. `spec` is the `SamplingSpec` of all samples. `seeds` determine a sample's training noise and its subset of
    steps; the two samples of a preference pair share one. `weights[i][k]`, if given, are importance weights computed
    over the whole update; they replace weights that the trainer would compute from the group alone. `weighed`: they
    are computed, so a proximal pass returns its drifts. `proximal_ratio`: the ratio is relative to the proximal policy,
    regardless of `algorithm.correction`. `prompt`: the group's, for kinds whose rows are tokens; other kinds find the
    prompt's encoding in the trajectories."""

    group: int
    version: int
    spec: Any
    advantages: tuple[float, ...]
    seeds: tuple[int, ...]
    step_versions: tuple[VersionSpans, ...]
    weights: tuple[Sequence[float], ...] | None = None
    proximal_ratio: bool = False
    prompt: Prompt | None = None
    weighed: bool = False


class SampleDrift(msgspec.Struct, frozen=True):
    """The distance between the proximal policy and the policy that generated a sample.

    Per trained step the log-ratio in nats, and the exact KL in nats; both are summed over all `num_elements` latent
    elements. `steps` are the numbers of these denoising steps. Ranks send an `array` of doubles, which travels as
    bytes, and a `range`: an answer may have thousands of tokens."""

    log_ratio: Sequence[float]
    kappa: Sequence[float] | None
    num_elements: int
    steps: Sequence[int]


# Characters of a prompt in its groups' lines of the ledger.
SHOWN_OF_PROMPT = 300


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=False):
    """A line of `ledger.jsonl`: how one admitted group ended.

    `prompt` is the prompt's number, `text` its first characters; empty in lines of earlier versions. `left_out` are
    failed scorers that its rewards omit."""

    run: Text
    group: Number
    prompt: Number
    event: Terminal
    reason: Text | None
    admitted_version: Number
    trained_version: Number | None
    staleness: Number | None
    step_versions: tuple[Number, Number] | None
    attempts: Number
    reward: Value | None
    left_out: tuple[str, ...] = ()
    text: Text = ""


class UpdateReport(msgspec.Struct, frozen=True):
    """The trainer's report after an update; `version` is the policy version it produced (the number of updates)."""

    version: int
    groups: tuple[int, ...]
    metrics: dict[str, float]
    started: float
    finished: float


class Span(msgspec.Struct, frozen=True):
    """A stretch of time of one actor, in seconds since the epoch.

    `kind`: generate, score, train, publish, swap, ..., or the waits `starved` (no input) and `backpressured` (no room
    downstream)."""

    actor: str
    kind: str
    start: float
    end: float
    args: dict[str, Any] = {}


class Piece(msgspec.Struct, frozen=True):
    """A part of a tensor: `nbytes` bytes at `offset` of bucket number `bucket`."""

    bucket: int
    offset: int
    nbytes: int


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: the concatenated bytes of `pieces`.

    It has several pieces if trainer ranks each hold rows of it, and none if it is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class WeightManifest(msgspec.Struct, frozen=True):
    """The table of contents of one published version; `digest` is over names, dtypes, shapes and every byte."""

    version: int
    payload: Literal["full", "lora"]
    digest: str
    tensors: tuple[TensorSpec, ...]
    lora: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class WeightReport(msgspec.Struct, frozen=True):
    """An engine's answer after a start or a swap: the version and digest that it holds now.

    `uses` names the kernels that the engine chose when it started; empty if it has no choice."""

    engine: str
    version: int
    digest: str
    staged_s: float = 0.0
    swap_s: float = 0.0
    uses: str = ""
