"""Builds a small random CLIP, and prepares images for it as the published ones want them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

SIDE = 32
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of every published CLIP


def build(folder: Path) -> Path:
    """Writes the checkpoint, its tokenizer and its image processor."""
    from omni_async_pipelines.tiny import clip_tokenizer
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config={**sizes, **marks, "vocab_size": len(tokenizer)},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 8},
        projection_dim=12,
    )
    model = CLIPModel(config)
    model.logit_scale.data.fill_(4.5)  # 90: not the 100 at which training stops it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shapes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessorPil(**shapes).save_pretrained(folder)
    return folder


def pixels_of(image: np.ndarray) -> torch.Tensor:
    """Resizes a square image with Pillow and normalises it."""
    small = np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) / 255
    return torch.tensor((small - MEAN) / STD, dtype=torch.float32).permute(2, 0, 1)
