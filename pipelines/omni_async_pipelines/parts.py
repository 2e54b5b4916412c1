"""Contains the code shared by all families' policies and codecs, and loads the parts of a diffusers checkpoint.

diffusers and transformers, which take seconds to import, are imported when a model is loaded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Self, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.diffusion.components import Rule, stack_rows
from omni_async.diffusion.policy import SequencePlan
from omni_async.media import Media, require_media
from omni_async.types import Prompt


def load_part(cls: Any, path: str, folder: str, dtype: torch.dtype) -> Any:
    """Load a diffusers or transformers model in eval mode. From safetensors alone: the other formats are pickles.

    Args:
        cls: the model's class.
        path: the checkpoint's folder.
        folder: the part's, in the checkpoint's.
        dtype: of the weights."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a run logs one line per update, and a bar per model part would come between
    part = cls.from_pretrained(path, subfolder=folder, torch_dtype=dtype, local_files_only=True, use_safetensors=True)
    return part.eval()


def empty_part(cls: Any, path: str, folder: str, dtype: torch.dtype) -> Any:
    """Build a diffusers model as `load_part` returns it, with parameters on the meta device.

    Other tensors computed at construction (rotary tables) have their values.

    Args:
        cls, path, folder, dtype: as `load_part` takes them; only the configuration is read."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as when diffusers loads it: tables are also computed in it
    try:
        with init_empty_weights():
            part = cls.from_config(cls.load_config(path, subfolder=folder, local_files_only=True))
    finally:
        torch.set_default_dtype(before)
    # Not diffusers' own `to`, which would log a message about parts to keep in float32.
    return nn.Module.to(part, dtype).eval()


def empty_model(cls: Any, path: str, folder: str, dtype: torch.dtype) -> Any:
    """Build a diffusers or transformers model that `load_part` loads, with all tensors on the meta device.

    Args:
        cls, path, folder, dtype: as `load_part` takes them; only the configuration is read."""
    with torch.device("meta"):  # tied weights stay tied
        if hasattr(cls, "load_config"):
            part = cls.from_config(cls.load_config(path, subfolder=folder, local_files_only=True))
        elif hasattr(cls, "config_class"):
            part = cls(cls.config_class.from_pretrained(path, subfolder=folder, local_files_only=True))
        else:
            from transformers import AutoConfig

            part = cls.from_config(AutoConfig.from_pretrained(path, subfolder=folder, local_files_only=True))
    return nn.Module.to(part, dtype).eval()


# No VAE saves time on more pixels than this at once, and its memory grows with them.
_PIXELS_AT_ONCE = 1024 * 1024


def latent_grid(spec: Any, pixels: int) -> tuple[int, int]:
    """Return how many squares of `pixels` fit in a column and a row of the media. ValueError on a remainder."""
    if spec.height % pixels or spec.width % pixels or spec.height <= 0 or spec.width <= 0:
        raise ValueError(f"height and width must be positive multiples of {pixels}, got {spec.height} x {spec.width}")
    return spec.height // pixels, spec.width // pixels


def to_uint8(pixels: Tensor) -> Tensor:
    """Map a VAE's output in [-1, 1] to uint8 on the CPU, as diffusers' image processor does."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def as_images(pixels: Tensor) -> list[Media]:
    """Make the media of B samples of a VAE's output (B, 3, height, width) in [-1, 1]."""
    return [Media(image=image.clone()) for image in to_uint8(pixels)]


def as_videos(pixels: Tensor, fps: float) -> list[Media]:
    """Make the media of B samples of a VAE's output (B, 3, frames, height, width) in [-1, 1]."""
    return [Media(video=video.contiguous(), fps=fps) for video in to_uint8(pixels).transpose(1, 2)]


def stack_pixels(media: list[Media], spec: Any) -> Tensor:
    """Return the images or videos of B samples as float32 (B, ...) in [-1, 1]. ValueError if one is not the spec's."""
    require_media(media, spec)
    return torch.stack([torch.as_tensor(getattr(one, spec.media()[0].part)) for one in media]).float() / 127.5 - 1.0


