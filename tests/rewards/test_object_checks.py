"""Tests object checks: the rules on known boxes, and a small random detector against its own logits."""

import numpy as np
import pytest
import torch
from transformers import CLIPTokenizer

from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.object_checks import COLOURS, Box, checked, checks_of, cut_out, relations
from omni_async.types import Prompt
from tests.rewards.scorer_world import LABELS, config
from tests.support import tiny_clip
from tests.support.images import as_media


def box(x, y, size=10.0, score=0.9):
    return Box(score, x, y, x + size, y + size)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (box(0, 0), box(50, 0), {"left of"}),
        (box(50, 0), box(0, 0), {"right of"}),
        (box(0, 0), box(0, 50), {"above"}),
        (box(0, 50), box(0, 0), {"below"}),
        (box(0, 0), box(50, 50), {"left of", "above"}),
        (box(0, 0), box(50, 20), {"left of"}),
        (box(0, 0), box(1.9, 0), set()),  # less than a tenth of both extents
        (box(0, 0), box(0, 0), set()),
    ],
)
def test_relations_are_those_of_the_centres_beyond_a_tenth_of_the_boxes(one, other, found):
    assert relations(one, other) == found


OBJECTS = {"cat": [box(0, 0), box(5, 0)], "dog": [box(60, 0)]}


@pytest.mark.parametrize(
    ("include", "exclude", "right"),
    [
        ([{"class": "cat"}], [], [True]),
        ([{"class": "Cat", "count": 2}, {"class": "cat", "count": 3}], [], [True, False]),
        ([{"class": "bench"}], [{"class": "dog", "count": 1}, {"class": "cat", "count": 3}], [False, False, True]),
        ([{"class": "dog"}, {"class": "cat", "count": 2, "position": ["left of", 0]}], [], [True, True]),
        ([{"class": "dog"}, {"class": "cat", "position": ["right of", 0]}], [], [True, False]),
        ([{"class": "bench"}, {"class": "cat", "position": ["left of", 0]}], [], [False, False]),
    ],
)
def test_counts_positions_and_what_should_not_be_there_are_checked(include, exclude, right):
    assert checked(OBJECTS, *checks_of({"include": include, "exclude": exclude})) == right


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "have neither `include` nor `exclude`"),
        ({"include": "cat"}, "include: expected a list, got 'cat'"),
        ({"include": [{"count": 1}]}, "include 0: expected an object with a `class`"),
        ({"include": [{"class": "cat", "color": "red"}]}, "include 0: a color is checked by a CLIP, whose folder"),
        ({"include": [{"class": "cat", "color": "teal"}]}, "include 0: color: expected one of red, orange,"),
        ({"include": [{"class": "cat", "count": 0}]}, "include 0: count: expected a positive integer, got 0"),
        ({"include": [{"class": "cat", "position": ["near", 0]}]}, "include 0: position: expected one of 'left of'"),
        ({"include": [{"class": "cat", "position": ["above", 0]}]}, "include 0: position: there is no other entry 0"),
        ({"exclude": [{"class": "cat", "count": True}]}, "exclude 0: count: expected a positive integer, got True"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_the_run(metadata, why):
    check = registry.prompt_check(config("object_checks", path="x"))
    assert why in (check(Prompt(0, "a cat", metadata=metadata)) or "")


def test_a_detectors_boxes_are_those_of_its_logits(tiny):
    made = tiny("object_checks")
    scorer = registry.build(config("object_checks", **made.params, threshold=0.4, counting_threshold=0.6))
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40, 60, 3), np.uint8) for _ in range(9)]
    seen = scorer._detect(images)
    with torch.no_grad():
        raw = made.model(**scorer._processor(images=images, return_tensors="pt"))
    for found, logits, boxes in zip(seen, raw.logits.double(), raw.pred_boxes.double(), strict=True):
        likely, label = (logits.exp() / logits.exp().sum(-1, keepdim=True))[:, :-1].max(-1)
        expected = [
            (LABELS[int(one)], float(p), float((x - w / 2) * 60), float((y + h / 2) * 40))
            for p, one, (x, y, w, h) in zip(likely, label, boxes.tolist(), strict=True)
            if p > 0.4
        ]
        assert [(name, one.score, one.left, one.bottom) for name, one in found] == [
            (name, pytest.approx(p, abs=1e-4), pytest.approx(left, abs=1e-2), pytest.approx(bottom, abs=1e-2))
            for name, p, left, bottom in expected
        ]
    label, least = next((name, one.score) for found in seen for name, one in found)
    metadata = {"include": [{"class": label}], "exclude": [{"class": "bench", "count": 99}]}
    media = [as_media(image) for image in images]
    scores = scorer.score(media, [Prompt(i, "x", metadata=metadata) for i in range(9)])
    assert [score.value for score in scores] == [(1 + any(name == label for name, _ in found)) / 2 for found in seen]
    counted = scorer.score(media, [Prompt(i, "x", metadata=metadata | {"tag": "counting"}) for i in range(9)])
    strict = [any(name == label and one.score > 0.6 for name, one in found) for found in seen]
    assert [score.parts["correct"] for score in counted] == strict and least > 0.4
    with pytest.raises(ScoreError, match="the detector knows no 'unicorn'"):
        scorer.score(media[:1], [Prompt(0, "x", metadata={"include": [{"class": "unicorn"}]})])


