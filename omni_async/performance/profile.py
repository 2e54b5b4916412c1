"""Reads and writes profiles: the service times and payload sizes of one job on one kind of machine.

A service time describes how long one device is busy with one job of n units, in numbers that fit into a file; `fit`
estimates it from observed jobs.

Runs write a profile (`profile.json`); emulated devices and the simulator replay it. Some profiles, built from published
figures, come with the package.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from omni_async.config import Config, ConfigError
from omni_async.config.decoding import decode_json
from omni_async.config.draws import drawn
from omni_async.config.held import num_with_media
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.section import size_text
from omni_async.config.writing import write_atomic
from omni_async.plugins.families import SamplingSpec
from omni_async.types import Count, Seconds

_SHIPPED = "omni_async.performance.profiles"
_LARGEST_FILE = 10_000_000

Bytes = Count

# Enough to keep a tail of one job in fifty.
NUM_QUANTILES = 50
# Significance that a fixed part of the time needs.
STANDARD_ERRORS = 2.0
# Tolerance of numbers that follow from rounded ones.
_FAR_FROM_1 = 0.01


class ServiceTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of a job: n units take (fixed_s + n * unit_s) * f seconds, with a random factor f of mean 1.

    `quantiles` of f, at the probabilities (i + 1/2) / len, define its distribution. Without them it is log-normal with
    standard deviation `cv`; with cv = 0 it is 1."""

    fixed_s: Seconds = 0.0
    unit_s: Seconds = 0.0
    cv: Seconds = 0.0
    quantiles: tuple[Seconds, ...] = ()

    def __post_init__(self) -> None:
        if self.quantiles and abs(sum(self.quantiles) / len(self.quantiles) - 1) > _FAR_FROM_1:
            raise ValueError(f"quantiles: their mean should be 1, got {sum(self.quantiles) / len(self.quantiles):.4g}")

    def mean(self, units: float = 1) -> float:
        """Return the mean seconds of a job of `units`; 0 for no units."""
        return self.fixed_s + units * self.unit_s if units > 0 else 0.0

    def sampler(self, random: random.Random) -> Callable[[float], float]:
        """Return a function that draws the seconds of one job of so many units."""
        fixed, unit, quantiles = self.fixed_s, self.unit_s, self.quantiles
        if quantiles:
            return lambda units: (fixed + units * unit) * random.choice(quantiles) if units > 0 else 0.0
        if self.cv == 0:
            return self.mean
        variance = math.log1p(self.cv**2)
        mu, sigma = -variance / 2, math.sqrt(variance)
        return lambda units: (fixed + units * unit) * math.exp(random.gauss(mu, sigma)) if units > 0 else 0.0

    @property
    def variation(self) -> float:
        """The coefficient of variation of f (std / mean)."""
        if not self.quantiles:
            return self.cv
        mean = sum(self.quantiles) / len(self.quantiles)
        return math.sqrt(sum((q - mean) ** 2 for q in self.quantiles) / len(self.quantiles)) / mean if mean > 0 else 0.0

    def scaled(self, factor: float) -> ServiceTime:
        """Return the same jobs on a device 1 / factor times as fast."""
        return msgspec.structs.replace(self, fixed_s=self.fixed_s * factor, unit_s=self.unit_s * factor)


NOTHING = ServiceTime()


def fit(jobs: Sequence[tuple[float, float]]) -> ServiceTime:
    """Fit the service time to observed jobs (units, seconds).

    Least squares give fixed_s and unit_s, both >= 0. The quantiles are those of each job's seconds relative to that
    fit, scaled to mean 1. If all jobs, or all but a few, hardly vary in size, they contain no information about smaller
    jobs. Unless they contradict a time in proportion to units (its slope is more than two jackknife standard errors
    from theirs), only unit_s is returned."""
    jobs = [(units, seconds) for units, seconds in jobs if units > 0 and seconds >= 0]
    if not jobs:
        return NOTHING
    units, seconds = np.array(jobs, dtype=np.float64).T
    fixed, unit = 0.0, float(seconds.sum() / units.sum())
    slope, error = slope_of(units, seconds)
    if unit - slope > STANDARD_ERRORS * error:
        fixed, unit = float(seconds.mean() - slope * units.mean()), slope
        if slope < 0:
            fixed, unit = float(seconds.mean()), 0.0
    expected = [fixed + n * unit for n, _ in jobs]
    factors = sorted(s / e for (_, s), e in zip(jobs, expected, strict=True) if e > 0)
    if len(factors) < 2 or factors[0] == factors[-1]:
        return ServiceTime(fixed, unit)
    chosen = [factors[int((i + 0.5) / NUM_QUANTILES * len(factors))] for i in range(NUM_QUANTILES)]
    mean = sum(chosen) / len(chosen)
    if mean == 0:  # all but a few jobs took no time
        return ServiceTime(fixed, unit)
    return ServiceTime(fixed, unit, quantiles=tuple(round(f / mean, 4) for f in chosen))


