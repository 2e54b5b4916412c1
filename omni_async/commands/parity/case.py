"""Describes the basis of a family's comparison: a checkpoint, samples of it, and its upstream pipeline.

Imports no torch: families list their cases in modules that load nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import SamplingSpec
from omni_async.types import Prompt, PromptAudio, PromptImage, PromptVideo, SampleRequest, SdeWindow

if TYPE_CHECKING:
    from torch import Tensor, nn

PROMPTS = ("the digit 7", "a photo of a red circle on a white background", "7")
_RATE = 16_000  # of sounds, per second
STEPS = 7  # not all sigmas are binary fractions, so schedules can differ by their rounding


class Upstream:
    """diffusers' pipeline of a checkpoint, which is called with a spec's own keys.

    A family whose pipeline has another call or another result subclasses it."""

    # Keys of specs that only affect how media are written.
    not_arguments: tuple[str, ...] = ("fps",)

    def __init__(self, path: str) -> None:
        from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

        self.pipeline: Any = DiffusionPipeline.from_pretrained(path, local_files_only=True)
        self.pipeline.set_progress_bar_config(disable=True)
        if shift := self.pipeline.scheduler.config.get("flow_shift"):  # a multistep solver has no steps for added noise
            self.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)

    def arguments(self, prompt: Prompt, spec: SamplingSpec) -> dict[str, Any]:
        """Return the pipeline's arguments for a sample, except its noise and the kind of output.

        A prompt's image is the argument `image`."""
        from PIL import Image

        keys = {name: value for name, value in msgspec.structs.asdict(spec).items() if name not in self.not_arguments}
        images = {"image": Image.open(prompt.images[0].path)} if prompt.images else {}
        return {"prompt": prompt.text, "num_inference_steps": STEPS, **images, **keys}

    def latents(self, prompt: Prompt, spec: SamplingSpec, noise: Tensor) -> Tensor:
        """Draw a sample's latents (1, *shape) without noise from its initial latents, in the policy's layout."""
        found: Tensor = self.pipeline(
            **self.arguments(prompt, spec), latents=noise.clone(), output_type="latent", return_dict=False
        )[0]
        return found

    def media(self, prompt: Prompt, spec: SamplingSpec, noise: Tensor) -> dict[str, Tensor]:
        """Draw a sample's media by part: images and videos as numbers from 0 to 255, audio from -1 to 1."""
        [shape] = spec.media()
        made = self.pipeline(
            **self.arguments(prompt, spec), latents=noise.clone(), output_type="pt", return_dict=False
        )[0][0]
        return {shape.part: made * 255}

    def denoisers(self, components: tuple[str, ...]) -> dict[str, nn.Module]:
        """Return the pipeline's modules for a policy's components."""
        return {name: getattr(self.pipeline, name) for name in components}


def built(builder: str, **shape: Any) -> Callable[[Path], Any]:
    """Return a function that writes a tiny checkpoint to a folder by `builder`, a `module:name` loaded at its call.

    Args:
        builder: takes the folder and `shape`.
        shape: for example the number of layers."""
    return lambda folder: load_named(builder)(folder, **shape)


@dataclass(frozen=True)
class Case:
    """The comparison of one checkpoint.

    specs: samples of two sizes; the second is guided if the family's models are.
    build: writes a checkpoint to a folder and returns its path (`built`).
    label: of the checkpoint, for a family with several.
    idle: parameters, as `component.name`, that no gradient reaches, since they feed nothing: a regular expression. An
        entry with `{last}`, the number of a list's last layer, is a literal name before it and a regular expression
        after it.
    upstream: makes the upstream pipeline of the checkpoint.
    prompts: of different lengths.
    image_sizes: (width, height) of each prompt's image, None for a prompt without one; empty: no images. `with_media`
        draws them. Samples of the second prompt are compared with the upstream pipeline's.
    sounds, films: seconds of each prompt's audio, and frames of its video, two per second; otherwise as `image_sizes`.
    targets: suffixes of the layers that get adapters."""

    specs: tuple[SamplingSpec, ...]
    build: Callable[[Path], Any]
    label: str = ""
    idle: tuple[str, ...] = ()
    upstream: Callable[[str], Upstream] = Upstream
    prompts: tuple[Prompt, ...] = tuple(Prompt(index, text) for index, text in enumerate(PROMPTS))
    image_sizes: tuple[tuple[int, int] | None, ...] = ()
    sounds: tuple[float | None, ...] = ()
    films: tuple[int | None, ...] = ()
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")

    def with_media(self, folder: Path) -> Case:
        """Return the case with its media: noise, in the folder as `<index>.png`, `<index>.wav` and `<index>.mp4`."""
        prompts, none = [], (None,) * len(self.prompts)
        given = zip(self.prompts, self.image_sizes or none, self.sounds or none, self.films or none, strict=True)
        for prompt, size, seconds, frames in given:
            images = prompt.images if size is None else (_image(folder, prompt.index, size),)
            audio = prompt.audio if seconds is None else (_sound(folder, prompt.index, seconds),)
            video = prompt.video if frames is None else (_film(folder, prompt.index, frames),)
            prompts.append(msgspec.structs.replace(prompt, images=images, audio=audio, video=video))
        return replace(self, prompts=tuple(prompts))

    def request(self, spec: SamplingSpec, number: int = 0, **changes: Any) -> SampleRequest:
        """Make a request whose window of three steps starts at 0, 1 or 2, depending on its number."""
        fields: dict[str, Any] = {
            "sample_id": f"s{number}",
            "kind": "train",
            "group": 0,
            "sample": number,
            "prompt": self.prompts[number % len(self.prompts)],
            "seed": 1000 + number,
            "spec": spec,
            "num_inference_steps": STEPS,
            "noise_level": 0.7,
            "sde_kind": "flow",
            "window": SdeWindow(number % 3, 3),
            "fields": ("latents", "log_probs", "means", "final", "conditioning"),
        }
        return SampleRequest(**(fields | changes))


def _image(folder: Path, number: int, size: tuple[int, int]) -> PromptImage:
    import numpy as np
    from PIL import Image

    from omni_async.data.image_files import prompt_image

    file, (width, height) = folder / f"{number}.png", size
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return prompt_image(file, file.name)


def _sound(folder: Path, number: int, seconds: float) -> PromptAudio:
    import numpy as np
    import soundfile

    from omni_async.data.audio_files import prompt_audio

    file = folder / f"{number}.wav"
    noise = np.random.default_rng(number).normal(0, 0.1, round(seconds * _RATE))
    soundfile.write(file, noise, _RATE)
    return prompt_audio(file, file.name)


def _film(folder: Path, number: int, frames: int) -> PromptVideo:
    import numpy as np

    from omni_async.data.video_files import prompt_video
    from omni_async.media import Media
    from omni_async.records.write.images import write_media

    pixels = np.random.default_rng(number).integers(0, 256, (frames, 3, 56, 84), np.uint8)
    [file] = write_media(Media(video=pixels, fps=2.0), folder / f"{number}")
    return prompt_video(file, file.name)[0]
