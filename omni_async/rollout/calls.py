"""Generates samples of several calls: a program makes the calls, and they are joined into one sample.

Every call is a separate sample for the engine, with its own prompt and noise, so calls of different samples share
batches, and new weights arrive between any two steps of a call, as usual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from msgspec.structs import replace

from omni_async.control.seeds import derive
from omni_async.media import Media
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.types import Prompt, SampleRequest, VersionSpans

Draw = Callable[[Prompt], Awaitable[Media]]


class Program(Protocol):
    async def __call__(self, prompt: Prompt, draw: Draw) -> None:
        """Generate one sample, in `rollout.calls` calls.

        The media of the last call are the sample's: the reward is theirs, and all calls share it. The program must be
        deterministic for the same prompt and media, because lost samples are generated again. Several samples are
        generated concurrently. Any exception counts as a failure of the sample, which is retried.

        Args:
            prompt: the sample's, from the prompt file.
            draw: generates one call with any prompt and the sample's `SamplingSpec`, and returns its media as NumPy
                arrays."""


async def try_program(program: Program, probe: Any) -> str | None:
    """Return why a program's judges are wrong, as found by its optional method `try_out`.

    `try_out` is a coroutine function: (`omni_async.rewards.probe.Probe`) -> a sentence, or None. None without a probe.
    """
    found = getattr(program, "try_out", None)
    if found is None or probe is None:
        return None
    wrong: str | None = await found(probe)
    return wrong


def untried(program: Program) -> str | None:
    """Return why a program's judges could not be tried: its optional attribute `untried`."""
    found: str | None = getattr(program, "untried", None)
    return found


async def draw_calls(
    program: Program, request: SampleRequest, generate: Callable[[SampleRequest], Awaitable[Trajectory]]
) -> Trajectory:
    """Generate the requested sample with the program, and join its calls.

    The tensors of call k, with the fields of `omni_async.rollout.base.Trajectory`, are under `call<k>`.

    Args:
        program: called once.
        request: of `calls` calls; the first has its seeds, the others have seeds derived from these.
        generate: the engine's.

    Raises:
        ValueError: the program made more or fewer calls, or passed something other than a prompt.
        EngineError: the engine's, however the program handled it."""
    begun = 0
    made: dict[int, Trajectory] = {}
    broken: list[EngineError] = []

    async def draw(prompt: Prompt) -> Media:
        nonlocal begun
        call, begun = begun, begun + 1
        if begun > request.calls:
            raise ValueError(f"the rollout program made more than rollout.calls = {request.calls} calls")
        if not isinstance(prompt, Prompt):  # foreign code; otherwise the engine would seem at fault
            raise ValueError(f"the rollout program drew a {type(prompt).__name__}, expected a Prompt")
        try:
            made[call] = found = await generate(_request_of(request, call, prompt))
        except EngineError as error:
            broken.append(error)
            raise
        return found.media.numpy() if isinstance(found.media, Media) else found.media

    try:
        await program(request.prompt, draw)
    except Exception as error:
        if not broken:
            raise
        raise broken[0] from error  # a task group wraps it, and a broken engine is not the sample's fault
    if broken:
        raise broken[0]
    if len(made) != request.calls:
        raise ValueError(f"the rollout program made {len(made)} of rollout.calls = {request.calls} calls")
    return _joined([made[call] for call in range(request.calls)])


def _request_of(request: SampleRequest, call: int, prompt: Prompt) -> SampleRequest:
    def seed_of(seed: int) -> int:
        return derive("call", seed, call) if call else seed

    return replace(
        request,
        sample_id=f"{request.sample_id}.c{call}",
        prompt=prompt,
        calls=1,
        seed=seed_of(request.seed),
        initial_seed=None if request.initial_seed is None else seed_of(request.initial_seed),
    )


def _joined(calls: list[Trajectory]) -> Trajectory:
    from tensordict import TensorDict

    tensors: dict[str, Any] = {f"call{number}": one.tensors for number, one in enumerate(calls)}
    return Trajectory(
        TensorDict(tensors, batch_size=[]),
        calls[-1].media,
        VersionSpans.of(version for one in calls for version in one.versions),
        encoded=sum(one.encoded for one in calls),
        shared_steps=sum(one.shared_steps for one in calls),
    )
