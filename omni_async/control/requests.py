"""Makes the groups to admit and the requests of their samples, and checks the results.

Only `RequestFactory` turns configuration, ids and the run seed into a request to an engine. `GroupSource` assigns group
numbers. It first returns the groups that an earlier attempt of the run had begun, in the order of their admission, then
new groups with the next numbers. Pure bookkeeping; waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from omni_async.config import Config
from omni_async.config.held import shown_of_group
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.control.group import Group
from omni_async.control.seeds import PromptStream, draw_bucket, initial_noise_seed, sample_seeds, window_of
from omni_async.types import Prompt, ReadyGroup, SampleKind, SampleRequest, SampleResult, SdeWindow


def trained_steps(request: SampleRequest) -> Sequence[int]:
    """Return the numbers of step versions that a result of `request` may carry.

    A training sample without a window carries the versions of all its steps, or none if it comes from a dataset. An
    answer of tokens carries one for each of its tokens, at least one."""
    if request.window is not None:
        return (request.calls * request.window.size,)
    if request.kind != "train":
        return (0,)
    most = getattr(request.spec, "most_tokens", None)
    return (request.calls * request.num_inference_steps, 0) if most is None else range(1, most + 1)


def require_trained_steps(request: SampleRequest, result: SampleResult) -> None:
    """Raise ValueError unless the result has a version for every trained step, or drawn token, of its request."""
    found, window = result.step_versions.num_steps, request.window
    if window is not None and found == request.calls * window.size:  # fast path for nearly every sample
        return
    expected = trained_steps(request)
    if found not in expected:
        due = f"1 to {len(expected)} tokens" if isinstance(expected, range) else f"{expected[0]} trained steps"
        raise ValueError(f"sample {result.sample_id} of {result.engine}: {found} step versions for {due}")


def spread(prompts: Sequence[Prompt], limit: int | None) -> Sequence[Prompt]:
    """Return at most `limit` prompts, evenly spread and in order; None: all."""
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[position * len(prompts) // limit] for position in range(limit)]


class RequestFactory:
    """A maker of sample requests.

    `fields` are the trajectory tensors of training samples, as the trainer's objective declares them; validation
    samples carry none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.fields: tuple[str, ...] = ()

    def window(self, group: int) -> SdeWindow | None:
        return window_of(group, self._config)

    def bucket(self, group: int) -> int:
        """Return the number of the group's bucket; 0 without buckets."""
        weights = [bucket.weight for bucket in self._config.rollout.buckets]
        return draw_bucket(self._config.run.seed, group, weights) if weights else 0

    def training(self, group: int, prompt: Prompt, window: SdeWindow | None, bucket: int = 0) -> list[SampleRequest]:
        """Return the requests of a group's samples, in their order.

        Args:
            group: its number.
            prompt: the prompt of all samples.
            window: the denoising steps that are noisy and trained; None: sampling is without noise.
            bucket: index into `rollout.buckets`; 0 without buckets."""
        rollout, seed = self._config.rollout, self._config.run.seed
        shared = initial_noise_seed(seed, prompt.index, group) if rollout.share_initial_noise else None
        first = self._request("train", group, prompt, rollout.num_inference_steps)
        first = self._in_shape(first, rollout.specs[bucket])
        first = replace(first, window=window, fields=self.fields, initial_seed=shared)
        seeds = sample_seeds(seed, prompt.index, group, rollout.group_size)
        return _copies(first, f"g{group}", seeds)

    def validation(self, version: int, prompts: tuple[Prompt, ...]) -> list[SampleRequest]:
        """Return the requests of a validation round.

        Every round has the same prompts and seeds, so that rounds differ by the policy alone. A prompt's seeds do not
        depend on `validation.limit`. Answers are drawn at the temperature of training, so a round's mean reward is that
        of the policy that is trained."""
        validation, seed = self._config.validation, self._config.run.seed
        if validation is None:
            return []
        requests = []
        for prompt in spread(prompts, validation.limit):
            first = self._request("validation", version, prompt, validation.num_inference_steps)
            seeds = sample_seeds(seed, prompt.index, "validation", validation.samples_per_prompt)
            requests += _copies(first, f"v{version}.p{prompt.index}", seeds)
        return requests

    def _request(self, kind: SampleKind, group: int, prompt: Prompt, num_inference_steps: int) -> SampleRequest:
        """Return a request with the fields that all samples of a prompt share; the caller fills in the rest."""
        rollout = self._config.rollout
        noise_level = rollout.sde.noise_level if rollout.sde and kind == "train" else 0.0
        sde_kind = rollout.sde.kind if rollout.sde else "flow"
        request = SampleRequest(
            "",
            kind,
            group,
            0,
            prompt,
            0,
            rollout.sampling,
            num_inference_steps,
            noise_level,
            sde_kind,
            window=None,
            calls=rollout.calls,
        )
        return self._in_shape(request, rollout.sampling)

    def _in_shape(self, request: SampleRequest, spec: Any) -> SampleRequest:
        """Return the request for samples of the spec. Validation samples have the encoding of training samples, too.

        Samples of one spec may share a batch, whose conditioning has the same keys."""
        encoded_for = self._config.encoded_for(spec)
        return replace(request, spec=spec, encoded_for=None if encoded_for is spec else encoded_for)


