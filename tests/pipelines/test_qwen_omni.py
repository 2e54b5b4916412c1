"""Tests the Qwen-Omni thinkers against transformers' own, with text, images, videos, audio, and all in one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from msgspec import ValidationError, convert
from omni_async_pipelines import qwen3_omni, qwen_omni
from omni_async_pipelines.qwen3_omni import tiny as tiny3
from omni_async_pipelines.qwen3_omni.policy import Qwen3OmniPolicy
from omni_async_pipelines.qwen_omni import tiny
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling
from omni_async_pipelines.qwen_omni.thinker import DrawsTokens
from omni_async_pipelines.qwen_omni.tiny import CONTEXT
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5OmniThinkerForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.core_model_loading import revert_weight_conversion

from omni_async.config.schema import Lora
from omni_async.data.audio_files import prompt_audio, read_prompt_audio
from omni_async.data.image_files import prompt_image
from omni_async.data.video_files import prompt_video
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.tokens.packing import Answered, pack
from omni_async.training.auxiliary import add_adapters
from omni_async.types import Prompt, PromptAudio, PromptImage, PromptVideo

SPEC = QwenOmniSampling(max_tokens=16)
SIZES = ((84, 56), (56, 140), (28, 28))  # the second has several windows of the tower


FAMILIES = {
    "qwen_omni": (QwenOmniPolicy, tiny.build, Qwen2_5OmniThinkerForConditionalGeneration),
    "qwen3_omni": (Qwen3OmniPolicy, tiny3.build, Qwen3OmniMoeThinkerForConditionalGeneration),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(family: str, tmp_path_factory: pytest.TempPathFactory) -> QwenOmniPolicy:
    cls, build, _ = FAMILIES[family]
    return cls(str(build(tmp_path_factory.mktemp(family) / "tiny")))


@pytest.fixture(scope="module")
def thinker(policy: QwenOmniPolicy) -> Any:
    thinker = policy.load_components(torch.float32)["thinker"]
    assert isinstance(thinker, DrawsTokens) and not thinker.training
    return thinker


@pytest.fixture(scope="module")
def theirs(family: str, policy: QwenOmniPolicy) -> Any:
    return FAMILIES[family][2].from_pretrained(policy.path).eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptImage, ...]:
    folder = tmp_path_factory.mktemp("images")
    found = []
    for number, (width, height) in enumerate(SIZES):
        Image.effect_noise((width, height), 80 + number).convert("RGB").save(folder / f"{number}.png")
        found.append(prompt_image(folder / f"{number}.png", f"{number}.png"))
    return tuple(found)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptAudio, ...]:
    """Provides sounds of a part of the tower's window, and of several."""
    folder = tmp_path_factory.mktemp("sounds")
    for number, frames in enumerate((57, 310)):
        noise = np.random.default_rng(number).normal(0, 0.1, 160 * frames)
        soundfile.write(folder / f"{number}.wav", noise, 16_000)
    return tuple(prompt_audio(folder / f"{number}.wav", f"{number}.wav") for number in range(2))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptVideo, ...]:
    """Provides videos of two pairs of frames, and of a pair and a half, at 4 frames a second."""
    folder = tmp_path_factory.mktemp("videos")
    noise = np.random.default_rng(0).integers(0, 256, (8, 3, 56, 84), np.uint8)
    films = (noise, noise[:5, :, :, :56])
    files = [write_media(Media(video=film, fps=4.0), folder / str(n))[0] for n, film in enumerate(films)]
    return tuple(prompt_video(file, file.name)[0] for file in files)


@pytest.fixture(scope="module")
def prompts(
    images: tuple[PromptImage, ...], sounds: tuple[PromptAudio, ...], videos: tuple[PromptVideo, ...]
) -> tuple[Prompt, ...]:
    return (
        Prompt(0, "a red circle"),
        Prompt(1, "read the digit", images=images[:1]),
        Prompt(2, "the digit 7"),
        Prompt(3, "compare them", images=images[1:]),
        Prompt(4, "the digit 7", audio=sounds),
        Prompt(5, "read it", images=images[:1], audio=sounds[:1]),
        Prompt(6, "the digit 7", video=videos[:1]),
        Prompt(7, "compare them", images=images[1:2], audio=sounds[:1], video=videos),
    )


