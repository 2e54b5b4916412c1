"""Tests the scorers on CLIP with a small random checkpoint, against the model's own logits and Pillow's pixels."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from omni_async.config import schema
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError
from omni_async.rewards.cache import identity_of
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt, Score
from tests.support import tiny_clip
from tests.support.images import as_media, score_all
from tests.support.tiny_clip import SIDE, pixels_of

RNG = np.random.default_rng(0)
SQUARE = [RNG.integers(0, 256, (48, 48, 3), dtype=np.uint8) for _ in range(3)]
PROMPTS = [Prompt(i, text) for i, text in enumerate(("the digit 7", "a red circle", "the digit 7"))]
ALIGNMENT = ("clip_score", "pick_score", "hps_v2")
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip.build(tmp_path_factory.mktemp("clip") / "tiny")


def only(name: str, params: dict[str, Any]) -> schema.Reward:
    return schema.Reward(scorers=(schema.Scorer(name=name, params=params),))


def scored(
    name: str, media: list[Media], *, gpus: float = 0.0, prompts: list[Prompt] = PROMPTS, **params: Any
) -> list[Score]:
    return score_all(
        LoadedReward.load(only(name, params), gpus),
        media,
        prompts[: len(media)],
    )


def logits_of(checkpoint: Path, images: list[np.ndarray], texts: list[str]) -> np.ndarray:
    """The logits (images, texts) of the whole model, which no scorer calls."""
    tokens = CLIPTokenizer.from_pretrained(checkpoint)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        model = CLIPModel.from_pretrained(checkpoint).eval()
        found = model(pixel_values=torch.stack([pixels_of(image) for image in images]), **tokens)
    return found.logits_per_image.double().numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_images_are_the_published_functions_of_the_models_logits(checkpoint: Path, device: str) -> None:
    logits = np.diagonal(logits_of(checkpoint, SQUARE, [prompt.text for prompt in PROMPTS]))
    cosines, gpus = logits / np.exp(4.5), float(device != "cpu")
    media, path = [as_media(image) for image in SQUARE], str(checkpoint)
    found = {name: scored(name, media, gpus=gpus, path=path) for name in ALIGNMENT}
    values = {name: [score.value for score in scores] for name, scores in found.items()}
    assert values["hps_v2"] == pytest.approx(cosines, abs=1e-5)
    assert values["pick_score"] == pytest.approx(logits / 26, abs=1e-4)
    assert [score.parts["pick_score"] for score in found["pick_score"]] == pytest.approx(logits, abs=3e-3)
    assert values["clip_score"] == pytest.approx(2.5 * np.maximum(cosines, 0), abs=1e-5)
    assert [score.parts["cosine"] for score in found["clip_score"]] == pytest.approx(cosines, abs=1e-5)
    assert len({round(value, 6) for value in values["hps_v2"]}) == 3


def test_a_video_scores_the_mean_over_evenly_spaced_frames(checkpoint: Path) -> None:
    frames = RNG.integers(0, 256, (7, 48, 48, 3), dtype=np.uint8)
    video = Media(video=np.ascontiguousarray(frames.transpose(0, 3, 1, 2)), fps=8)
    logits = logits_of(checkpoint, [frames[0], frames[3], frames[6], SQUARE[1]], [prompt.text for prompt in PROMPTS])
    for batch in (1, 32):
        mixed = scored("pick_score", [video, as_media(SQUARE[1])], path=str(checkpoint), frames=3, batch=batch)
        expected = [logits[:3, 0].mean() / 26, logits[3, 1] / 26]
        assert [score.value for score in mixed] == pytest.approx(expected, abs=1e-4)


def test_hps_pads_what_is_not_square_and_the_others_crop_it(checkpoint: Path) -> None:
    wide = RNG.integers(0, 256, (32, 64, 3), dtype=np.uint8)
    padded = np.zeros((64, 64, 3), np.uint8)
    padded[16:48] = wide
    logits = logits_of(checkpoint, [padded, wide[:, 16:48]], [PROMPTS[0].text])[:, 0]
    [hps], [pick] = (scored(name, [as_media(wide)], path=str(checkpoint)) for name in ("hps_v2", "pick_score"))
    assert hps.value == pytest.approx(logits[0] / np.exp(4.5), abs=1e-5)
    assert pick.value == pytest.approx(logits[1] / 26, abs=1e-4)


def test_a_long_prompt_is_cut_to_the_models_length(checkpoint: Path) -> None:
    long, longer = (Prompt(0, "a red circle " * n) for n in (100, 200))
    values = [
        scored("hps_v2", [as_media(SQUARE[0])], prompts=[one], path=str(checkpoint))[0].value for one in (long, longer)
    ]
    assert values[0] == values[1]


def test_the_precision_of_the_model_leaves_the_logit_scale_as_it_was_learnt(checkpoint: Path) -> None:
    media = [as_media(image) for image in SQUARE]
    exact, half = (scored("pick_score", media, path=str(checkpoint), dtype=dtype) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, half, strict=True):
        assert other.value != one.value and other.value == pytest.approx(one.value, abs=0.05 * 90 / 26)


def head_of(folder: Path, *widths: int) -> tuple[Path, list[tuple[np.ndarray, np.ndarray]]]:
    """Writes a predictor as the published one is: layers with dropout between them, which has no weights."""
    layers = [(RNG.normal(size=(after, before)), RNG.normal(size=after)) for before, after in pairwise(widths)]
    names = [f"layers.{2 * i}." for i in range(len(layers))] if len(layers) > 1 else [""]
    tensors = {
        f"{name}{part}": torch.tensor(value)
        for name, layer in zip(names, layers, strict=True)
        for part, value in zip(("weight", "bias"), layer, strict=True)
    }
    torch.save(tensors, folder / "head.pth")
    return folder / "head.pth", layers


@pytest.mark.parametrize("widths", [(12, 1), (12, 8, 4, 1)])
def test_the_aesthetic_score_is_the_predictors_of_the_normalised_embedding(
    checkpoint: Path, tmp_path: Path, widths: tuple[int, ...]
) -> None:
    head, layers = head_of(tmp_path, *widths)
    model = CLIPModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        vision = model.vision_model(pixel_values=torch.stack([pixels_of(image) for image in SQUARE]))
        rows = model.visual_projection(vision.pooler_output).double().numpy()
    rows /= np.sqrt((rows**2).sum(axis=1, keepdims=True))
    for weight, bias in layers:
        rows = np.einsum("oi,ni->no", weight, rows) + bias
    found = scored("aesthetic", [as_media(image) for image in SQUARE], path=str(checkpoint), head=str(head))
    assert [score.value for score in found] == pytest.approx(rows[:, 0], abs=1e-4)


@pytest.mark.parametrize(
    ("widths", "said"), [((11, 1), r"layer of shape \(1, 11\) where 12"), ((12, 2), "end in 2 numbers")]
)
def test_a_predictor_that_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, widths: tuple[int, ...], said: str
) -> None:
    head, _ = head_of(tmp_path, *widths)
    with pytest.raises(RuntimeError, match=said):
        scored("aesthetic", [], path=str(checkpoint), head=str(head))


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = CLIPModel.from_pretrained(checkpoint)
    weights = {name: value for name, value in model.state_dict().items() if name != "visual_projection.weight"}
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(RuntimeError, match=r"1 weights of CLIPModel are not there, visual_projection.weight"):
        scored("pick_score", [], path=str(tmp_path))


def test_files_that_are_not_there_are_known_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    def refused(name: str = "pick_score", **params: str) -> str:
        with pytest.raises(registry.ScorerConfigError) as error:
            registry.check_files(schema.Scorer(name=name, params={"path": str(checkpoint), **params}))
        return str(error.value)

    registry.check_files(schema.Scorer(name="pick_score", params={"path": str(checkpoint)}))
    assert "path: there is no folder /no/where; " in refused(path="/no/where")
    assert "path: " in refused(path=str(tmp_path)) and "has no config.json" in refused(path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "is a 'bert' checkpoint, expected 'clip'" in refused(path=str(tmp_path))
    assert "processor: there is no /no/where" in refused(processor="/no/where")
    assert "head: there is no /no/head.pth" in refused("aesthetic", head="/no/head.pth")


def test_another_checkpoint_at_the_same_path_is_another_scorer_in_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(checkpoint, folder)

    def identity(name: str = "pick_score", **params: str) -> bytes | None:
        config = schema.Scorer(name=name, params={"path": str(folder), **params})
        return identity_of(config, registry.build(config))

    def aesthetic(*widths: int) -> bytes | None:
        head, _ = head_of(tmp_path, *widths)
        return identity("aesthetic", head=str(head))

    found = [identity(), identity("frame_consistency"), aesthetic(12, 1), aesthetic(12, 1)]
    assert identity() == found[0]
    model = CLIPModel.from_pretrained(folder)
    model.visual_projection.weight.data[0, 0] += 1
    model.save_pretrained(folder)
    found += [identity(), identity("frame_consistency")]
    prepared: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessorPil(**prepared, do_normalize=False).save_pretrained(folder)
    found.append(identity())
    assert None not in found and len({*found}) == 7


class Placed:
    name = "placed"

    def __init__(self, *, device: str) -> None:
        self.device = device

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(0.0, text=self.device)] * len(images)


def test_a_scorer_that_requires_a_device_is_given_that_of_its_placement() -> None:
    name = f"{__name__}:Placed"
    assert scored(name, [as_media(SQUARE[0])])[0].text == "cpu"
    if torch.accelerator.is_available():
        assert scored(name, [as_media(SQUARE[0])], gpus=1)[0].text != "cpu"
    else:
        with pytest.raises(RuntimeError, match=r"placement\.reward\.gpus: 1 asked for, but torch"):
            scored(name, [as_media(SQUARE[0])], gpus=1)


def test_frames_are_as_consistent_as_the_cosines_between_their_embeddings(checkpoint: Path) -> None:
    frames = [*SQUARE, SQUARE[2]]
    video = Media(video=np.ascontiguousarray(np.stack(frames).transpose(0, 3, 1, 2)), fps=8)
    still = Media(video=np.stack([video.video[0]] * 5), fps=8)
    model = CLIPModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        rows = model.get_image_features(torch.stack([pixels_of(image) for image in frames])).pooler_output
    cosines = torch.nn.functional.cosine_similarity(rows[:-1], rows[1:]).tolist()
    moving, unmoved = scored("frame_consistency", [video, still], path=str(checkpoint))
    assert moving.value == pytest.approx(np.mean(cosines), abs=1e-5)
    assert moving.parts["lowest"] == pytest.approx(min(cosines), abs=1e-5) and moving.parts["lowest"] < 0.99
    assert unmoved.value == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ScoreError, match="a video of one frame"):
        scored("frame_consistency", [Media(video=video.video[:1], fps=8)], path=str(checkpoint))