def slope_of(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of the line of least squares, and its jackknife standard error.

    Each (n,). The error is infinite if one point alone, or no point, determines the slope. (Efron and Stein, 1981:
    unlike the textbook's formula, the jackknife detects that a single far point determines the line.)"""
    n = len(x)
    dx, dy = x - x.mean(), y - y.mean()
    sxx, sxy = float(dx @ dx), float(dx @ dy)
    if n < 3 or sxx <= 0:
        return 0.0, math.inf
    # Sums of squares without one point, about the mean of the others.
    without_xx, without_xy = sxx - dx * dx * n / (n - 1), sxy - dx * dy * n / (n - 1)
    if float(without_xx.min()) <= 1e-9 * sxx:
        return 0.0, math.inf
    slopes = without_xy / without_xx
    return sxy / sxx, math.sqrt((n - 1) / n * float(((slopes - slopes.mean()) ** 2).sum()))


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one sample's trajectory, of one sample's media, and of one published version."""

    trajectory: Bytes = 0
    media: Bytes = 0
    weights: Bytes = 0


class ScorerTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of one scorer's calls (units: samples), and a worker's number of concurrent calls; null: any number."""

    time: ServiceTime
    concurrency: Annotated[int, Meta(ge=1, lt=2**31)] | None = 1


class TokenTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of answers that an engine draws together, a token of each at a time.

    prefill   reading the prompts of answers that join (units: answers); no token is drawn meanwhile
    token     one token of every answer in the engine (units: answers)

    `lengths` in tokens, at the probabilities (i + 1/2) / len, define the distribution of lengths."""

    token: ServiceTime
    lengths: tuple[Annotated[int, Meta(ge=1, lt=2**31)], ...]
    prefill: ServiceTime = NOTHING

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths: expected at least one")

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def longest(self, answers: int) -> float:
        """Return the mean length of the longest of so many answers."""
        count, ordered = len(self.lengths), sorted(self.lengths)
        return sum(length * (((i + 1) / count) ** answers - (i / count) ** answers) for i, length in enumerate(ordered))

    def unfinished(self, size: int, answers: int) -> list[tuple[float, float]]:
        """Return, for every length, how far an engine is when its answers reach it.

        Args:
            size: Answers of a group.
            answers: How many the engine draws together from the first token on.

        Returns:
            The mean seconds until every answer has so many tokens or has ended, and the mean share of groups with an
            answer that has not ended before."""
        count, ordered, begin = len(self.lengths), sorted(self.lengths), self.prefill.mean(answers)
        found, shorter = [], 0.0  # the sum of the lengths below this one
        for i, length in enumerate(ordered):
            drawn = answers * (shorter + (count - i) * length) / count
            found.append((begin + length * self.token.fixed_s + drawn * self.token.unit_s, 1 - (i / count) ** size))
            shorter += length
        return found

    def length_of(self, seed: int) -> int:
        """Draw the length of the answer with that seed: the same on any engine, whatever else it draws."""
        return random.Random(seed).choice(self.lengths)

    @property
    def in_batches(self) -> ServiceTime:
        """Return the mean time of n answers in an engine that always has n: as one joins whenever one ends."""
        fixed, unit = (
            self.mean_length * getattr(self.token, part) + getattr(self.prefill, part) for part in ("fixed_s", "unit_s")
        )
        return ServiceTime(fixed, unit)

    def scaled(self, factor: float) -> TokenTimes:
        return msgspec.structs.replace(self, token=self.token.scaled(factor), prefill=self.prefill.scaled(factor))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The service times of one job. Every stage is a `ServiceTime`:

    generate  one engine, a batch of samples (units: samples; at most rollout.max_batch)
    score     one reward worker, a call of a scorer for a batch of samples (units: samples; at most reward.batch)
    proximal  the trainer, a pass that recomputes a group's log-probs (units: samples of the rank with most samples);
              only if the algorithm needs it
    train     the trainer, forward and backward of a group (units: samples of the rank with most samples)
    step      the trainer, an optimizer step
    export    the trainer, copying a version out: the part of a publish that blocks it
    publish   transfer of a version to the engines, from the copy to staged on all of them (blocks no role)
    swap      an engine pauses to switch
    switch    a shared device passes to the next role (unload one, wake the next); with placement.colocated

    `scorers` are the times of scorers by label; `score` applies to scorers that are not listed.

    `tokens` are the times of a model that draws tokens; `generate` is then their `TokenTimes.in_batches`.

    `source`: origin of the numbers. `assumed`: numbers with another origin."""

    name: str
    source: str
    assumed: str = ""
    generate: ServiceTime
    score: ServiceTime
    scorers: dict[str, ScorerTime] = {}
    proximal: ServiceTime = NOTHING
    train: ServiceTime
    step: ServiceTime = NOTHING
    export: ServiceTime = NOTHING
    publish: ServiceTime = NOTHING
    swap: ServiceTime = NOTHING
    switch: ServiceTime = NOTHING
    payload: Payload = Payload()
    tokens: TokenTimes | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.tokens is UNSET:
            return
        for part in ("fixed_s", "unit_s"):
            due, given = getattr(self.tokens.in_batches, part), getattr(self.generate, part)
            if abs(given - due) > _FAR_FROM_1 * due:
                raise ValueError(f"generate.{part}: by `tokens` it should be {due:.6g}, got {given:.6g}")

    def scaled(self, factor: float) -> Profile:
        """Multiply every service time."""
        own = {name: getattr(self, name).scaled(factor) for name in self._own()}
        scorers = {
            label: msgspec.structs.replace(one, time=one.time.scaled(factor)) for label, one in self.scorers.items()
        }
        tokens = UNSET if self.tokens is UNSET else self.tokens.scaled(factor)
        return msgspec.structs.replace(self, **own, scorers=scorers, tokens=tokens)

    def _own(self) -> list[str]:
        return [name for name in self.__struct_fields__ if isinstance(getattr(self, name), ServiceTime)]

    def stages(self) -> dict[str, ServiceTime]:
        """Return the time of every stage, by name; a scorer's is called `score/LABEL`."""
        own = {name: getattr(self, name) for name in self._own()}
        if self.tokens is not UNSET:
            own |= {"token": self.tokens.token, "prefill": self.tokens.prefill}
        return own | {f"score/{label}": one.time for label, one in self.scorers.items()}

    def scorer(self, label: str) -> ScorerTime:
        """Return the time of a scorer, by its label."""
        return self.scorers.get(label) or ScorerTime(self.score)


def shipped_profiles() -> list[str]:
    """List the names of the profiles that come with the package."""
    return sorted(
        path.name.removesuffix(".json") for path in resources.files(_SHIPPED).iterdir() if path.name.endswith(".json")
    )


def load_profile(name: str) -> Profile:
    """Load a shipped profile by name, or a file whose name ends in `.json`.

    Raises ConfigError, one line, if it does not exist, is not a profile, or contains only zero times."""
    if name.lower().endswith(".json"):
        return read_profile(Path(name).expanduser())
    if name not in shipped_profiles():
        raise ConfigError(
            f"emulation.profile: no profile {name!r}; shipped are {', '.join(shipped_profiles())}, or give a file that"
            " ends in .json"
        )
    with resources.as_file(resources.files(_SHIPPED) / f"{name}.json") as path:
        return read_profile(path)


def require_times(config: Config, profile: Profile) -> None:
    """Raise ConfigError unless the profile has the times of what the job's model draws, latents or tokens."""
    spec, draws = config.rollout.sampling, drawn(config) or "latents"
    if (profile.tokens is UNSET) != (draws == "latents"):
        has = "no times of tokens" if profile.tokens is UNSET else "times of tokens alone"
        raise ConfigError(
            f"emulation.profile: {profile.name} has {has}, and the recipe's model draws {draws}; give another profile"
        )
    if profile.tokens is UNSET:
        return
    if not isinstance(spec, SamplingSpec) or spec.most_tokens is None:
        name = config.model.pipeline
        found = "" if name is None else f"; {name!r} is not installed or cannot be imported"
        raise ConfigError(f"model.pipeline: required to emulate answers, because its family bounds their tokens{found}")
    if max(profile.tokens.lengths) > spec.most_tokens:
        raise ConfigError(
            f"rollout.sampling: the longest answer of profile {profile.name} has {max(profile.tokens.lengths)} tokens,"
            f" and the most are {spec.most_tokens}; raise it"
        )


def require_room(config: Config, payload: Payload) -> None:
    """Raise ConfigError if an update's samples, which are held together, are more than `buffer.max_bytes`."""
    groups = config.trainer.groups_per_update
    samples = groups * config.rollout.group_size
    needed = samples * payload.trajectory + num_with_media(config, groups) * payload.media
    if config.buffer.bound is not None and config.buffer.bound < needed:
        raise ConfigError(
            f"buffer.max_bytes: the {samples} samples of an update are held together, by the profile"
            f" {size_text(needed)}: expected at least {needed}, got {config.buffer.max_bytes}"
        )


def encode_profile(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def write_profile(path: Path, profile: Profile) -> None:
    write_atomic(path, encode_profile(profile))


def is_empty(profile: Profile) -> bool:
    """Return whether every stage takes no time: nothing was measured."""
    return not any(service.mean() for service in profile.stages().values())


def read_profile(path: Path, within: Path | None = None) -> Profile:
    """Read a profile's file, which must not lead out of the folder `within`. Raises ConfigError as `load_profile`."""
    try:
        profile: Profile = decode_json(read_file(path, _LARGEST_FILE, within), Profile)
    except TooLargeError as error:
        raise ConfigError(f"emulation.profile: {path}: {error.strerror}, so no profile") from None
    except OSError as error:
        raise ConfigError(f"emulation.profile: {path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"emulation.profile: {path}: not a profile: {error}") from None
    if is_empty(profile):
        raise ConfigError(
            f"emulation.profile: {path}: every stage takes 0 s, as if nothing had been measured; give the profile of a"
            " run with updates"
        )
    return profile
