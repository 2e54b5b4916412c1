"""Defines the section `reward`: scorers, and the workers that run them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config.section import (
    MOST_BYTES,
    MOST_WORKERS,
    InMemory,
    Pause,
    Plain,
    Resources,
    Retries,
    RoleName,
    Seconds,
    Section,
    SizeText,
    Urls,
    Workers,
    bytes_of,
    most,
)

Weight = Annotated[float, most(1e6, ge=-1e6)]
Scalar = str | int | float | bool


class Scorer(Section, kw_only=True, frozen=True):
    name: str
    """A registered scorer (`omni-async list` shows them), or your own class or function: `module:name` or
    `path/file.py:name`."""
    weight: Weight = 1.0
    """Factor in the weighted sum, exponent in the product (weights are not normalised)."""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The scorer's own options."""
    pool: RoleName | None = None
    """The entry of `reward.pools` whose workers run the scorer; null: the reward workers themselves."""
    batch: InMemory | None = None
    """Most samples in a call; null: `reward.batch`."""
    concurrency: InMemory | None = None
    """Concurrent calls in a worker; null: the scorer's own number, by default one if it blocks and unlimited if it is
    asynchronous."""
    latency_s: Seconds | None = None
    """Target duration of a call: batches shrink if larger ones took longer. null: batches as large as `batch`
    allows."""
    timeout_s: Seconds | None = None
    """Longest duration of a call; null: `reward.timeout_s`."""
    hedge_s: Seconds | None = None
    """Start a second, concurrent call if a call takes longer; null: `reward.hedge_s`."""
    on_failure: Literal["reject", "leave_out"] = "reject"
    """Treatment of a group with a sample that the scorer cannot score, after all retries. `reject`: it is not trained.
    `leave_out`: its samples are compared without this scorer, and the ledger records that."""
    when: dict[str, Scalar | tuple[Scalar, ...]] = msgspec.field(default_factory=dict)
    """Metadata that selects prompts for the scorer: every key must have the given value, or a value of the given list.
    Empty: every prompt."""
    gate: Annotated[float, most(1e12, ge=-1e12)] | None = None
    """If the scorer's value is lower, the sample's reward is `reward.gated`; null: no condition."""
    components: Annotated[dict[str, Weight], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Parts of the score that count instead of its value, with their weights; empty: the value."""


class Pool(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the pool, used by scorers and `omni-async scale`."""
    workers: Workers = 1
    """Number of its workers, each with all scorers of the pool."""
    resources: Resources = Resources()
    """Resources of each worker."""


class Server(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the servers, used by scorers (`server`) and `omni-async scale`."""
    model: Plain
    """Checkpoint folder, or `owner/name` of a model hub if this machine's cache has it."""
    served_name: Plain | None = None
    """Name of the model in requests; null: the entry's name."""
    replicas: Annotated[int, most(MOST_WORKERS, "each is a process", ge=0)] = 1
    """Number of vLLM servers that the run starts; 0: only `urls`."""
    resources: Resources = Resources()
    """Resources of each server; without accelerators, vLLM's CPU build runs."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, such as `--max-model-len` and its value."""
    urls: Urls = ()
    """Existing servers, without `/v1`; they get the same requests as started servers."""
    access: Plain | None = None
    """Bearer token for `urls`, as the environment variable that holds it: `env:NAME`. Started servers get their own
    tokens."""

    @property
    def served_as(self) -> str:
        """Return the name of the model in requests."""
        return self.name if self.served_name is None else self.served_name


class ScoreCache(Section, kw_only=True, frozen=True):
    memory: Annotated[int, most(MOST_BYTES, ge=0)] | SizeText = "64MiB"
    """Bytes of answers in a reward worker's memory."""
    path: Plain | None = None
    """SQLite file, on a local file system, that also stores answers, for other workers, later runs and
    `omni-async score`. null: no file."""
    size: Annotated[int, most(MOST_BYTES, ge=2**16)] | SizeText = "1GiB"
    """Bytes of answers in the file; the oldest are deleted."""

    @property
    def memory_bound(self) -> int:
        """Return `memory` as a number."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def size_bound(self) -> int:
        """Return `size` as a number."""
        return bytes_of(self.size) if isinstance(self.size, str) else self.size

    @property
    def enabled(self) -> bool:
        """Return whether answers are stored anywhere."""
        return self.memory_bound > 0 or self.path is not None


class Reward(Section, kw_only=True, frozen=True):
    workers: Workers = 1
    """Number of reward workers."""
    batch: InMemory = 8
    """Most samples in a call of a scorer; a call never waits to fill a batch."""
    streaming: bool = True
    """Score samples as they appear; false: only once everything that may be generated now is generated, as in a
    synchronous loop."""
    timeout_s: Seconds = 60.0
    """Longest duration of a scorer's call."""
    hedge_s: Seconds | None = None
    """Start a second, concurrent call if a call takes longer; the first answer counts. For scorers that allow
    concurrent calls. null: never."""
    retries: Retries = 3
    """Retries of a failed score before its group is rejected."""
    backoff_s: Pause = 1.0
    """Pause before a failed score is retried, and before a scorer that is down is called again; it doubles every
    time."""
    backoff_max_s: Seconds = 30.0
    """Longest such pause."""
    outage_s: Pause = 600.0
    """Longest wait of samples for a scorer that is down (every call fails); then their groups are rejected."""
    max_abs: Annotated[float, Meta(gt=0, le=1e12)] = 1e6
    """Largest absolute reward: a group whose reward, or a scorer's weighted value, is larger is rejected with the
    reason."""
    probe: bool = True
    """Let every scorer score a synthetic sample before generation starts. End the run if it fails twice with the same
    error, unless that is an outage. false: a scorer that has scored nothing yet counts as down."""
    cache: ScoreCache = ScoreCache()
    """Cache of answers: a `deterministic` scorer is called once for the same media and prompt."""
    combine: Literal["sum", "product"] = "sum"
    """Combination of the scorers' values v with weights w: the sum of w v, or the product of v ** w."""
    gated: Annotated[float, most(1e12, ge=-1e12)] = 0.0
    """The reward of a sample whose value is below a scorer's `gate`."""
    pools: tuple[Pool, ...] = ()
    """Additional workers with separate processes and accelerators, for scorers that name them."""
    servers: tuple[Server, ...] = ()
    """Model servers that the run starts, watches and replaces, for judges among the scorers."""
    scorers: tuple[Scorer, ...] = ()
    """The scorers, which score a sample concurrently; their values give the reward."""