def answers(count: int, seed: int = 0) -> list[Tensor]:
    """Makes answers of 3 to 8 random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(20, 200, (3 + 5 * i // max(1, count - 1),), generator=generator) for i in range(count)]


def by_transformers(theirs, policy: QwenOmniPolicy, prompt: Prompt, answer: Tensor, temperature: float) -> Tensor:
    prepared = policy.prepare(prompt, SPEC)
    ids = torch.cat([prepared.ids, answer])[None]
    media = dict(prepared.media)
    if prompt.audio:
        heard = media.pop("input_features").split(media.pop("audio_lengths").tolist())
        media["input_features"] = pad_sequence(heard, batch_first=True).transpose(1, 2)
        media["feature_attention_mask"] = pad_sequence([torch.ones(len(one)).long() for one in heard], batch_first=True)
    if prompt.video:
        media["video_second_per_grid"] = torch.ones(len(prompt.video))  # pairs of frames, 2 frames a second
    logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0]
    of_answer = (logits[len(prepared.ids) - 1 : -1].float() / temperature).log_softmax(-1)
    return of_answer.gather(1, answer[:, None])[:, 0]


def gradients(model: torch.nn.Module, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    log_probs.sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    "chosen",
    [(0, 2), (1, 3), (4, 4), pytest.param((6, 6), marks=pytest.mark.thorough), (0, 1, 2, 3, 4, 5, 6, 7)],
    ids=["text", "images", "audio", "video", "mixed"],
)
def test_rows_equal_single_sequences(chosen, policy, thinker, theirs, prompts):
    """Log-probs and gradients of a row are those of transformers' model for each sequence alone."""
    own, drawn = [prompts[number] for number in chosen], answers(len(chosen))
    row = pack([Answered(policy.prepare(prompt, SPEC), answer) for prompt, answer in zip(own, drawn, strict=True)])
    expected = torch.cat([by_transformers(theirs, policy, *pair, 1.7) for pair in zip(own, drawn, strict=True)])
    found = policy.log_probs({"thinker": thinker}, row, 1.7)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-6
    mine, upstream = gradients(thinker, found), gradients(theirs, expected)
    trained = {name for name in upstream if not name.startswith(("visual.", "audio_tower."))}
    assert mine.keys() == trained
    for name, gradient in mine.items():
        assert (gradient - upstream[name]).abs().max() <= 1e-5 * upstream[name].abs().max(), name


