"""Scores how well people would like an image for its prompt: ImageReward (Xu et al. 2023, arXiv:2304.05977).

BLIP's text encoder reads the prompt (at most 35 tokens) while it attends to the image; a predictor maps the state h of
its first token to a number:

    value = (W_5 (... (W_1 h + b_1) ...) + b_5 - mean) / std

without a nonlinearity between the layers (their dropout matters only in training). Mean and standard deviation are the
published checkpoint's over its own training data, so that 0 is an average image.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from omni_async.rewards.scorers.head import Head, read_tensors
from omni_async.rewards.scorers.model_scorer import Count, ModelScorer
from omni_async.rewards.scorers.pretrained import Precision, folder_of, load_part, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from omni_async.media import Media

MEAN, STD = 0.16717362830052426, 1.0333394966054072
_MOST_TOKENS = 35
# Regular expressions for names of the published image encoder's weights (timm's names), and transformers' names.
_NAMES = (
    (r"^visual_encoder\.norm\.", "vision_model.post_layernorm."),
    (r"^visual_encoder\.patch_embed\.proj\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual_encoder\.pos_embed$", "vision_model.embeddings.position_embedding"),
    (r"^visual_encoder\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision_model.encoder.layers.\1.layer_norm\2."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision_model.encoder.layers.\1.self_attn.qkv."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision_model.encoder.layers.\1.self_attn.projection."),
    (r"^visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision_model.encoder.layers.\1.mlp."),
)


class ImageRewardScorer(ModelScorer):
    """A scorer of images; for a video, the mean over `frames` frames.

    `path`: a folder with the configuration and the tokenizer of a BLIP in transformers' layout with the sizes of the
    weights: BLIP large. Its own weights are not read. `weights`: the published checkpoint, `ImageReward.pt`. `dtype`:
    the precision of BLIP; the predictor runs in float64."""

    name = "image_reward"
    model_type = "blip"
    files = ("weights",)

    def __init__(
        self,
        *,
        path: str,
        weights: str,
        dtype: Precision = "float32",
        frames: Count = 4,
        batch: Count = 16,
        device: str,
    ) -> None:
        from transformers import AutoTokenizer, CLIPImageProcessorPil

        super().__init__(dtype=dtype, frames=frames, batch=batch, device=device)
        tensors = read_tensors(str(folder_of(weights)))
        model = _blip(path, {name.removeprefix("blip."): one for name, one in tensors.items()}, weights)
        self._tokenizer = load_part(AutoTokenizer, folder_of(path))
        side = model.config.vision_config.image_size
        self._prepare: Any = CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        head = {name: one for name, one in tensors.items() if name.startswith("mlp.")}
        self._head = Head(head, f"weights: {weights}", model.config.text_config.hidden_size)
        self._set_model(model, folder_of(path), self._head.version)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        shown = self._shown(media)
        rows = self._head(self._read_all(self._read, shown, prompts))
        return [Score(float(values.mean())) for values in per_sample((rows[:, 0] - MEAN) / STD, shown)]

    def _read(self, images: list[NDArray[np.uint8]], texts: list[str]) -> NDArray[np.float64]:
        """Return the state of the first token of each text, read together with its image: (images, width)."""
        pixels = self._prepare(images, return_tensors="pt", input_data_format="channels_last").pixel_values
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt").to(
            self._device
        )
        seen = self._model.vision_model(pixel_values=pixels.to(self._device, self._dtype)).last_hidden_state
        found = self._model.text_encoder(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=seen
        )
        states: NDArray[np.float64] = found.last_hidden_state[:, 0].double().cpu().numpy()
        return states


def _blip(path: str, tensors: dict[str, Any], file: str) -> Any:
    """Return BLIP with these weights, on the CPU in float32, for images of the size that they were trained on.

    Args:
        path: the folder of its configuration.
        tensors: by their published names.
        file: the source of the tensors, for errors.

    Raises:
        ValueError: the tensors do not fit a BLIP of these sizes."""
    import torch
    from transformers import BlipConfig, BlipForImageTextRetrieval

    named = {_transformers_name(name): tensor for name, tensor in tensors.items()}
    config: Any = BlipConfig.from_pretrained(folder_of(path), local_files_only=True)
    places = named.get("vision_model.embeddings.position_embedding")
    if places is None:
        raise ValueError(f"weights: {file} has no blip.visual_encoder.pos_embed, so it is no ImageReward checkpoint")
    config.vision_config.image_size = round((places.shape[1] - 1) ** 0.5) * config.vision_config.patch_size
    model = BlipForImageTextRetrieval(config)
    kept = {name: one for name, one in named.items() if name.startswith(("vision_model.", "text_encoder."))}
    own = {name: one for name, one in model.state_dict().items() if name.startswith(("vision_model.", "text_encoder."))}
    wrong = [name for name in own if name not in kept or kept[name].shape != own[name].shape]
    if wrong:
        found = tuple(kept[wrong[0]].shape) if wrong[0] in kept else "missing"
        raise ValueError(
            f"weights: {len(wrong)} of {file} do not fit the configuration in {path}: {wrong[0]} is {found}, expected"
            f" {tuple(own[wrong[0]].shape)}"
        )
    model.load_state_dict({name: kept[name] for name in own}, strict=False)
    for name in ("vision_proj", "text_proj", "itm_head"):  # randomly initialised and unused
        setattr(model, name, torch.nn.Identity())
    return model.float().eval().requires_grad_(False)


def _transformers_name(name: str) -> str:
    for published, ours in _NAMES:
        name = re.sub(published, ours, name)
    return name
