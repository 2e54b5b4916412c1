"""Tests scorers that run a model, with small random checkpoints, against the whole models and the published formulas.

The scorers call parts of these models; the expected values come from whole ones, one sample at a time, with Pillow's
pixels and hand-made token ids."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    ClapFeatureExtractor,
    CLIPTokenizer,
    Qwen2VLImageProcessorPil,
)

from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.clap import mono_at, windows
from omni_async.types import Prompt, Score
from tests.rewards.scorer_world import QUESTION, RATE, config, film, head_of, scored
from tests.support.images import as_media
from tests.support.tiny_clip import SIDE, pixels_of

RNG = np.random.default_rng(0)
SQUARE = [RNG.integers(0, 256, (48, 48, 3), dtype=np.uint8) for _ in range(3)]
MEDIA = [as_media(image) for image in SQUARE]
TEXTS = ("the digit 7", "a photo of a red circle on a white background", "the digit 7")
PROMPTS = [Prompt(i, text) for i, text in enumerate(TEXTS)]


# ---- CLIP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clip(tiny):
    return tiny("clip_score")


def logits_of(clip, images, texts):
    """The logits (images, texts) of the whole model, which no scorer calls."""
    tokens = CLIPTokenizer.from_pretrained(clip.folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = clip.model(pixel_values=torch.stack([pixels_of(image) for image in images]), **tokens)
    return found.logits_per_image.double().numpy()


def test_scores_of_images_are_the_published_functions_of_the_models_logits(clip):
    logits = np.diagonal(logits_of(clip, SQUARE, [prompt.text for prompt in PROMPTS]))
    cosines = logits / np.exp(4.5)
    found = {name: scored(name, MEDIA, PROMPTS, **clip.params) for name in ("clip_score", "pick_score", "hps_v2")}
    values = {name: [score.value for score in scores] for name, scores in found.items()}
    assert values["hps_v2"] == pytest.approx(cosines, abs=1e-5)
    assert values["pick_score"] == pytest.approx(logits / 26, abs=1e-4)
    assert [score.parts["pick_score"] for score in found["pick_score"]] == pytest.approx(logits, abs=3e-3)
    assert values["clip_score"] == pytest.approx(2.5 * np.maximum(cosines, 0), abs=1e-5)
    assert [score.parts["cosine"] for score in found["clip_score"]] == pytest.approx(cosines, abs=1e-5)
    assert len({round(value, 6) for value in values["hps_v2"]}) == 3


def test_hps_pads_what_is_not_square_and_the_others_crop_it(clip):
    wide = RNG.integers(0, 256, (32, 64, 3), dtype=np.uint8)
    padded = np.zeros((64, 64, 3), np.uint8)
    padded[16:48] = wide
    logits = logits_of(clip, [padded, wide[:, 16:48]], [PROMPTS[0].text])[:, 0]
    [hps], [pick] = (scored(name, [as_media(wide)], PROMPTS, **clip.params) for name in ("hps_v2", "pick_score"))
    assert hps.value == pytest.approx(logits[0] / np.exp(4.5), abs=1e-5)
    assert pick.value == pytest.approx(logits[1] / 26, abs=1e-4)


def test_a_long_prompt_is_cut_and_the_precision_leaves_the_logit_scale_as_it_was_learnt(clip):
    long, longer = scored("hps_v2", MEDIA[:1] * 2, [Prompt(0, "a red circle " * n) for n in (100, 200)], **clip.params)
    assert long == longer
    exact, half = (scored("pick_score", MEDIA, PROMPTS, **clip.params, dtype=one) for one in ("float32", "bfloat16"))
    for one, other in zip(exact, half, strict=True):
        assert other.value != one.value and other.value == pytest.approx(one.value, abs=0.05 * 90 / 26)


@pytest.mark.parametrize("widths", [(12, 1), (12, 8, 4, 1)])
def test_the_aesthetic_score_is_the_predictors_of_the_normalised_embedding(clip, tmp_path, widths):
    head, layers = head_of(tmp_path, *widths)
    with torch.no_grad():
        vision = clip.model.vision_model(pixel_values=torch.stack([pixels_of(image) for image in SQUARE]))
        rows = clip.model.visual_projection(vision.pooler_output).double().numpy()
    rows /= np.sqrt((rows**2).sum(axis=1, keepdims=True))
    for weight, bias in layers:
        rows = np.einsum("oi,ni->no", weight, rows) + bias
    found = scored("aesthetic", MEDIA, PROMPTS, head=str(head), **clip.params)
    assert [score.value for score in found] == pytest.approx(rows[:, 0], abs=1e-4)


def test_a_predictor_that_does_not_fit_and_a_checkpoint_that_lacks_weights_are_refused(clip, tmp_path):
    for widths, said in (((11, 1), r"layer of shape \(1, 11\) where 12"), ((12, 2), "end in 2 numbers")):
        with pytest.raises(RuntimeError, match=said):
            scored("aesthetic", [], [], head=str(head_of(tmp_path, *widths)[0]), **clip.params)
    shutil.copytree(clip.folder, tmp_path / "clip")
    weights = {name: one for name, one in clip.model.state_dict().items() if name != "visual_projection.weight"}
    clip.model.save_pretrained(tmp_path / "clip", state_dict=weights)
    with pytest.raises(RuntimeError, match=r"1 weights of CLIPModel are not there, visual_projection.weight"):
        scored("pick_score", [], [], path=str(tmp_path / "clip"))


class Placed:
    name = "placed"

    def __init__(self, *, device):
        self.device = device

    def score(self, images, prompts):
        return [Score(0.0, text=self.device)] * len(images)


def test_a_scorer_that_requires_a_device_is_given_that_of_its_placement():
    name = f"{__name__}:Placed"
    assert scored(name, MEDIA[:1], PROMPTS)[0].text == "cpu"
    if torch.accelerator.is_available():
        assert scored(name, MEDIA[:1], PROMPTS, gpus=1)[0].text != "cpu"
    else:
        with pytest.raises(RuntimeError, match=r"placement\.reward\.gpus: 1 asked for, but torch"):
            scored(name, MEDIA[:1], PROMPTS, gpus=1)


def test_frames_are_as_consistent_as_the_cosines_between_their_embeddings(clip):
    frames = [*SQUARE, SQUARE[2]]
    video = film(np.stack(frames))
    still = Media(video=np.stack([video.video[0]] * 5), fps=8)
    with torch.no_grad():
        rows = clip.model.get_image_features(torch.stack([pixels_of(image) for image in frames])).pooler_output
    cosines = torch.nn.functional.cosine_similarity(rows[:-1], rows[1:]).tolist()
    moving, unmoved = scored("frame_consistency", [video, still], PROMPTS, **clip.params)
    assert moving.value == pytest.approx(np.mean(cosines), abs=1e-5)
    assert moving.parts["lowest"] == pytest.approx(min(cosines), abs=1e-5) and moving.parts["lowest"] < 0.99
    assert unmoved.value == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ScoreError, match="a video of one frame"):
        scored("frame_consistency", [Media(video=video.video[:1], fps=8)], PROMPTS, **clip.params)


# ---- ImageReward -----------------------------------------------------------------------------------------------------


def test_images_score_the_published_formula_of_blips_reading(tiny):
    made = tiny("image_reward")
    tokenizer = BertTokenizer.from_pretrained(made.folder)
    prompts = [Prompt(i, text) for i, text in enumerate(("a red circle", "the digit", "a red digit " * 40))]
    expected = []
    for image, prompt in zip(SQUARE, prompts, strict=True):  # one at a time
        tokens = tokenizer(prompt.text, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        words = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
        with torch.no_grad():
            said = made.model(**words, pixel_values=pixels_of(image)[None]).question_embeds[0, 0].double()
            expected.append((made.head(said).item() - 0.16717362830052426) / 1.0333394966054072)
    found = scored("image_reward", MEDIA, prompts, batch=2, **made.params)
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 4) for value in expected}) == 3


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ("blip.visual_encoder.pos_embed", "no ImageReward checkpoint"),
        (
            "blip.text_encoder.embeddings.word_embeddings.weight",
            r"word_embeddings.weight is missing, expected \(12, 16",
        ),
        ("mlp.layers.7.weight", "layer of shape"),
    ],
)
def test_weights_that_are_not_image_rewards_are_refused(tiny, tmp_path, drop, said):
    params = tiny("image_reward").params
    weights = torch.load(params["weights"])
    torch.save({name: one for name, one in weights.items() if name != drop}, tmp_path / "some.pt")
    with pytest.raises(RuntimeError, match=said):
        scored("image_reward", [], [], **params | {"weights": str(tmp_path / "some.pt")})


# ---- HPSv3 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hps_v3", "hps_v3 as saved now"])
def made(request, tiny):
    return tiny(request.param)


def outputs(made, image, prompt):
    """mu and log(sigma) of one image, from ids and patches that are put together here."""
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    patches = Qwen2VLImageProcessorPil(min_pixels=200704, max_pixels=200704)(image, return_tensors="pt")
    before, after = QUESTION.format(text_prompt=prompt.replace("<|", "< |")).split("<|Reward|>")
    pads = int(patches.image_grid_thw.prod()) // 4
    ids = tokenizer(f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>{before}").input_ids
    ids += [made.mark, *tokenizer(f"{after}<|im_end|>\n<|im_start|>assistant\n").input_ids]
    marked = torch.tensor([ids])
    kinds = (marked == made.model.config.image_token_id).int()
    with torch.no_grad():
        said = made.model(input_ids=marked, mm_token_type_ids=kinds, output_hidden_states=True, **patches)
        return made.head(said.hidden_states[-1][0, ids.index(made.mark)]).numpy()


def test_images_score_mu_of_the_state_at_the_special_token(made):
    sizes = ((448, 448), (300, 500), (448, 448))
    images = [RNG.integers(a, a + 70, (*size, 3), dtype=np.uint8) for size, a in zip(sizes, (0, 90, 180), strict=True)]
    texts = ("a red circle", "a photo of a red circle rated", "<|Reward|> rate it {x}")
    expected = np.stack([outputs(made, image, text) for image, text in zip(images, texts, strict=True)])
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    found = scored("hps_v3", [as_media(image) for image in images], prompts, batch=3, **made.params)
    assert [score.value for score in found] == pytest.approx(expected[:, 0], abs=1e-4)
    assert [score.parts["sigma"] for score in found] == pytest.approx(np.exp(expected[:, 1]), rel=1e-3)
    assert len({*np.round(expected[:, 0], 3)}) == 3


def test_weights_that_are_not_hps_v3s_are_refused(made, tmp_path):
    weights = load_file(made.params["weights"])
    embedded = next(name for name in weights if name.endswith("embed_tokens.weight"))
    for changed, said in (
        ({embedded: None}, "no embeddings of tokens"),
        ({embedded: weights[embedded][:-1].contiguous()}, rf"<\|Reward\|> is number {made.mark}"),
        ({"rm_head.0.weight": None}, "layer of shape"),
        ({name: None for name in weights if name.endswith("blocks.0.norm1.bias")}, "1 weights of Qwen2VLModel"),
    ):
        kept = {name: one for name, one in (weights | changed).items() if one is not None}
        save_file(kept, tmp_path / "some.safetensors")
        with pytest.raises(RuntimeError, match=said):
            scored("hps_v3", [], [], **made.params | {"weights": str(tmp_path / "some.safetensors")})


def test_a_question_without_its_two_places_is_refused_before_the_run(tiny, tmp_path):
    (tmp_path / "no_mark.txt").write_text("rate {text_prompt}")
    for file, said in (
        ("/no/question.txt", "question: /no/question.txt cannot be read"),
        (str(tmp_path / "no_mark.txt"), r"expected <\|Reward\|> once"),
    ):
        with pytest.raises(registry.ScorerConfigError, match=said):
            registry.check_files(config("hps_v3", **tiny("hps_v3").params | {"question": file}))


# ---- sound: CLAP and PE-AV -------------------------------------------------------------------------------------------


def cosines_of(made, sounds):
    """The cosines (sounds, texts) out of the logits of the whole model, which no scorer calls; one sound at a time."""
    extract = ClapFeatureExtractor.from_pretrained(made.folder)
    tokens = AutoTokenizer.from_pretrained(made.folder)(list(TEXTS), padding="max_length", max_length=60)
    words = {name: torch.tensor(tokens[name]) for name in ("input_ids", "attention_mask")}
    rows = []
    for sound in sounds:
        features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            found = made.model(**words, input_features=features, is_longer=torch.tensor([[False]]))
        rows.append(found.logits_per_audio[0].double().numpy() / np.exp(made.model.logit_scale_a.item()))
    return np.stack(rows)


@pytest.mark.parametrize("name", ["clap", "fused clap"])
def test_sounds_score_the_cosine_with_their_prompt(tiny, name):
    lengths = (RATE, RATE // 3, 2 * RATE + 500)
    stereo = [RNG.uniform(-1, 1, (2, n)).astype(np.float32) * (i + 1) / 3 for i, n in enumerate(lengths)]
    mono = [(sound[0] + sound[1]) / 2 for sound in stereo]
    last = mono[2]
    parts = [last[:RATE], last[(RATE + 500) // 2 :][:RATE], last[RATE + 500 :]]
    cosines = cosines_of(tiny(name), [*mono[:2], *parts])
    media = [Media(audio=sound, sample_rate=RATE) for sound in stereo]
    expected = [cosines[0, 0], cosines[1, 1], cosines[2:, 2].mean()]
    for _ in range(2):  # no score is drawn
        found = scored("clap", media, PROMPTS, **tiny(name).params)
        assert [score.value for score in found] == pytest.approx(expected, abs=1e-4)
    assert len({round(score.value, 4) for score in found}) == 3


@pytest.mark.parametrize("rate", [44100, 24000, 8000])
def test_a_tone_is_the_same_tone_at_another_rate(rate):
    def tone(samples, at):
        return 0.5 * np.sin(2 * np.pi * 440 * np.arange(samples) / at).astype(np.float32)

    found = mono_at(RATE, Media(audio=np.stack([tone(rate, rate)] * 2), sample_rate=rate))
    assert abs(len(found) - RATE) <= 1
    middle = slice(500, RATE - 500)
    assert found[middle] == pytest.approx(tone(RATE, RATE)[middle], abs=5e-3)


def test_a_sound_of_so_few_samples_a_second_that_it_lasts_for_hours_is_refused():
    slow = Media(audio=np.zeros((1, 2**20), np.float32), sample_rate=1)
    with pytest.raises(ScoreError, match=r"the sound lasts 1.04858e\+06 s, expected 1200 at most"):
        mono_at(48_000, slow)


def test_windows_cover_a_sound_from_end_to_end():
    assert [w.tolist() for w in windows(np.arange(5), 5)] == [[0, 1, 2, 3, 4]]
    assert [w.tolist() for w in windows(np.arange(3), 5)] == [[0, 1, 2]]
    assert [w.tolist() for w in windows(np.arange(9), 4)] == [[0, 1, 2, 3], [2, 3, 4, 5], [5, 6, 7, 8]]


def video(frames, seconds):
    shown = RNG.integers(0, 256, (frames, 3, SIDE, SIDE), dtype=np.uint8)
    heard = RNG.uniform(-1, 1, (2, int(seconds * RATE))).astype(np.float32)
    return Media(video=shown, fps=8, audio=heard, sample_rate=RATE)


def expected(model, media, shown):
    """The cosine and the logit of a sample, by the two encoders and their heads."""
    mono = media.audio.mean(axis=0)
    mono = np.pad(mono, (0, -len(mono) % 32), "reflect")
    pixels = torch.tensor(media.video[shown] / 127.5 - 1, dtype=torch.float32)[None]
    with torch.no_grad():
        heard = model.audio_model.audio_encoder(torch.tensor(mono)[None, None]).pooler_output
        seen = model.video_model.video_encoder(pixels).pooler_output
        a, v = model.audio_model.audio_head(heard)[0].double(), model.video_model.video_head(seen)[0].double()
    logit = (a @ v) * model.audio_video_logit_scale.item() + model.audio_video_logit_bias.item()
    return (a @ v / (a @ a).sqrt() / (v @ v).sqrt()).item(), logit.item()


def test_a_sample_scores_the_cosine_of_its_video_and_its_sound(tiny):
    made, samples = tiny("video_audio"), [video(6, 0.5), video(4, 0.31), video(6, 0.5)]
    wanted = [expected(made.model, one, [*range(len(one.video))]) for one in samples]
    found = scored("video_audio", samples, PROMPTS, **made.params)
    assert [score.value for score in found] == pytest.approx([cosine for cosine, _ in wanted], abs=1e-4)
    assert [score.parts["logit"] for score in found] == pytest.approx([one for _, one in wanted], rel=1e-3, abs=1e-3)
    assert len({round(score.value, 3) for score in found}) == 3
    [score] = scored("video_audio", samples[:1], PROMPTS, frames=2, **made.params)
    assert score.value == pytest.approx(expected(made.model, samples[0], [0, 5])[0], abs=1e-4), "evenly spaced frames"


def test_without_the_library_of_its_image_encoder_it_is_refused_before_the_run(tiny, monkeypatch):
    monkeypatch.setattr("omni_async.rewards.scorers.video_audio.find_spec", lambda name: None)
    with pytest.raises(registry.ScorerConfigError, match=r"pip install .timm<1\.0\.27"):
        registry.check_files(config("video_audio", **tiny("video_audio").params))
