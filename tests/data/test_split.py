"""Tests which prompts are held out for validation."""

import pytest

from omni_async.config import ConfigError
from omni_async.data.split import held_out, shared_note
from omni_async.types import Prompt, PromptImage

PROMPTS = [Prompt(i, f"prompt {i % 90}") for i in range(100)]


@pytest.mark.parametrize(("split", "number"), [(1, 1), (10, 10), (0.1, 10), (0.001, 1)])
def test_prompts_of_one_text_are_on_one_side(split, number):
    training, validation = held_out(PROMPTS, split)
    assert sorted([*training, *validation], key=lambda prompt: prompt.index) == PROMPTS
    assert not {prompt.text for prompt in training} & {prompt.text for prompt in validation}
    assert number <= len(validation) <= number + 1
    assert [prompt.index for prompt in validation] == sorted(prompt.index for prompt in validation)


def test_the_texts_alone_decide():
    chosen = {prompt.text for prompt in held_out(PROMPTS, 10)[1]}
    assert chosen == {prompt.text for prompt in held_out(PROMPTS[::-1], 10)[1]}
    assert chosen > {prompt.text for prompt in held_out(PROMPTS, 5)[1]}
    assert [prompt.text for prompt in held_out([Prompt(0, "a"), Prompt(1, "b"), Prompt(2, "c")], 1)[1]] == ["a"]


def test_prompts_of_one_text_are_divided_by_their_files():
    prompts = [Prompt(i, "How many?", images=(PromptImage(f"{i}.png", str(i % 45)),)) for i in range(50)]
    training, validation = held_out(prompts, 0.1)
    assert len(training) + len(validation) == 50 and 5 <= len(validation) <= 6
    assert shared_note(training, validation) is None


def test_prompts_must_be_left_to_train_on():
    with pytest.raises(ConfigError, match=r"validation\.split: 2 leaves none of the 3 prompts .*, of which 2 differ"):
        held_out([Prompt(0, "a"), Prompt(1, "b"), Prompt(2, "b")], 2)


def test_shared_prompts_are_reported():
    assert shared_note(PROMPTS[:5], PROMPTS[5:7]) is None
    note = shared_note(PROMPTS[:5], PROMPTS[4:7])
    assert note is not None and "1 of 3 prompts are in data.prompts too, the first is 'prompt 4'" in note
