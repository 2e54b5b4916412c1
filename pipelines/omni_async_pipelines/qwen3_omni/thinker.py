"""Computes with Qwen3-Omni's thinker, a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from omni_async_pipelines.qwen_omni.thinker import DrawsTokens, joined


class Thinker(DrawsTokens, Qwen3OmniMoeThinkerForConditionalGeneration):
    """The thinker of Qwen3-Omni. A layer holds its experts' weights in two tensors."""

    def tower(self, pixels: Tensor, grids: Tensor) -> Tensor:
        found = self.get_image_features(pixels, grids, return_dict=True)
        return torch.cat([joined(found.pooler_output), *found.deepstack_features], dim=-1)

    def hear(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        features: Tensor = self.audio_tower(frames, feature_lens=lengths).last_hidden_state
        return features, _get_feat_extract_output_lengths(lengths)