def _copies(first: SampleRequest, name: str, seeds: list[int]) -> list[SampleRequest]:
    """Return a request for each seed."""
    # Copies of one request, because filling in every field of every sample would dominate the time of admission.
    return [
        replace(first, sample_id=f"{name}.s{sample}", sample=sample, seed=seed) for sample, seed in enumerate(seeds)
    ]


class GroupSource:
    def __init__(self, config: Config, prompts: Sequence[Prompt], factory: RequestFactory, start: ControlState) -> None:
        self._config = config
        self._prompts = PromptStream(prompts, config.run.seed, config.data.shuffle)
        self._factory = factory
        self._begun = deque(start.to_admit(config.staleness.max_updates, config.trainer.groups_per_update))
        self.next_group = start.next_group  # the first number that was not given out

    def next_size(self, version: int) -> tuple[int, int, int]:
        """Return the bucket, and the numbers of samples and of shown samples, of the group that `next` will return."""
        number = self._begun[0].group if self._begun else self.next_group
        config = self._config
        return self._factory.bucket(number), config.rollout.group_size, len(shown_of_group(config, number, version))

    @property
    def resumes(self) -> bool:
        """Return whether the group that `next` will return belongs to an earlier attempt."""
        return bool(self._begun)

    def next(self, version: int) -> tuple[Group, ReadyGroup | None]:
        """Return a group for admission at `version`, and its ready group of an earlier attempt.

        The latter is None unless that attempt had the group ready and it passes `_would_be`."""
        if not self._begun:
            self.next_group += 1
            return self._group(self.next_group - 1, version), None
        former = self._begun.popleft()
        if isinstance(former, ReadyGroup):
            group = self._group(former.group, former.admitted_version)
            if _would_be(group, former):
                return group, former
        group = self._group(former.group, version)
        group.attempts = former.attempts if isinstance(former, Unfinished) else 1
        return group, None

    def _group(self, number: int, version: int) -> Group:
        prompt, window, bucket = self._prompts[number], self._factory.window(number), self._factory.bucket(number)
        requests = self._factory.training(number, prompt, window, bucket)
        shown = shown_of_group(self._config, number, version)
        return Group(number, prompt, window, version, requests, bucket, shown)

    def take_up(self, groups: list[ReadyGroup]) -> None:
        """Add the trajectories to ready groups of the earlier attempt."""
        found = {group.group: group for group in groups}
        self._begun = deque(found.get(one.group, one) if isinstance(one, ReadyGroup) else one for one in self._begun)

    def state(self) -> tuple[tuple[Unfinished, ...], tuple[ReadyGroup, ...]]:
        """Return the groups of the earlier attempt that wait for readmission: unfinished and ready."""
        waiting = tuple(self._begun)
        return (
            tuple(one for one in waiting if isinstance(one, Unfinished)),
            tuple(one for one in waiting if isinstance(one, ReadyGroup)),
        )


def _would_be(group: Group, ready: ReadyGroup) -> bool:
    """Return whether the complete group will have the prompt, window, bucket, samples and steps of `ready`."""
    steps = {sample.sample_id: sample.step_versions.num_steps for sample in ready.samples}
    requests = {sample.request.sample_id: sample.request for sample in group.samples}
    return (
        (group.prompt, group.window, group.bucket) == (ready.prompt, ready.window, ready.bucket)
        and requests.keys() == steps.keys()
        and all(steps[name] in trained_steps(request) for name, request in requests.items())
    )
