"""Tests rows of several sequences, and that a policy computes a sequence in them as if it were alone."""

import pytest
import torch

from omni_async.tokens.packing import Answered, cut, pack
from tests.support.token_world import ToySampling, ToyTokenPolicy, alone, toy_prompt

SPEC = ToySampling(max_tokens=6)


def answered(policy: ToyTokenPolicy, index: int, images: int, tokens: list[int]) -> Answered:
    return Answered(policy.prepare(toy_prompt(index, images), SPEC), torch.tensor(tokens))


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([3, 3, 3], [[0, 1, 2]]),
        ([5, 4, 6], [[2, 1], [0]]),
        ([12, 2, 11, 3], [[0], [2], [1, 3]]),
        ([10], [[0]]),
    ],
)
def test_sequences_are_put_into_rows_of_bounded_length(lengths: list[int], rows: list[list[int]]) -> None:
    assert cut(lengths, 10) == [sorted(row) for row in rows]


def test_a_row_names_the_places_that_predict_answers() -> None:
    policy = ToyTokenPolicy()
    one, two = answered(policy, 0, 1, [4, 10]), answered(policy, 1, 0, [7])
    packed = pack([one, two])
    assert packed.ids.tolist() == [*one.prompt.ids.tolist(), 4, 10, *two.prompt.ids.tolist(), 7]
    first, second = len(one.prompt.ids), len(two.prompt.ids)
    assert packed.places.tolist() == [*range(first + 2), *range(second + 1)]
    assert packed.positions.tolist() == [packed.places.tolist()]  # the toy's rotary positions are the places
    assert packed.at.tolist() == [first - 1, first, first + 2 + second - 1]
    assert packed.targets.tolist() == [4, 10, 7]
    assert torch.equal(packed.media["pixel_values"], one.prompt.media["pixel_values"])


def test_packed_sequences_equal_each_alone_with_gradients() -> None:
    policy = ToyTokenPolicy()
    thinker = policy.load_components(torch.float32)["thinker"]
    made = [(0, 2, [1, 2, 10]), (1, 0, [3, 3, 3, 3, 3, 3]), (2, 1, [10]), (3, 1, [5, 6])]
    sequences = [answered(policy, *one) for one in made]
    packed = thinker(pack(sequences), 0.8)
    expected = torch.cat([alone(thinker, one.prompt, one.tokens, 0.8) for one in sequences])
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-6)
    parameters = [p for p in thinker.parameters() if p.requires_grad]
    scale = torch.linspace(-1, 1, len(packed))
    got = torch.autograd.grad((packed * scale).sum(), parameters)
    for ours, theirs in zip(got, torch.autograd.grad((expected * scale).sum(), parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