def pack_patches(maps: Tensor) -> Tensor:
    """Make tokens of 2 x 2 patches: (B, C, 2 rows, 2 columns) to (B, rows * columns, 4 C)."""
    patches = maps.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_patches(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Invert `pack_patches`: (B, rows * columns, 4 C) to (B, C, 2 rows, 2 columns)."""
    patches = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (rows, columns))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def latent_statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the latents (B, C, F, h, w) of a video VAE, per channel."""
    both = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1).to(like.device, like.dtype) for values in both)
    return mean, std


class DiffusersPolicy(ABC):
    """A base class for every `Policy` whose parts are models of diffusers and transformers.

    A sample's conditioning has each tensor of `text_rules` as `prompt_<name>` and, if it is guided, also as
    `negative_prompt_<name>`. It has each tensor of `shared_rules` once, as `<name>`, for both branches.

    - denoiser: name of the denoisers' class in diffusers.
    - parts: the other parts as `module.Class`, by folder, which is also their argument of `codec`.
    - float32_parts: the parts that vLLM-Omni loads in float32, whatever the engine's dtype.
    - codec: class of the family's codec.
    - text_rules: how the tensors of a text are stacked (`omni_async.diffusion.components.stack_rows`).
    - shared_rules: the same for tensors that do not depend on the text, such as an image's.
    - guidance: the spec's key for the scale of classifier-free guidance."""

    denoiser: str
    parts: ClassVar[Mapping[str, str]]
    float32_parts: ClassVar[tuple[str, ...]] = ()
    codec: type[DiffusersCodec]
    text_rules: ClassVar[Mapping[str, Rule]]
    shared_rules: ClassVar[Mapping[str, Rule]] = {}
    guidance = "guidance_scale"
    components: tuple[str, ...] = ("transformer",)
    sequence_plan: SequencePlan | None = None

    def __init__(self, path: str) -> None:
        self.path = path

    # ---- defined by a family, with `sigmas` --------------------------------------------------------------------------

    @abstractmethod
    def latent_shape(self, spec: Any) -> tuple[int, ...]:
        """See `omni_async.diffusion.policy.Policy`."""

    @abstractmethod
    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: Any) -> dict[str, Any]:
        """Return the denoiser's inputs apart from `hidden_states`, which default to the latents.

        Args:
            latents: (B, *shape) in the denoiser's dtype.
            sigma: (B,) float32.
            text: the tensors of `text_rules` and `shared_rules`, (B, ...), and lists of B for jagged ones; floats in
                the denoiser's dtype.
            spec: the samples'."""

    @abstractmethod
    def blank_text(self, spec: Any) -> dict[str, Tensor]:
        """Return the tensors of `text_rules` of a short text, without content."""

    def blank_shared(self, spec: Any) -> dict[str, Tensor]:
        """Return the tensors of `shared_rules`, without content."""
        return {}

    def long_shared(self, spec: Any) -> dict[str, Tensor]:
        """Return the tensors of `shared_rules` of a prompt with everything the spec allows, such as an image."""
        return self.blank_shared(spec)

    def scale(self, spec: Any, component: str) -> float:
        """Return the scale of the guidance as `combine` takes it; 1 without guidance."""
        scale: float = getattr(spec, self.guidance)
        return scale

    def combine(self, cond: Tensor, uncond: Tensor, scale: float, spec: Any) -> Tensor:
        """Apply classifier-free guidance.

        Args:
            cond, uncond: predictions with the prompt and with the negative one, float32 (B, *shape).
            scale: of the guidance, > 1.
            spec: the samples'."""
        return uncond + scale * (cond - uncond)

    def call(self, denoiser: nn.Module, **inputs: Any) -> Any:
        """Run the denoiser. If an engine's own denoiser takes other arguments than diffusers', a subclass adds them."""
        return denoiser(**inputs)

    # ---- the contract ------------------------------------------------------------------------------------------------

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        # diffusers would keep some norms in float32, but vLLM-Omni does not and FSDP2 cannot shard them.
        return {name: nn.Module.to(load_part(self._class, self.path, name, dtype), dtype) for name in self.components}

    def build_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        return {name: empty_part(self._class, self.path, name, dtype) for name in self.components}

    @property
    def _class(self) -> Any:
        return getattr(import_module("diffusers"), self.denoiser)

    def component_of(self, sigma: float) -> str:
        return self.components[0]

    def velocity(
        self,
        components: Mapping[str, nn.Module],
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: Any,
        *,
        unconditional_gradient: bool = True,
    ) -> Tensor:
        """Compute the velocity; ValueError if there is guidance and the conditioning has no negative prompt."""
        # With a single component, skip `component_of`: reading sigma would wait for the device.
        component = self.components[0] if len(self.components) == 1 else self.component_of(sigma[0].item())
        denoiser = components[component]
        latents = latents.to(next(denoiser.parameters()).dtype)
        sigma = sigma.to(latents.device)

        def ready(tensor: Tensor) -> Tensor:
            return tensor.to(latents.device, latents.dtype if tensor.is_floating_point() else tensor.dtype)

        def predict(branch: str) -> Tensor:
            text: dict[str, Any] = {}
            keys = {name: f"{branch}_{name}" for name in self.text_rules} | {name: name for name in self.shared_rules}
            for name, rule in (*self.text_rules.items(), *self.shared_rules.items()):
                found = cast(Any, conditioning).get(keys[name], as_list=rule == "jagged")
                text[name] = [ready(row) for row in found] if rule == "jagged" else ready(found)
            inputs = self.inputs(latents, sigma, text, spec)
            v: Tensor = self.call(denoiser, **{"hidden_states": latents, "return_dict": False} | inputs)[0]
            return v.float()

        scale = self.scale(spec, component)
        if scale > 1 and f"negative_prompt_{next(iter(self.text_rules))}" not in conditioning:
            raise ValueError(f"classifier-free guidance of {scale} needs conditioning with a negative prompt")
        cond = predict("prompt")
        if scale <= 1:
            return cond
        with torch.set_grad_enabled(torch.is_grad_enabled() and unconditional_gradient):
            uncond = predict("negative_prompt")
        return self.combine(cond, uncond, scale, spec)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        branches = ("prompt", "negative_prompt")
        of_texts = {f"{b}_{name}": rule for b in branches for name, rule in self.text_rules.items()}
        return stack_rows(rows, of_texts | {**self.shared_rules})

    def blank_conditioning(self, spec: Any) -> TensorDict:
        return make_conditioning(spec.guided, lambda branch: self.blank_text(spec), self.blank_shared(spec))

    def long_conditioning(self, spec: Any, tokens: int) -> TensorDict:
        def long_text(branch: str) -> dict[str, Tensor]:
            text = self.blank_text(spec)
            rules = self.text_rules
            return {n: t if rules[n] == "same" else t[:1].expand(tokens, *t.shape[1:]) for n, t in text.items()}

        return make_conditioning(spec.guided, long_text, self.long_shared(spec))

    def build_codec(self, dtype: torch.dtype, engine: str) -> DiffusersCodec:
        found = {}
        for folder, cls in self.parts.items():
            library, _, name = cls.rpartition(".")
            is_model = not folder.startswith(("tokenizer", "processor"))
            own = torch.float32 if engine == "vllm_omni" and folder in self.float32_parts else dtype
            made = empty_model(getattr(import_module(library), name), self.path, folder, own) if is_model else None
            found[folder] = made
        return self.codec(**found)

    def load_codec(self, dtype: torch.dtype) -> DiffusersCodec:
        found = {}
        for folder, cls in self.parts.items():
            library, _, name = cls.rpartition(".")
            loaded = getattr(import_module(library), name)
            if folder.startswith(("tokenizer", "processor")):
                found[folder] = loaded.from_pretrained(self.path, subfolder=folder, local_files_only=True)
            else:
                found[folder] = load_part(loaded, self.path, folder, dtype)
        return self.codec(**found)


