"""Draws samples of several calls: a program asks for one after the other, and they are joined to one sample.

Every call is a sample of the engine's own, with its own prompt and noise, so calls of different samples share batches,
and new weights arrive between any two steps of a call as they always do.
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
        """Draw one sample, in `rollout.calls` calls.

        The media of the last call are the sample's: the reward is theirs, and is shared by all calls. It must do the
        same whenever it is called with the same prompt and gets the same media, because lost samples are drawn again.
        Several samples are drawn at once. Whatever it raises counts as a failure of the sample, which is retried.

        Args:
            prompt: the sample's, from the prompt file.
            draw: draws one call, by the sample's `SamplingSpec`, for whatever prompt it is given, and returns its media
                as NumPy arrays."""


async def try_program(program: Program, probe: Any) -> str | None:
    """Return why a program's judges are wrong, which it finds out by its method `try_out`, if it has that.

    `try_out` is a coroutine function: (`omni_async.rewards.probe.Probe`) -> a sentence, or None. None without a probe.
    """
    found = getattr(program, "try_out", None)
    if found is None or probe is None:
        return None
    wrong: str | None = await found(probe)
    return wrong


def untried(program: Program) -> str | None:
    """Return why a program's judges could not be tried, which is its attribute `untried`, if it has that."""
    found: str | None = getattr(program, "untried", None)
    return found


async def draw_calls(
    program: Program, request: SampleRequest, generate: Callable[[SampleRequest], Awaitable[Trajectory]]
) -> Trajectory:
    """Draw the sample that `request` asks for as the program says, and join its calls.

    The tensors of call k, with the fields of `omni_async.rollout.base.Trajectory`, are under `call<k>`.

    Args:
        program: called once.
        request: of `calls` calls; the first has its seeds, the others have seeds made of these.
        generate: the engine's.

    Raises:
        ValueError: the program made more calls, or fewer, or asked for something else than a prompt.
        EngineError: the engine's, whatever the program made of it."""
    begun = 0
    made: dict[int, Trajectory] = {}
    broken: list[EngineError] = []

    async def draw(prompt: Prompt) -> Media:
        nonlocal begun
        call, begun = begun, begun + 1
        if begun > request.calls:
            raise ValueError(f"the rollout program made more than rollout.calls = {request.calls} calls")
        if not isinstance(prompt, Prompt):  # foreign code; the engine would be blamed
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
    )