def test_image_features_may_come_as_one_tensor_per_image(policy, thinker, prompts, monkeypatch):
    """As from transformers 5.17; 5.14 joins them."""
    media = policy.prepare(prompts[3], SPEC).media
    pixels, grids = media["pixel_values"], media["image_grid_thw"]
    joined = thinker._visual_features(pixels, grids)
    get, merged = thinker.get_image_features, thinker.spatial_merge_size**2

    def apart(pixels: Tensor, grids: Tensor, **how: Any) -> Any:
        found = get(pixels, grids, **how)
        found.pooler_output = found.pooler_output.split((grids.prod(1) // merged).tolist())
        return found

    monkeypatch.setattr(thinker, "get_image_features", apart)
    assert torch.equal(thinker._visual_features(pixels, grids), joined)


def test_a_file_of_several_answers_is_computed_once(family, policy, thinker, prompts):
    prepared = [policy.prepare(prompts[number], SPEC) for number in (1, 3, 1, 5, 4, 6, 6)]
    seen: list[int] = []

    def note(module: torch.nn.Module, args: tuple[Tensor, ...], given: dict[str, Tensor]) -> None:
        seen.append(len(given["grid_thw" if module is thinker.visual else "feature_lens"]))

    towers = (thinker.visual, thinker.audio_tower)
    hooks = [tower.register_forward_pre_hook(note, with_kwargs=True) for tower in towers]
    drawn = answers(7)
    together = thinker(pack([*map(Answered, prepared, drawn)]), 1.7)
    for hook in hooks:
        hook.remove()
    # Qwen3's processor pads the sounds of a prompt to its longest, which changes the last frames.
    sounds = 2 if family == "qwen_omni" else 3
    assert sorted(seen) == [1, sounds, 3], "a video; an image of the first prompt, two of the second"
    alone = [thinker(pack([Answered(*pair)]), 1.7) for pair in zip(prepared, drawn, strict=True)]
    assert (together - torch.cat(alone)).abs().max() <= 1e-6


@pytest.mark.parametrize("given", [0, 1, 5, 6], ids=["text", "image", "image and audio", "video"])
def test_decoding_equals_a_full_pass(given, policy, thinker, prompts):
    """Drops and reorders sequences on the way; one answer contains the tokens that represent files."""
    components = {"thinker": thinker}
    prepared = policy.prepare(prompts[given], SPEC)
    drawn = torch.stack([torch.arange(30, 36), torch.arange(40, 46), torch.arange(50, 56)])
    config = thinker.config
    drawn[0, 2:5] = torch.tensor([config.image_token_id, config.audio_token_id, config.video_token_id])
    expected = [policy.log_probs(components, pack([Answered(prepared, answer)]), 1.0) for answer in drawn]

    def position(number: int, rows: int) -> Tensor:
        return torch.full((rows,), prepared.next_position + number)

    logits, cache = policy.prefill(components, [prepared] * 3, drawn[:, :2])
    assert logits.shape == (3, thinker.config.text_config.vocab_size) and logits.dtype == torch.float32
    found = [logits]
    found.append(policy.decode(components, cache, drawn[:, 2], position(2, 3)))
    cache.keep([2, 0])
    kept = drawn[[2, 0]]
    found += [policy.decode(components, cache, kept[:, n], position(n, 2)) for n in (3, 4)]
    cache.keep([1])
    again, _ = policy.prefill(components, [prepared], drawn[:1, :4])
    assert (again - found[2][1:]).abs().max() <= 2e-6, "of all tokens, likely or not"
    for number, step in enumerate(found, 2):
        rows = (0, 1, 2) if len(step) == 3 else (2, 0)
        for log_probs, row in zip(step.log_softmax(-1), rows, strict=True):
            assert (log_probs[drawn[row, number]] - expected[row][number]).abs() <= 2e-6, (number, row)


@pytest.mark.parametrize("system", [None, "Answer with digits."])
def test_prompts_are_prepared_as_transformers_does(system, policy, theirs, prompts):
    spec = QwenOmniSampling(max_tokens=16, system=system)
    for prompt in prompts:
        content = [{"type": "image", "image": Image.open(image.path)} for image in prompt.images]
        content += [{"type": "video", "video": every_second_frame(video.path)} for video in prompt.video]
        content += [{"type": "audio", "audio": read_prompt_audio(one, 16_000)} for one in prompt.audio]
        chat = [{"role": "user", "content": [*content, {"type": "text", "text": prompt.text}]}]
        if system is not None:
            chat.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        expected = policy.processor.apply_chat_template(
            chat,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"fps": 2.0, "do_sample_frames": False} if prompt.video else {},
        )
        found = policy.prepare(prompt, spec)
        assert torch.equal(found.ids, expected["input_ids"][0]) and found.ids.dtype == torch.int64
        lengths = None
        if prompt.audio:
            heard = expected["feature_attention_mask"].bool()
            expected["audio_lengths"] = lengths = heard.sum(1)
            expected["input_features"] = expected["input_features"].transpose(1, 2)[heard]
        seen = {"pixel_values", "image_grid_thw"} if prompt.images else set()
        seen |= {"pixel_values_videos", "video_grid_thw"} if prompt.video else set()
        assert found.media.keys() == seen | ({"input_features", "audio_lengths"} if prompt.audio else set())
        assert all(torch.equal(found.media[name], expected[name]) for name in found.media)

        answered = torch.cat([found.ids, torch.tensor([30, 31])])[None]
        grids = [found.media.get(f"{part}_grid_thw") for part in ("image", "video")]
        seconds = expected.get("video_second_per_grid")
        positions, _ = theirs.get_rope_index(answered, *grids, torch.ones_like(answered), False, lengths, seconds)
        assert torch.equal(found.positions, positions[:, 0, :-2].long())
        assert positions[:, 0, -2:].tolist() == [[found.next_position, found.next_position + 1]] * 3


def every_second_frame(path: str) -> Any:
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])[::2]