class DiffusersCodec(ABC):
    """The code shared by every `omni_async.diffusion.policy.Codec` around a VAE and text encoders.

    The parts may be diffusers' or vLLM-Omni's: they have the same interface. Parts that are models move to a device. A
    codec that reads the spec's size, such as for an image that it encodes, overrides `conditioning_key`.

    decoders: the models that `decode` needs in addition to the VAE; all others are `encoders`, which it does not
    need."""

    decoders: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, vae: Any, **parts: Any) -> None:
        self.vae = vae
        models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.models = [vae, *models.values()]
        self.encoders = [model for name, model in models.items() if name not in self.decoders]

    def to(self, device: Any) -> Self:
        for model in self.models:
            model.to(device)
        return self

    def conditioning_key(self, spec: Any) -> Hashable:
        return spec.guided, *(getattr(spec, key) for key in spec.encoding_keys if hasattr(spec, key))

    @torch.no_grad()
    def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
        def encode_branch(branch: str) -> dict[str, Tensor]:
            return self.encode_text(branch_text(prompt, spec, branch), spec)

        return make_conditioning(spec.guided, encode_branch, self.encode_shared(prompt, spec))

    @abstractmethod
    def encode_text(self, text: str, spec: Any) -> dict[str, Tensor]:
        """Return one text's tensors of the policy's `text_rules`. ValueError if the model cannot take the text."""

    def encode_shared(self, prompt: Prompt, spec: Any) -> dict[str, Tensor]:
        """Return a prompt's tensors of the policy's `shared_rules`. ValueError if the model cannot take the prompt."""
        return {}

    def most_at_once(self, spec: Any) -> int:
        """Return how many samples pass the VAE together: at most 1024 x 1024 pixels, frames included, or one sample."""
        [pixels] = [math.prod(part.shape) // 3 for part in spec.media() if part.part in ("image", "video")]
        return max(1, _PIXELS_AT_ONCE // pixels)

    @abstractmethod
    def decode(self, latents: Tensor, spec: Any) -> list[Media]:
        """See `omni_async.diffusion.policy.Codec`."""

    @abstractmethod
    def encode_media(self, media: list[Media], spec: Any) -> Tensor:
        """See `omni_async.diffusion.policy.Codec`."""


class ImageCodec(DiffusersCodec):
    """A codec whose VAE is an `AutoencoderKL`, with one scale and shift for all channels of its latents."""

    def to_maps(self, latents: Tensor, spec: Any) -> Tensor:
        """Return latents (B, *shape) as the VAE takes them, (B, C, h, w)."""
        return latents

    def from_maps(self, maps: Tensor) -> Tensor:
        """Invert `to_maps`."""
        return maps

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: Any) -> list[Media]:
        config = self.vae.config
        maps = self.to_maps(latents, spec) / config.scaling_factor + config.shift_factor
        batches = maps.to(self.vae.device, self.vae.dtype).split(self.most_at_once(spec))
        return [media for batch in batches for media in as_images(self.vae.decode(batch, return_dict=False)[0])]

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: Any) -> Tensor:
        config = self.vae.config
        images = stack_pixels(media, spec).to(self.vae.device, self.vae.dtype)
        maps: Tensor = self.vae.encode(images).latent_dist.mode().float()
        return self.from_maps((maps - config.shift_factor) * config.scaling_factor)


def branch_text(prompt: Prompt, spec: Any, branch: str) -> str:
    """Return the text of the branch `prompt` or `negative_prompt`; the latter is the prompt's own if it has one."""
    if branch == "prompt":
        return prompt.text
    negative: str = spec.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
    return negative


def make_conditioning(
    guided: bool, tensors_of: Callable[[str], dict[str, Tensor]], shared: dict[str, Tensor]
) -> TensorDict:
    """Make a sample's conditioning from the shared tensors, its prompt and, if it is guided, its negative prompt."""
    branches = ("prompt", "negative_prompt") if guided else ("prompt",)
    named = {f"{branch}_{name}": t for branch in branches for name, t in tensors_of(branch).items()}
    return TensorDict(named | shared, batch_size=[])
