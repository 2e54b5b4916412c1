"""Tests that every built-in scorer keeps the contract of scorers; its own file has the reference values."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file

from omni_async.media import Media
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.base import declared, require_scores
from omni_async.rewards.cache import identity_of
from omni_async.types import Prompt
from tests.rewards.judge_server import completion, judging
from tests.rewards.scorer_world import MODELS, RATE, config, film, scored
from tests.rewards.server.serving_world import served, write_scorers
from tests.support.images import as_media
from tests.support.places import ROOT

RNG = np.random.default_rng(0)
NAMES = [*registry._BUILT_IN]
ELSEWHERE, SLOW = ("http", "vlm_judge"), ("scene_text", "video_audio", "hps_v3")
# Written out, because finding them imports every scorer: `make test-gpu` collects this file without their packages.
OF_TEXTS = ("exact_match", "choice", "math_answer", "pattern", "overlong")
QUICK_FIRST = [pytest.param(name, marks=pytest.mark.thorough) if name in SLOW else name for name in NAMES]
SHAPES = [
    MediaShape("image", (3, 8, 8)),
    MediaShape("video", (4, 3, 8, 8), 8),
    MediaShape("audio", (1, 100), RATE),
    MediaShape("text", ()),
]
# The parameters that a scorer without a model requires.
REQUIRED = {"pattern": {"pattern": r"\w"}, "overlong": {"max_tokens": 10, "buffer": 8}}
PAGES = ROOT / "docs" / "rewards"


def digit(text):
    """An image with a digit."""
    image = Image.new("RGB", (64, 64), (10, 10, 10))
    ImageDraw.Draw(image).text((32, 32), text, fill=(230, 230, 230), font=ImageFont.load_default(48), anchor="mm")
    return np.asarray(image)


DIGITS = np.stack([digit(text) for text in "7513759"])
NOISE = np.stack([RNG.integers(30 * i, 30 * i + 70, (64, 64, 3), np.uint8) for i in (0, 6, 2, 4, 1, 5, 3)])
SOUNDS = [RNG.uniform(-1, 1, (2, n)).astype(np.float32) for n in (RATE, RATE // 2, RATE // 3)]
MOVING = [film(NOISE), film(NOISE[2:]), film(NOISE[::-1] // 2)]
SOUNDING = [
    Media(video=one.video, fps=8, audio=sound, sample_rate=RATE) for one, sound in zip(MOVING, SOUNDS, strict=True)
]
WANTED = [{"class": "cat"}, {"class": "dog"}], [{"class": "bench"}], [{"class": "dog"}]
PROMPTS = [
    Prompt(i, text, "7", {"include": [*wanted], "options": [5, 7, 9]})
    for i, (text, wanted) in enumerate(zip(("a red circle", "the digit 7", "a red digit"), WANTED, strict=True))
]


def frames_of(name):
    return DIGITS if name in ("ocr", "scene_text") else NOISE


def media_of(name):
    accepts, frames = registry.media_of(name), frames_of(name)
    if accepts == {"text"}:
        return [Media(text=text, finish="stop", tokens=n) for text, n in (("7", 1), ("B or C", 4), ("5", 9))]
    if "image" in accepts:
        moving = "video" in accepts and name != "http"
        return [as_media(frames[0]), film(frames) if moving else as_media(frames[3]), as_media(frames[2])]
    if "video" in accepts:
        return SOUNDING if "audio" in accepts else MOVING
    return [Media(audio=sound, sample_rate=RATE) for sound in SOUNDS]


@contextlib.asynccontextmanager
async def built(name, tiny, tmp_path, **params):
    params = REQUIRED.get(name, {}) | params
    async with contextlib.AsyncExitStack() as stack:
        if name in MODELS:
            params = tiny(name).params | params
        elif name == "http" and "urls" not in params:
            params["urls"] = [stack.enter_context(served(write_scorers(tmp_path, {"name": "jpeg_size"})))]
        elif name == "vlm_judge":
            judge = judging(lambda body, n: completion(str(1 + len(json.dumps(body)) % 10)))
            params |= {"urls": [(await stack.enter_async_context(judge)).url], "model": "m", "mode": "rating"}
        scorer = declared(registry.build(config(name, **params)))
        yield scorer
        ended = scorer.close()
        if inspect.isawaitable(ended):
            await ended


async def answers(scorer, media, prompts):
    found = scorer.score(media, prompts)
    return require_scores("x", await found if inspect.isawaitable(found) else found, prompts)


def same(score):
    parts = {name: pytest.approx(part, rel=1e-4, abs=1e-4) for name, part in score.parts.items()}
    return pytest.approx(score.value, abs=1e-4), parts, score.text


def differ(scores):
    return len({str([round(number, 4) for number in (one.value, *one.parts.values())]) for one in scores}) > 1


@pytest.mark.sliced(floor=9)
@pytest.mark.parametrize("name", QUICK_FIRST)
async def test_a_batch_has_the_scores_of_its_samples_in_order(name, tiny, tmp_path):
    small = {key: 2 for key in ("batch", "frames") if registry.takes_param(name, key)}
    media = media_of(name)
    async with built(name, tiny, tmp_path, **small) as scorer:
        alone = [(await answers(scorer, [one], [prompt]))[0] for one, prompt in zip(media, PROMPTS, strict=True)]
        turned = await answers(scorer, media[::-1], PROMPTS[::-1])
    assert [(one.value, one.parts, one.text) for one in turned[::-1]] == [same(one) for one in alone]
    assert differ(alone), "their order shows"


@pytest.mark.sliced(floor=4)
@pytest.mark.parametrize("name", OF_TEXTS)
@pytest.mark.parametrize("form", ["msgpack", "json"])
async def test_a_server_scores_texts_as_the_scorer_does(name, form, tiny, tmp_path):
    async with built(name, tiny, tmp_path) as scorer:
        own = await answers(scorer, media_of(name), PROMPTS)
    with served(write_scorers(tmp_path, {"name": name, "params": REQUIRED.get(name, {})})) as url:
        async with built("http", tiny, tmp_path, urls=[url], form=form) as client:
            assert await answers(client, media_of(name), PROMPTS) == own


@pytest.mark.parametrize("name", ["ocr", "clip_score", "pick_score", "hps_v2", "aesthetic", "image_reward", "hps_v3"])
def test_a_video_scores_the_mean_over_evenly_spaced_frames(name, tiny):
    params, frames = tiny(name).params if name in MODELS else {}, frames_of(name)
    [found] = scored(name, [film(frames)], PROMPTS, frames=3, **params)
    each = scored(name, [as_media(frames[i]) for i in (0, 3, 6)], [PROMPTS[0]] * 3, **params)
    assert found.value == pytest.approx(np.mean([one.value for one in each]), abs=1e-4)
    assert differ(each)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_an_accelerator_scores_as_the_cpu_does(name, tiny):
    params = tiny(name).params
    cpu, gpu = (scored(name, media_of(name), PROMPTS, gpus=gpus, **params) for gpus in (0.0, 1.0))
    assert [(one.value, one.parts, one.text) for one in gpu] == [same(one) for one in cpu]


@pytest.mark.parametrize("name", NAMES)
def test_media_that_it_does_not_accept_are_refused_before_the_run(name, tiny):
    params = tiny(name).params if name in MODELS else {"urls": ["http://a"]} if name in ELSEWHERE else {}
    given = config(name, **params, **REQUIRED.get(name, {}), **{"model": "m"} if name == "vlm_judge" else {})
    registry.check(given, SHAPES)
    registry.check_files(given)
    assert (registry.media_of(name) == {"text"}) == (name in OF_TEXTS)
    required = {*registry._load(name).requires}
    for shape in SHAPES:
        if shape.part in registry.media_of(name) and required <= {shape.part}:
            registry.check(given, [shape])
        else:
            with pytest.raises(registry.ScorerConfigError, match=rf"^scorer '{name}'(: needs| accepts) .*"):
                registry.check(given, [shape])


@pytest.mark.parametrize("name", MODELS)
def test_files_that_are_not_there_are_known_before_anything_is_loaded(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")

    def refused(**wrong):
        with pytest.raises(registry.ScorerConfigError) as error:
            registry.check_files(config(name, **tiny(name).params | wrong))
        return str(error.value)

    scorer = registry._load(name)
    for param in ("path", *scorer.files):
        assert f"{param}: there is no" in refused(**{param: "/no/where"})
        assert f"{param}: there is no" in (said := refused(**{param: "env:JUDGE_KEY"})) and "sk-42424242" not in said
    if scorer.model_type:
        assert "has no config.json" in refused(path=str(tmp_path))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
        assert f"is a 'bert' checkpoint, expected '{scorer.model_type}'" in refused(path=str(tmp_path))


def change(file):
    """Writes other weights, or the same settings as another text."""
    if file.suffix == ".safetensors":
        save_file({name: one * 1.1 for name, one in load_file(file).items()}, file, {"format": "pt"})
    elif file.suffix in (".pt", ".pth"):
        torch.save({name: one * 1.1 for name, one in torch.load(file).items()}, file)
    else:
        file.write_text(file.read_text() + "\n")


@pytest.mark.sliced(floor=9)
@pytest.mark.parametrize("name", QUICK_FIRST)
async def test_another_checkpoint_at_the_same_path_is_another_scorer_in_the_cache(name, tiny, tmp_path):
    folder, params = tmp_path / "copy", {}
    if name in MODELS:
        shutil.copytree(tiny(name).folder, folder)
        params = {key: one.replace(str(tiny(name).folder), str(folder)) for key, one in tiny(name).params.items()}

    async def identity():
        async with built(name, tiny, tmp_path, **params) as scorer:
            return identity_of(config(name, **REQUIRED.get(name, {}), **params), getattr(scorer, "_scorer", scorer))

    found = [await identity()]
    assert await identity() == found[0]
    assert (found[0] is None) == (name in ELSEWHERE), "the answers of another machine are not kept"
    for file in sorted(folder.glob("*")):
        if file.suffix in (".pt", ".pth", ".safetensors", ".txt") or file.name == "preprocessor_config.json":
            change(file)
            found.append(await identity())
    assert len({*found}) == len(found) and (name not in MODELS or len(found) > 1)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_compared_with_the_others_and_its_page_names_its_parameters(name):
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    table = index.partition("## Which reward should I use")[2].partition("\nA small model")[0]
    linked = re.search(rf"\[`{name}`\]\((\w+\.md)#?(\w*)\)", table)
    assert linked is not None, "the table of the index has a row for it"
    page = (PAGES / linked[1]).read_text(encoding="utf-8")
    shared, *sections = re.split(r"^## (?!Shared)", page, flags=re.M)
    if linked[2]:
        assert linked[2] == name
        page = shared + next(one for one in sections if one.startswith(f"{name}\n"))
    parameters = [one for one in inspect.signature(registry._load(name)).parameters if one != "device"]
    assert [one for one in parameters if f"`{one}`" not in page] == []
