"""Tests that prompts with too many tokens are found before a run: refused, or counted where the family cuts them."""

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from omni_async_pipelines.hunyuan_video_15.sampling import HunyuanVideo15Sampling
from omni_async_pipelines.qwen_image.sampling import MAX_TEXT_TOKENS, QwenImageSampling
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling

from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.plugins.families import EncodedText
from omni_async.runtime.preflight import prompt_limits
from omni_async.runtime.preflight.prompt_limits import PromptLimits
from omni_async.types import Prompt
from tests.pipelines.families import FAMILIES, NAMES, Family, first_of

QUICKSTART = Path("recipes/quickstart")
READ_DIGITS = QUICKSTART / "read_digits" / "checkpoint"
LONG = "the digit 7, a photo of “a red circle” " * 400
KEY = "data.prompts"


def limits(checkpoint: Path, spec: Any) -> PromptLimits:
    return PromptLimits(checkpoint, {"rollout.sampling": spec})


def repeated(number: int) -> Prompt:
    """Makes a prompt of so many tokens of the quickstart's tokenizer, whose template has 5 after the prompt."""
    return Prompt(0, "7" * (number - 5))


def test_a_prompt_may_have_as_many_tokens_as_the_encoder_takes() -> None:
    found = limits(QUICKSTART / "checkpoint", QwenImageSampling())
    fits, too_long = repeated(MAX_TEXT_TOKENS), repeated(MAX_TEXT_TOKENS + 1)
    said = found.problems(KEY, [fits, too_long, Prompt(2, "a cat"), too_long])
    expected = "the prompt has 1025 tokens, and the text encoder takes 1024 at most; shorten it"
    assert said == {1: expected, 3: expected} and found.notes == []
    spec = QwenImageSampling(true_cfg_scale=2, negative_prompt=too_long.text)
    with pytest.raises(ConfigError, match=r"^rollout\.sampling\.negative_prompt: the prompt has 1025 tokens"):
        limits(QUICKSTART / "checkpoint", spec).check_negative()
    limits(QUICKSTART / "checkpoint", replace(spec, true_cfg_scale=1.0)).check_negative()


@pytest.mark.parametrize("engine", [None, pytest.param(900, marks=pytest.mark.thorough)])
def test_a_prompt_leaves_room_for_its_answer(engine: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's context of 1024 tokens, or in the engine's smaller one."""
    if engine is None:  # each character of these texts is a token
        counted = lambda asked: [[len(text) for text in one["texts"]] for one in asked]  # noqa: E731
        monkeypatch.setattr(prompt_limits, "_count", counted)
    context = engine or 1024
    spec = QwenOmniSampling(max_tokens=100, system="7777777777")
    fits, too_long = (Prompt(0, "7" * (context - 100 - 11 + more)) for more in (0, 1))
    found = PromptLimits(READ_DIGITS, {"rollout.sampling": spec}, engine)
    why = f"the prompt has {context - 99} tokens and its answer up to 100, and the context has {context}; shorten it,"
    assert found.problems(KEY, [fits, too_long]) == {1: f"{why} or lower rollout.sampling.max_tokens"}
    if engine is not None:
        assert found.lengths(KEY, [fits]) == {"": (context - 100, [context - 100])}
        assert len(QwenOmniPolicy(str(READ_DIGITS)).prepare(fits, spec).ids) > context - 100, "with its template"


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("key", ["data.prompts", "validation.prompts"])
def test_a_long_line_is_refused_with_its_number(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['a sign "12"', "", repeated(1026).text + '"34"', 'a sign "56"']
    (tmp_path / "p.txt").write_text("\n".join(lines))
    recipe = str(QUICKSTART / "quickstart.yaml")
    assert main(["check", recipe, "--no-probe", f"{key}={tmp_path / 'p.txt'}"]) == 2
    assert f"{key}: {tmp_path / 'p.txt'}:3: the prompt has " in capsys.readouterr().err


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize("family", [first_of(name) for name in NAMES], ids=lambda family: family.name)
def test_cuts_and_refusals_are_the_codecs_own(tmp_path: Path, family: Family) -> None:
    checkpoint = family.build(tmp_path / "model")
    case, spec = family.case.with_media(tmp_path), family.specs[0]
    images = case.request(spec).prompt.images
    short, long, longer = (Prompt(0, text, images=images) for text in ("the digit 7", LONG, f"{LONG} and more"))
    found = limits(Path(checkpoint), spec)
    assert found.problems(KEY, [short]) == {} and found.notes == []
    refused = found.problems(KEY, [short, long, short])
    codec = family.policy(checkpoint).load_codec(torch.float32)
    if refused:
        assert set(refused) == {1} and found.notes == []
        with pytest.raises(ValueError, match="tokens"):
            codec.encode(long, spec)
        return
    assert found.notes and all(": 1 of 3 prompts are cut at the " in note for note in found.notes)
    for name, tensor in codec.encode(long, spec).items():
        assert torch.equal(tensor, codec.encode(longer, spec)[name]), name


def test_every_family_says_what_its_encoders_are_given() -> None:
    for family in FAMILIES:
        assert family.specs[0].encoded_texts("a cat", 0), family.label


def test_the_system_message_is_that_of_diffusers() -> None:
    from diffusers import HunyuanVideo15Pipeline

    given = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
    [seen] = HunyuanVideo15Sampling().encoded_texts("a cat", 0)
    assert seen.chat[0] == ("system", given)


@pytest.mark.parametrize("text", ["é" * 50, "ﷺ" * 50, "İ" * 50, "👩‍👩‍👧‍👦" * 9, "\u0958" * 30, " \t\n" * 30, "a"])
def test_no_tokenizer_exceeds_the_bound(text: str) -> None:
    from omni_async_pipelines import tiny

    one = EncodedText(tokenizer="", cls="", text=text, most=1)
    for tokenizer in (tiny.clip_tokenizer(), tiny.t5_tokenizer(), tiny.gemma_tokenizer()):
        assert len(tokenizer(text).input_ids) <= one.tokens_at_most()


def test_a_long_text_is_counted_once_and_short_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["input"])
        return subprocess.CompletedProcess(args, 0, '{"counts": [[2000]]}', "")

    monkeypatch.setattr(prompt_limits.subprocess, "run", remember)
    found, short = limits(QUICKSTART / "checkpoint", QwenImageSampling()), 'a small red sign with the text "{}" on it'
    assert found.problems(KEY, [Prompt(i, short.format(i)) for i in range(1000)]) == {} and not asked
    assert len(found.problems(KEY, [Prompt(i, LONG) for i in range(50)])) == 50
    assert len(asked) == 1 and asked[0].count("the digit 7") == LONG.count("the digit 7")


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(ConfigError, match=rf"^model\.path: {tmp_path / 'tokenizer'}: the tokenizer cannot be loaded: "):
        limits(tmp_path, QwenImageSampling()).problems(KEY, [Prompt(0, LONG)])


IMAGE = ((64, 48),)


@pytest.mark.parametrize(
    ("text", "sizes", "said"),
    [
        ("make it red", IMAGE, None),
        ("a <|image_pad|>", (), None),
        ("a <|image_pad|>", IMAGE, "prompt: it holds <|image_pad|>, where the model would look for another image"),
        ("make it red", ((30_000, 3),), "image: the image of 30000 x 3 pixels is too narrow"),
    ],
)
def test_prompts_that_the_editing_model_cannot_draw(text: str, sizes: Any, said: str | None) -> None:
    found = QwenImageEditSampling().refused(text, sizes)
    assert found is None if said is None else found is not None and found.startswith(said)
