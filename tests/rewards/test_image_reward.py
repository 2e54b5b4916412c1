"""Tests ImageReward with a small random checkpoint under its published names, against BLIP's own whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval

from omni_async.config import schema
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt
from tests.support.images import as_media, score_all
from tests.support.tiny_clip import SIDE, pixels_of

WIDTH = 16
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (48, 48, 3), dtype=np.uint8) for _ in range(3)]
PROMPTS = [Prompt(i, text) for i, text in enumerate(("a red circle", "the digit", "a red digit " * 40))]
# What the authors' image encoder calls the parts of a block, beside what transformers calls them.
BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
}


def published(model: BlipForImageTextRetrieval) -> dict[str, torch.Tensor]:
    """The model's weights under the names of the authors' file."""
    own = model.state_dict()
    vision, text = model.vision_model.state_dict(), model.text_encoder.state_dict()
    found = {f"blip.text_encoder.{name}": one for name, one in text.items()}
    found["blip.text_encoder.embeddings.position_ids"] = torch.arange(4)[None]
    found["blip.visual_encoder.cls_token"] = vision["embeddings.class_embedding"]
    found["blip.visual_encoder.pos_embed"] = vision["embeddings.position_embedding"]
    for part in ("weight", "bias"):
        found[f"blip.visual_encoder.patch_embed.proj.{part}"] = vision[f"embeddings.patch_embedding.{part}"]
        found[f"blip.visual_encoder.norm.{part}"] = vision[f"post_layernorm.{part}"]
        found[f"blip.vision_proj.{part}"] = own[f"vision_proj.{part}"]
        for i in range(2):
            for theirs, ours in (BLOCK | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}).items():
                name = f"encoder.layers.{i}.{ours}.{part}"
                found[f"blip.visual_encoder.blocks.{i}.{theirs}.{part}"] = vision[name]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], BlipForImageTextRetrieval, Any]:
    """The scorer's parameters, the whole model, and its predictor."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("blip") / "tiny"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "the", "digit"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BlipConfig(
        text_config={**sizes, "vocab_size": 12, "encoder_hidden_size": WIDTH, "max_position_embeddings": 64},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 8},
        image_text_hidden_size=8,
    )
    model = BlipForImageTextRetrieval(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in ((WIDTH, 8), (8, 6), (6, 4), (4, 3), (3, 1))))
    numbers = (0, 2, 4, 6, 7)  # between the first ones are the dropouts of training
    weights = published(model)
    for number, layer in zip(numbers, head, strict=True):
        weights |= {f"mlp.layers.{number}.{name}": one.data for name, one in layer.named_parameters()}
    config.vision_config.image_size = 384  # of the folder that the configuration is from
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(weights, folder / "ImageReward.pt")
    return {"path": str(folder), "weights": str(folder / "ImageReward.pt")}, model, head.double()


def scored(params: dict[str, Any], media: list[Media], gpus: float = 0.0, **more: Any) -> list[float]:
    reward = schema.Reward(scorers=(schema.Scorer(name="image_reward", params=params | more),))
    return [score.value for score in score_all(LoadedReward.load(reward, gpus), media, PROMPTS[: len(media)])]


def expected(made: Any, images: list[np.ndarray], texts: list[str]) -> list[float]:
    """The published formula on what BLIP's whole model says of each image and text, one at a time."""
    params, model, head = made
    tokenizer = BertTokenizer.from_pretrained(params["path"])
    values = []
    for image, text in zip(images, texts, strict=True):
        tokens = tokenizer(text, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        with torch.no_grad():
            said = model(
                input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, pixel_values=pixels_of(image)[None]
            )
            values.append((head(said.question_embeds[0, 0].double()).item() - 0.16717362830052426) / 1.0333394966054072)
    return values


@pytest.mark.parametrize("device", DEVICES)
def test_images_score_the_published_formula_of_blips_reading(made: Any, device: str) -> None:
    found = scored(made[0], [as_media(image) for image in IMAGES], float(device != "cpu"), batch=2)
    assert found == pytest.approx(expected(made, IMAGES, [prompt.text for prompt in PROMPTS]), abs=1e-4)
    assert len({round(value, 4) for value in found}) == 3


def test_a_video_scores_the_mean_over_evenly_spaced_frames(made: Any) -> None:
    frames = RNG.integers(0, 256, (7, 48, 48, 3), dtype=np.uint8)
    video = Media(video=np.ascontiguousarray(frames.transpose(0, 3, 1, 2)), fps=8)
    values = expected(made, [frames[0], frames[3], frames[6]], [PROMPTS[0].text] * 3)
    assert scored(made[0], [video], frames=3) == pytest.approx([np.mean(values)], abs=1e-4)


def test_weights_that_do_not_fit_are_refused(made: Any, tmp_path: Path) -> None:
    params, _, _ = made
    weights = torch.load(params["weights"])
    for drop, said in (
        ("blip.visual_encoder.pos_embed", "no ImageReward checkpoint"),
        (
            "blip.text_encoder.embeddings.word_embeddings.weight",
            r"word_embeddings.weight is missing, expected \(12, 16",
        ),
        ("mlp.layers.7.weight", "layer of shape"),
    ):
        torch.save({name: one for name, one in weights.items() if name != drop}, tmp_path / "some.pt")
        with pytest.raises(RuntimeError, match=said):
            scored(params | {"weights": str(tmp_path / "some.pt")}, [])


def test_files_that_are_not_there_are_known_before_anything_is_loaded(made: Any) -> None:
    for wrong, said in (
        ({"path": "/no/where"}, "path: there is no"),
        ({"weights": "/no/x.pt"}, "weights: there is no"),
    ):
        with pytest.raises(registry.ScorerConfigError, match=said):
            registry.check_files(schema.Scorer(name="image_reward", params=made[0] | wrong))