def test_towers_are_frozen(policy, thinker):
    named = {f"thinker.{name}": weight for name, weight in thinker.named_parameters()}
    frozen = {name for name, weight in named.items() if not weight.requires_grad}
    of_each = [{name for name in named if name.startswith(f"{prefix}.")} for prefix in policy.frozen]
    assert frozen == set.union(*of_each) and all(of_each)
    assert list(policy.layers(thinker)) == list(thinker.model.layers)


def test_adapters_are_on_attention_alone(family, policy):
    components = nn.ModuleDict(policy.load_components(torch.float32))
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    add_adapters(components, Lora(rank=2, target_modules=targets), 0, policy.frozen)
    adapted = {name.partition(".lora_A")[0] for name, _ in components.named_parameters() if ".lora_A." in name}
    layers = range(len(policy.layers(components["thinker"])))
    assert adapted == {f"thinker.model.layers.{n}.self_attn.{target}" for n in layers for target in targets}
    if family == "qwen3_omni":
        for experts in (("gate_up_proj",), ("q_proj", "down_proj")):
            with pytest.raises(ValueError, match=r"^model\.lora\.target_modules: "):
                components = nn.ModuleDict(policy.load_components(torch.float32))
                add_adapters(components, Lora(rank=2, target_modules=experts), 0, policy.frozen)


def test_weights_are_the_checkpoint_s(family, policy, thinker, tmp_path: Path):
    """Loads the thinker alone, of a checkpoint with talker and vocoder, in the dtype of the recipe."""
    stored = load_file(Path(policy.path) / "model.safetensors")
    held = {name: weight.detach() for name, weight in thinker.named_parameters()}
    assert sum(weight.numel() for weight in held.values()) == sum(weight.numel() for weight in stored.values())
    by_transformers = revert_weight_conversion(thinker, dict(held))
    assert {f"thinker.{name}" for name in by_transformers} == stored.keys()
    assert all(torch.equal(stored[f"thinker.{name}"], weight) for name, weight in by_transformers.items())
    assert (held.keys() != by_transformers.keys()) == (family == "qwen3_omni"), "experts are fused"

    def checkpoint(name: str, weights: dict[str, Tensor]) -> QwenOmniPolicy:
        (tmp_path / name).mkdir()
        for file in Path(policy.path).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return type(policy)(str(tmp_path / name))

    whole = checkpoint("whole", stored | {"talker.model.norm.weight": torch.ones(4)})
    loaded = whole.load_components(torch.bfloat16)["thinker"]
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert loaded.state_dict().keys() == thinker.state_dict().keys()

    del stored["thinker.model.norm.weight"]
    with pytest.raises(ValueError, match=r"cut lacks thinker\.model\.norm\.weight"):
        checkpoint("cut", stored).load_components(torch.float32)


def test_texts_have_no_special_tokens(policy):
    [end] = policy.stop_tokens
    tokens = policy.processor.tokenizer("the digit 47")["input_ids"]
    assert policy.text([*tokens, end]) == "the digit 47"
    assert policy.text([end]) == ""


def test_prompts_that_the_model_cannot_take(family, policy, prompts):
    spec = {"qwen_omni": qwen_omni, "qwen3_omni": qwen3_omni}[family].FAMILY.sampling(max_tokens=16)
    marked = Prompt(0, f"an {policy.processor.image_token} in words")
    with pytest.raises(ValueError, match=r"it holds <\|(IMAGE|image_pad)\|>"):
        policy.prepare(marked, spec)
    assert "remove it" in str(spec.refused(marked.text, ()))
    assert SPEC.refused("a circle", ((84, 56),)) is None
    assert "too narrow" in str(SPEC.refused("a circle", ((84, 56), (1, 300))))
    length = len(policy.prepare(prompts[1], SPEC).ids)
    policy.prepare(prompts[1], at_most(CONTEXT - length))
    with pytest.raises(ValueError, match=f"has {length} tokens .* the model's context has {CONTEXT}; shorten"):
        policy.prepare(prompts[1], at_most(CONTEXT - length + 1))


