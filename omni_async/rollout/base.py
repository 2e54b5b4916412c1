"""Defines the interface of rollout engines.

An engine generates samples, and holds one version of the policy that can be swapped meanwhile.

An engine owns its batching: callers `generate` many samples concurrently and the engine mixes them as it likes, because
batching must not change a sample. Tensors it returns are on the CPU. `StagedVersion` holds an engine's staged version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from omni_async.aio.threads import in_daemon_thread
from omni_async.media import Media
from omni_async.types import SampleRequest, VersionSpans, WeightManifest, WeightReport
from omni_async.weights.digest import WeightError, verify

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

T = TypeVar("T")


class EngineError(RuntimeError):
    """The engine as a whole is unusable (wrong weights, dead child process).

    The sample that met the error did not cause it."""


@dataclass(frozen=True)
class Trajectory:
    """The trajectory of one sample.

    `tensors`, batch size [], contains the requested `fields` among:
      latents             (W + 1, *shape) float32: before the first trained step, and after each one
      log_probs           (W,) float64: mean over latent elements, as `omni_async.diffusion.sde` defines it for the
                          request's kind
      modality_log_probs  (W, M) float64: the same of each modality alone, if a sample has M of them
                          (`omni_async.diffusion.policy.HasModalities`); comes with log_probs
      means               (W, *shape) float32: transition means under the policy that took the step
      final               (*shape) float32: the last latents, which were decoded to the media
      conditioning        a nested TensorDict, the policy's
    With latents it also contains sigmas (N + 1,) float32 and steps (W,) int64.

    The fields of an answer of T tokens to a prompt of P tokens:
      prompt              (P,) int32: the prompt's tokens, as the model read them
      tokens              (T,) int32: the answer's, the end token included if the model ended it
      log_probs           (T,) float32: of each token in nats, at the recipe's temperature, under what drew it

    `versions`: the versions that took the denoising steps, trained or not, or that drew the tokens. `encoded`: how many
    prompts were encoded for it; `shared_steps`: how many denoising steps another sample took for it
    (`SampleResult`)."""

    tensors: TensorDict
    media: Media
    versions: VersionSpans
    encoded: int = 0
    shared_steps: int = 0


class RolloutEngine(Protocol):
    name: str

    async def start(self) -> WeightReport:
        """Load the model.

        Returns version 0 and the digest of the weights it loaded, or an empty digest if the engine cannot compute one.
        """

    async def generate(self, request: SampleRequest) -> Trajectory:
        """Generate one sample. ValueError if the request is wrong, EngineError if the engine is."""

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        """Receive a version without disturbing generation; returns the digest of the received bytes."""

    async def swap(self, version: int) -> WeightReport:
        """Switch to the staged version before the next denoising step of anything, in-flight samples included.

        In request batching, switch before the next batch."""

    async def close(self) -> None:
        """Free everything; `generate` calls in flight fail with EngineError."""


class StagedVersion(Generic[T]):
    """The one version that an engine may switch to; `T` is the type of the content that it needs for the switch."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._staged: tuple[int, T] | None = None

    def put(self, version: int, content: T) -> None:
        """Replace the version that was staged before."""
        self._staged = version, content

    def take(self, version: int) -> T:
        """Take the version out. EngineError, and nothing taken, unless `version` was staged last."""
        if self._staged is None or self._staged[0] != version:
            raise EngineError(
                f"{self._engine}: asked for version {version}, staged is {self._staged and self._staged[0]}"
            )
        (_, content), self._staged = self._staged, None
        return content


async def require_whole(engine: str, manifest: WeightManifest, buckets: list[np.ndarray]) -> None:
    """Compare the digest of the received bytes with the manifest's, in a thread.

    Args:
        engine: the engine's name, for the error.
        manifest: of the published version.
        buckets: the received bytes, uint8.

    Raises:
        EngineError: the version is damaged."""
    try:
        await in_daemon_thread(verify, manifest, buckets)
    except WeightError as error:
        raise EngineError(f"{engine}: {error}") from error
