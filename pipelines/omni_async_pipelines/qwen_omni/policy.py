"""Prepares prompts for Qwen2.5-Omni's thinker, and computes tokens and their log-probs with it.

transformers, which takes seconds to import, is imported when a model or a processor is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from omni_async.data.audio_files import read_prompt_audio
from omni_async.data.image_files import read_prompt_image
from omni_async.data.video_files import read_prompt_videos
from omni_async.plugins.entry_points import load_named
from omni_async.tokens.packing import joined_media
from omni_async.tokens.policy import Packed, Prepared
from omni_async.types import Prompt
from omni_async_pipelines.qwen_omni.sampling import PAIR, QwenOmniSampling, context_of
from omni_async_pipelines.sampling import read_config

if TYPE_CHECKING:
    from transformers import DynamicCache

    from omni_async_pipelines.qwen_omni.thinker import DrawsTokens


_FEWEST_FRAMES = 3  # of the spectrogram: fewer give no token


@dataclass(frozen=True)
class KeysAndValues:
    """See `omni_async.tokens.policy.Cache`."""

    held: DynamicCache

    def keep(self, rows: Sequence[int]) -> None:
        self.held.batch_select_indices(torch.tensor(rows, dtype=torch.long))


class Seen(NamedTuple):
    """An image or a video in a prompt: its placeholder, frames, rows and columns of patches, and time between frames.

    The time is in positions; an image has one frame."""

    token: int
    frames: int
    rows: int
    columns: int
    step: int


class QwenOmniPolicy:
    """The `omni_async.tokens.policy.TokenPolicy` of Qwen2.5-Omni.

    Prompts have text, images, videos and audio. An answer ends with the chat's end token."""

    components: tuple[str, ...] = ("thinker",)
    frozen: tuple[str, ...] = ("thinker.visual", "thinker.audio_tower")
    # Of a related family, a subclass names its own.
    thinker_class = "omni_async_pipelines.qwen_omni.thinker:Thinker"
    processor_class = "transformers:Qwen2_5OmniProcessor"

    def __init__(self, path: str) -> None:
        self.path = path
        config = read_config(path, "")
        self._context = context_of(config)
        thinker = config["thinker_config"]
        self._merge = thinker.get("vision_config", {}).get("spatial_merge_size", 2)
        self._positions_a_second = thinker.get("position_id_per_seconds", 25)

    @cached_property
    def processor(self) -> Any:
        """Transformers' processor of the checkpoint, loaded at the first use."""
        from transformers.utils import logging

        before = logging.get_verbosity()
        logging.set_verbosity_error()  # the talker's configuration, which nothing reads, gives warnings
        try:
            return load_named(self.processor_class).from_pretrained(self.path, local_files_only=True)
        finally:
            logging.set_verbosity(before)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return (self.processor.tokenizer.eos_token_id,)

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        """See `TokenPolicy`. Raises ValueError if the checkpoint lacks a weight."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a run logs one line per update
        options: Any = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        cls = load_named(self.thinker_class)
        loaded: Any = cls.from_pretrained(self.path, dtype=dtype, **options)  # a pair with `output_loading_info`
        thinker, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"model.path: {self.path} lacks thinker.{missing[0]}, which the thinker needs")
        for prefix in self.frozen:
            thinker.get_submodule(prefix.removeprefix("thinker.")).requires_grad_(False)
        return {"thinker": thinker.train(False)}

    def layers(self, component: nn.Module) -> Sequence[nn.Module]:
        return list(cast("DrawsTokens", component).model.layers)

    def prepare(self, prompt: Prompt, spec: QwenOmniSampling) -> Prepared:
        text = self._chat(prompt, spec)
        for part, carried in Counter(file.part for file in prompt.files).items():
            if text.count(self._token(part)) != carried:  # nothing would read it
                raise ValueError(f"{part}: the checkpoint's chat template leaves it out")
        videos, step = self._videos(prompt, spec)
        files = {"images": _images(prompt), "videos": videos, "audio": self._sounds(prompt)}
        given: dict[str, Any] = {part: of for part, of in files.items() if of}
        found = self.processor(text=[text], **given, **_settings(step), return_tensors="pt")
        ids = found["input_ids"][0]
        if len(ids) + spec.max_tokens > self._context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and its answer up to {spec.max_tokens}, and the model's context has"
                f" {self._context}; shorten the prompt, or lower rollout.sampling.max_tokens"
            )
        tower = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        media = {name: found[name] for name in tower if name in found}
        if prompt.audio:  # only the frames with sound, not the padding
            heard = found["feature_attention_mask"].bool()
            media |= {
                "input_features": found["input_features"].transpose(1, 2)[heard],
                "audio_lengths": heard.sum(1),
            }
        seen = [
            Seen(self.processor.tokenizer.convert_tokens_to_ids(self._token(part)), frames, rows, columns, between)
            for part, between in (("image", 0), ("video", round(PAIR * step * self._positions_a_second)))
            for frames, rows, columns in media.get(f"{part}_grid_thw", torch.empty(0)).tolist()
        ]
        positions, next_position = rotary_positions(ids.tolist(), seen, self._merge)
        return Prepared(ids, positions, next_position, media)

    def vllm_prompt(self, prompt: Prompt, spec: QwenOmniSampling) -> dict[str, Any]:
        """See `omni_async.tokens.policy.ReadByVllm`."""
        rate = self.processor.feature_extractor.sampling_rate
        videos, step = self._videos(prompt, spec)
        sounds = [(sound, rate) for sound in self._sounds(prompt)]
        media = {"image": _images(prompt), "video": videos, "audio": sounds}
        given = {part: of for part, of in media.items() if of}
        how = {"mm_processor_kwargs": _settings(step)}
        return {"prompt": self._chat(prompt, spec), "multi_modal_data": given, **how}

    def _token(self, part: str) -> str:
        """Return the placeholder of a kind of files."""
        token: str = getattr(self.processor, f"{part}_token")
        return token

    def _videos(self, prompt: Prompt, spec: QwenOmniSampling) -> tuple[list[Any], float]:
        """Return the frames of the prompt's videos, each uint8 (F, height, width, 3), and the seconds between them.

        Raises ValueError for frames that exceed the model's context, before the processor copies them."""
        found = read_prompt_videos(prompt.video, spec.video_step, spec.video_frames, spec.video_pixels)
        side = self._merge * self.processor.video_processor.patch_size
        tokens = sum(one.pixels.size for one in found) // (3 * PAIR * side**2)
        if tokens > 2 * self._context:  # the processor rounds the sides, and so removes less than half of it
            raise ValueError(
                f"video: the frames have about {tokens} tokens, and the model's context has {self._context}; lower"
                " rollout.sampling.video_frames or video_pixels"
            )
        return [one.pixels for one in found], found[0].step if found else 0.0

    def _sounds(self, prompt: Prompt) -> list[Any]:
        """Return the prompt's audio, each float32 (n,) at the processor's rate.

        Raises ValueError for sound that the processor would cut, or that has no token."""
        reader = self.processor.feature_extractor
        rate, most = reader.sampling_rate, reader.n_samples
        found = [read_prompt_audio(one, rate) for one in prompt.audio]
        for sound in found:
            if not _FEWEST_FRAMES * reader.hop_length <= len(sound) <= most:
                least = _FEWEST_FRAMES * reader.hop_length / rate
                raise ValueError(f"audio: it lasts {len(sound) / rate:g} s, expected {least:g} to {most / rate:g} s")
        return found

    def _chat(self, prompt: Prompt, spec: QwenOmniSampling) -> str:
        """Return prompt and system message in the checkpoint's chat template, up to the beginning of the answer."""
        for text in (prompt.text, spec.system or ""):
            if (problem := spec.media_token_in(text)) is not None:
                raise ValueError(problem)
        content = [*({"type": file.part} for file in prompt.files), {"type": "text", "text": prompt.text}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if spec.system is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": spec.system}]})
        chat: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return chat

    def log_probs(self, components: Mapping[str, nn.Module], packed: Packed, temperature: float) -> Tensor:
        found: Tensor = components["thinker"](packed, temperature)
        return found

    @torch.no_grad()
    def prefill(
        self, components: Mapping[str, nn.Module], prompts: Sequence[Prepared], answers: Tensor
    ) -> tuple[Tensor, KeysAndValues]:
        from transformers import DynamicCache

        thinker = cast("DrawsTokens", components["thinker"])
        device = thinker.lm_head.weight.device
        ids = torch.cat([torch.stack([one.ids for one in prompts]), answers.cpu()], dim=1).to(device)
        after = torch.arange(answers.shape[1])
        positions = [torch.cat([one.positions, (one.next_position + after).expand(3, -1)], dim=1) for one in prompts]
        media = {name: value.to(device) for name, value in joined_media([one.media for one in prompts]).items()}
        text_config: Any = thinker.config.text_config
        cache = DynamicCache(config=text_config)
        given = (torch.arange(ids.shape[1], device=device) < len(prompts[0].ids)).expand_as(ids)
        inputs = thinker.embed(ids, media, given)
        return thinker.next_logits(inputs, torch.stack(positions, dim=1).to(device), cache), KeysAndValues(cache)

    @torch.no_grad()
    def decode(
        self, components: Mapping[str, nn.Module], cache: KeysAndValues, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        thinker = cast("DrawsTokens", components["thinker"])
        inputs = {"inputs_embeds": thinker.model.embed_tokens(tokens[:, None])}
        return thinker.next_logits(inputs, positions[:, None].expand(3, -1, -1), cache.held)

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self.processor.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def _images(prompt: Prompt) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(read_prompt_image(image).pixels) for image in prompt.images]


def _settings(step: float) -> dict[str, Any]:
    """Return the settings of transformers' processor for frames that are `step` seconds apart; 0: without videos."""
    return {"fps": 1 / step, "do_sample_frames": False} if step else {}


def rotary_positions(ids: Sequence[int], seen: Sequence[Seen], merge: int) -> tuple[Tensor, int]:
    """Place a prompt's tokens in time, rows and columns (M-RoPE), as transformers' `get_rope_index` does.

    Text and audio advance in all three. The tokens of a frame share the time of its first one, and differ in rows and
    columns.

    Args:
        ids: the P tokens, placeholders expanded.
        seen: the images and videos, in the order of their tokens.
        merge: how many patches become one token, in a row and in a column.

    Returns:
        The positions (3, P) int64, and the position of the first token after the prompt."""
    parts: list[Tensor] = []
    place = position = 0
    for token, frames, rows, columns, step in seen:
        start = ids.index(token, place)
        parts.append((position + torch.arange(start - place)).expand(3, -1))
        position += start - place
        rows, columns = rows // merge, columns // merge
        axes = torch.arange(frames) * step, torch.arange(rows), torch.arange(columns)
        parts.append(position + torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
        position += max((frames - 1) * step + 1, rows, columns)
        place = start + frames * rows * columns
    parts.append((position + torch.arange(len(ids) - place)).expand(3, -1))
    return torch.cat(parts, dim=1), position + len(ids) - place
