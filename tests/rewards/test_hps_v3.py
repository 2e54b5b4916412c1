"""Tests HPSv3 with a small random checkpoint, against the states of the whole Qwen2-VL at hand-made token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omni_async_pipelines.tiny import qwen2_tokenizer
from safetensors.torch import save_file
from transformers import (
    AutoTokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from omni_async.config import schema
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt
from tests.support.images import as_media, score_all
from tests.support.tiny_judge import CHAT_TEMPLATE

WIDTH = 32
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
RNG = np.random.default_rng(0)
SIZES, DARKEST = ((448, 448), (300, 500), (448, 448)), (0, 90, 180)
IMAGES = [RNG.integers(a, a + 70, (*size, 3), dtype=np.uint8) for size, a in zip(SIZES, DARKEST, strict=True)]
PROMPTS = [Prompt(0, "a red circle"), Prompt(1, "a photo of a red circle rated"), Prompt(2, "<|Reward|> rate it {x}")]
QUESTION = "rate it: {text_prompt} and <|Reward|> it\n"


class World:
    """A checkpoint in a folder, and the model and the predictor that it was made of."""

    def __init__(self, folder: Path, older: bool) -> None:
        torch.manual_seed(0)
        tokenizer = qwen2_tokenizer(("a photo of a red circle", "rate it: a and it") * 20, 400)
        tokenizer.chat_template = CHAT_TEMPLATE
        ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{text}|>") for name, text in (
            ("image_token", "image_pad"), ("video_token", "video_pad"),
            ("vision_start_token", "vision_start"), ("vision_end_token", "vision_end"),
        )}  # fmt: skip
        self.mark = len(tokenizer)  # of the token that the training added
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        text = {**sizes, "intermediate_size": 64, "vocab_size": self.mark + 1, "rope_parameters": rope}
        text |= {"bos_token_id": 0, "eos_token_id": 0}
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "patch_size": 14}
        config = Qwen2VLConfig(**ids, tie_word_embeddings=False, text_config=text, vision_config=vision)
        self.model = Qwen2VLForConditionalGeneration(config).eval()
        linear, relu, dropout = torch.nn.Linear, torch.nn.ReLU, torch.nn.Dropout
        self.head = torch.nn.Sequential(linear(WIDTH, 8), relu(), dropout(), linear(8, 4), relu(), linear(4, 2)).eval()
        for parameter in (*self.model.parameters(), *self.head.parameters()):
            torch.nn.init.normal_(parameter, std=0.4)
        self.model.get_input_embeddings().weight.data[self.mark] /= 10  # so that it shows what it attends to
        weights = {f"rm_head.{name}": one for name, one in self.head.state_dict().items()}
        for name, one in self.model.state_dict().items():
            saved = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
            weights[saved if older else name] = one.contiguous()
        config.text_config.vocab_size = 600  # of the model that the training began with
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        Qwen2VLImageProcessorPil().save_pretrained(folder)
        save_file(weights, folder / "HPSv3.safetensors")
        (folder / "question.txt").write_text(QUESTION)
        self.folder, self.weights = folder, weights
        self.params = {
            "path": str(folder),
            "weights": str(folder / "HPSv3.safetensors"),
            "question": str(folder / "question.txt"),
            "dtype": "float32",
        }

    def outputs(self, image: np.ndarray, prompt: str) -> np.ndarray:
        """mu and log(sigma) of one image, from ids and patches that are put together here."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        patches = Qwen2VLImageProcessorPil(min_pixels=200704, max_pixels=200704)(image, return_tensors="pt")
        before, after = QUESTION.format(text_prompt=prompt).split("<|Reward|>")
        pads = int(patches.image_grid_thw.prod()) // 4
        ids = tokenizer(f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>{before}").input_ids
        ids += [self.mark, *tokenizer(f"{after}<|im_end|>\n<|im_start|>assistant\n").input_ids]
        marked = torch.tensor([ids])
        with torch.no_grad():
            said = self.model(
                input_ids=marked,
                pixel_values=patches.pixel_values,
                image_grid_thw=patches.image_grid_thw,
                mm_token_type_ids=(marked == self.model.config.image_token_id).int(),
                output_hidden_states=True,
            )
            return self.head(said.hidden_states[-1][0, ids.index(self.mark)]).numpy()


@pytest.fixture(scope="module", params=[True, False], ids=["as published", "as saved now"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("hps_v3"), request.param)


def scored(params: dict[str, Any], media: list[Media], gpus: float = 0.0, **more: Any) -> list[Any]:
    reward = schema.Reward(scorers=(schema.Scorer(name="hps_v3", params=params | more),))
    return score_all(LoadedReward.load(reward, gpus), media, PROMPTS[: len(media)])


@pytest.mark.parametrize("device", DEVICES)
def test_images_score_mu_of_the_state_at_the_special_token(world: World, device: str) -> None:
    texts = [prompt.text.replace("<|", "< |") for prompt in PROMPTS]
    expected = np.stack([world.outputs(image, text) for image, text in zip(IMAGES, texts, strict=True)])
    for batch in (1, 3):
        found = scored(world.params, [as_media(image) for image in IMAGES], float(device != "cpu"), batch=batch)
        assert [score.value for score in found] == pytest.approx(expected[:, 0], abs=1e-4)
        assert [score.parts["sigma"] for score in found] == pytest.approx(np.exp(expected[:, 1]), rel=1e-3)
    assert len({*np.round(expected[:, 0], 3)}) == 3


def test_a_video_scores_the_mean_over_evenly_spaced_frames(world: World) -> None:
    frames = RNG.integers(0, 256, (5, 448, 448, 3), dtype=np.uint8)
    video = Media(video=np.ascontiguousarray(frames.transpose(0, 3, 1, 2)), fps=8)
    [score] = scored(world.params, [video], frames=2)
    assert score.value == pytest.approx(
        np.mean([world.outputs(frames[i], PROMPTS[0].text)[0] for i in (0, 4)]), abs=1e-4
    )


def test_what_does_not_fit_is_refused(world: World, tmp_path: Path) -> None:
    embedded = next(name for name in world.weights if name.endswith("embed_tokens.weight"))
    for changed, said in (
        ({embedded: None}, "no embeddings of tokens"),
        ({embedded: world.weights[embedded][:-1].contiguous()}, rf"<\|Reward\|> is number {world.mark}"),
        ({"rm_head.0.weight": None}, "layer of shape"),
        ({name: None for name in world.weights if name.endswith("blocks.0.norm1.bias")}, "1 weights of Qwen2VLModel"),
    ):
        kept = {name: one for name, one in (world.weights | changed).items() if one is not None}
        save_file(kept, tmp_path / "some.safetensors")
        with pytest.raises(RuntimeError, match=said):
            scored(world.params, [], weights=str(tmp_path / "some.safetensors"))


def test_files_are_checked_before_anything_is_loaded(world: World, tmp_path: Path) -> None:
    (tmp_path / "no_mark.txt").write_text("rate {text_prompt}")
    for wrong, said in (
        ({"path": "/no/where"}, "path: there is no"),
        ({"weights": "/no/x.safetensors"}, "weights: there is no"),
        ({"question": "/no/question.txt"}, "question: /no/question.txt cannot be read"),
        ({"question": str(tmp_path / "no_mark.txt")}, r"expected <\|Reward\|> once"),
    ):
        with pytest.raises(registry.ScorerConfigError, match=said):
            registry.check_files(schema.Scorer(name="hps_v3", params=world.params | wrong))