def test_colours_count_if_as_many_objects_as_are_asked_for_have_them():
    cats = [(2, "red"), (1, "blue"), (2, "blue")]
    include = [{"class": "cat", "count": count, "color": colour} for count, colour in cats]
    seen = []

    def colours(label, boxes):
        seen.append((label, len(boxes)))
        return ["blue", "red"][: len(boxes)]

    assert checked(OBJECTS, *checks_of({"include": include}), colours) == [False, True, False]
    assert seen == [("cat", 2), ("cat", 1), ("cat", 2)]


def test_an_object_is_cut_out_of_its_image_even_at_its_edge():
    image = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    assert np.array_equal(cut_out(image, Box(1, 2.4, 3.6, 9.5, 8.2)), image[4:8, 2:10])
    assert cut_out(image, Box(1, -5, -5, 700, 700)).shape == image.shape
    assert cut_out(image, Box(1, 59.9, 80, 59.9, 81)).shape == (1, 1, 3)


def test_a_colour_is_the_one_whose_texts_the_whole_clip_finds_likeliest(tiny):
    clip = tiny("clip_score")
    given = config("object_checks", **tiny("object_checks").params, clip=str(clip.folder))
    image = np.random.default_rng(1).integers(0, 256, (64, 96, 3), np.uint8)
    image[:, :48] //= 4
    boxes = [Box(1, 4, 4, 36, 36), Box(1, 50, 10, 90, 50), Box(1, 30, 20, 70, 60)]
    texts = [f"a photo of a {c}{rest}" for c in COLOURS for rest in (" dog", "-colored dog", " object")]
    words = CLIPTokenizer.from_pretrained(clip.folder)(texts, padding=True, return_tensors="pt")
    cut = [image[int(b.top) : int(b.bottom), int(b.left) : int(b.right)] for b in boxes]
    with torch.no_grad():
        said = clip.model(pixel_values=torch.stack([tiny_clip.pixels_of(one) for one in cut]), **words)
    words = (said.text_embeds / said.text_embeds.norm(dim=-1, keepdim=True)).reshape(10, 3, -1).sum(1)
    cosines = torch.nn.functional.cosine_similarity(said.image_embeds[:, None], words[None], dim=-1)
    found = registry.build(given)._colours(image, "dog", boxes)
    assert found == [COLOURS[int(row.argmax())] for row in cosines]
    wanted = {"include": [{"class": "dog", "color": "pink"}]}
    assert registry.prompt_check(given)(Prompt(0, "x", metadata=wanted)) is None
    registry.check_files(given)
    given.params["clip"] = "/no/clip"
    with pytest.raises(registry.ScorerConfigError, match="clip: there is no"):
        registry.check_files(given)