@pytest.mark.parametrize(("samples", "ends"), [(479, "0.0299375 s"), (480_001, "30.0001 s")])
def test_audio_without_a_token_or_beyond_the_processor_s_window(policy, tmp_path, samples, ends):
    soundfile.write(tmp_path / "a.wav", np.zeros(samples), 16_000)
    prompt = Prompt(0, "x", audio=(prompt_audio(tmp_path / "a.wav", "a.wav"),))
    with pytest.raises(ValueError, match=rf"audio: it lasts {ends}, expected 0\.03 to 30 s"):
        policy.prepare(prompt, SPEC)


@pytest.mark.parametrize(("part", "number"), [("audio", 4), ("video", 6)])
def test_a_template_without_a_kind_of_files_is_refused(part, number, policy, prompts, monkeypatch):
    template = policy.processor.chat_template.replace(getattr(policy.processor, f"{part}_token"), "")
    monkeypatch.setattr(policy.processor, "chat_template", template)
    with pytest.raises(ValueError, match=f"{part}: the checkpoint's chat template leaves it out"):
        policy.prepare(prompts[number], SPEC)


def test_frames_of_a_prompt_s_videos_have_one_distance(policy, prompts):
    """The longer video has 4 frames at 2 a second, and 2 at 1 a second, 2 seconds a pair."""
    fewer = QwenOmniSampling(max_tokens=16, video_frames=2)
    prepared = policy.prepare(prompts[7], fewer)
    assert prepared.media["video_grid_thw"][:, 0].tolist() == [1, 1], "pairs of frames"
    assert policy.vllm_prompt(prompts[7], fewer)["mm_processor_kwargs"] == {"fps": 1.0, "do_sample_frames": False}
    slower = QwenOmniSampling(max_tokens=16, video_fps=1.0)
    one = policy.prepare(prompts[6], slower)
    assert one.media["video_grid_thw"][:, 0].tolist() == [1]
    with pytest.raises(ValueError, match=r"video_fps: expected 2 divided by a whole number, got 1\.5"):
        QwenOmniSampling(video_fps=1.5)


def test_frames_that_exceed_the_context_are_refused(policy, tmp_path):
    film = np.zeros((24, 3, 448, 448), np.uint8)
    [file] = write_media(Media(video=film, fps=2.0), tmp_path / "a")
    prompt = Prompt(0, "x", video=(prompt_video(file, "a.mp4")[0],))
    with pytest.raises(ValueError, match=rf"video: the frames have about \d+ tokens, .* context has {CONTEXT}; lower"):
        policy.prepare(prompt, SPEC)


def at_most(number: int) -> QwenOmniSampling:
    return QwenOmniSampling(max_tokens=number)


def test_sampling_keys(policy):
    assert SPEC.most_tokens == 16 and [(one.part, one.shape) for one in SPEC.media()] == [("text", ())]
    assert SPEC.problem(Path(policy.path)) is None
    assert f"context of {CONTEXT} tokens, got {CONTEXT}" in str(at_most(CONTEXT).problem(Path(policy.path)))
    for wrong in ({"max_tokens": 0}, {"temperature": 0.0}, {"top_p": 0.9}):
        with pytest.raises(ValidationError):
            convert(wrong, QwenOmniSampling)


def test_sound_of_so_few_samples_a_second_that_it_lasts_for_hours_is_refused(policy, tmp_path):
    """Resampled, a small file would become a large array."""
    soundfile.write(tmp_path / "slow.wav", np.zeros(1_201_000), 1000)
    prompt = Prompt(0, "x", audio=(prompt_audio(tmp_path / "slow.wav", "slow.wav"),))
    with pytest.raises(ValueError, match="the sound lasts 1201 s, expected 1200 at most"):
        policy.prepare(prompt, SPEC)
