"""Scores whether an image shows the objects, counts and positions of its prompt, as GenEval does (arXiv 2310.11513).

A prompt's metadata list the objects to look for, in GenEval's own form:

  include   a list of {class, count, color, position}: at least `count` objects of the class; each has the `color`;
            `position` is (relation, i): they are `left of`, `right of`, `above` or `below` the objects of entry i
  exclude   a list of {class, count}: fewer than `count` objects of the class

A detector finds the objects: at most 16 of a class with a score above `threshold`, the likeliest first. If the
metadata's `tag` is "counting", the threshold is `counting_threshold`. A relation holds if the distance of the centres,
less a tenth of both boxes' extents, points mostly that way (more than half of the whole distance).

The colour of an object is the likeliest of ten, by a CLIP that compares its box with three texts for each colour.
Without a CLIP, a prompt with a colour is refused before the run.

The value is 1 if all checks hold, otherwise the fraction that hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from omni_async.rewards.base import ScoreError, describe
from omni_async.rewards.scorers.clip import Clip
from omni_async.rewards.scorers.model_scorer import Count, ModelScorer
from omni_async.rewards.scorers.pretrained import folder_of, load_model, load_part, missing_file, wrong_checkpoint
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media

_MOST_OBJECTS = 16
_MARGIN = 0.1  # of the boxes' extents
_RELATIONS = ("left of", "right of", "above", "below")
_LONGEST_CAPTION = 12
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
_TEXTS = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")


class Box(NamedTuple):
    """A detected object: its score and its corners in pixels."""

    score: float
    left: float
    top: float
    right: float
    bottom: float


class ObjectChecksScorer(ModelScorer):
    """A scorer of images.

    `path`: an object detector in transformers' layout whose labels are the prompts' classes, such as DETR, Deformable
    DETR, RT-DETR or YOLOS on COCO. `clip`: a CLIP checkpoint for colours; None: no prompt may have one. `partial`: the
    value is the fraction of the checks that hold; otherwise it is 1 if all of them do, else 0. `batch`: images per
    forward pass.

    Parts: `correct`, 1 if all checks hold, and `found`, the number of objects of the included classes."""

    name = "object_checks"
    accepts = ("image",)

    def __init__(
        self,
        *,
        path: str,
        clip: str | None = None,
        threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.3,
        counting_threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.9,
        partial: bool = True,
        batch: Count = 8,
        device: str,
    ) -> None:
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        super().__init__(dtype="float32", batch=batch, device=device)
        model = load_model(AutoModelForObjectDetection, path)
        self._processor = load_part(AutoImageProcessor, folder_of(path))
        self._labels = {int(number): str(label).lower() for number, label in model.config.id2label.items()}
        self._clip = None if clip is None else Clip(clip, None, device, "float32", 32)
        self._texts: dict[str, NDArray[np.float64]] = {}
        self._set_model(model, folder_of(path), *([] if self._clip is None else [self._clip.version]))
        self._thresholds = threshold, counting_threshold
        self._partial = partial

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require the detector's folder, and CLIP's if it is given."""
        missing = missing_file("path", params["path"])
        if missing is None and params["clip"] is not None:
            wrong = wrong_checkpoint(params["clip"], "clip")
            return None if wrong is None else wrong.replace("path:", "clip:", 1)
        return missing

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require objects to look for, in a form that can be checked."""
        try:
            include, _ = checks_of(prompt.metadata)
        except ValueError as error:
            return str(error)
        coloured = next((i for i, one in enumerate(include) if one["color"] is not None), None)
        if coloured is not None and params["clip"] is None:
            return f"include {coloured}: a color is checked by a CLIP, whose folder the parameter `clip` names"
        return None

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        found: list[Score] = []
        for start in range(0, len(media), self._batch):
            images = [one.pixels for one in media[start : start + self._batch]]
            boxes = self._detect(images)
            rows = zip(images, boxes, prompts[start:], strict=False)
            for position, (image, seen, prompt) in enumerate(rows, start):
                found.append(self._judge(image, seen, prompt, position))
        return found

    def _judge(self, image: NDArray[np.uint8], seen: Sequence[tuple[str, Box]], prompt: Prompt, position: int) -> Score:
        try:
            include, exclude = checks_of(prompt.metadata)
        except ValueError as error:
            raise ScoreError(f"{describe(position, prompt)}: {error}") from None
        known = set(self._labels.values())
        if unknown := sorted({one["class"] for one in (*include, *exclude)} - known):
            raise ScoreError(f"{describe(position, prompt)}: the detector knows no {', '.join(map(repr, unknown))}")
        least = self._thresholds[prompt.metadata.get("tag") == "counting"]
        objects: dict[str, list[Box]] = {}
        for label, box in sorted(seen, key=lambda one: -one[1].score):
            if box.score > least and len(objects.setdefault(label, [])) < _MOST_OBJECTS:
                objects[label].append(box)
        right = checked(objects, include, exclude, lambda label, boxes: self._colours(image, label, boxes))
        asked = {one["class"] for one in include}
        parts = {
            "correct": float(all(right)),
            "found": float(sum(len(boxes) for label, boxes in objects.items() if label in asked)),
        }
        caption = [f"{len(boxes)} {label}" for label, boxes in sorted(objects.items())][:_LONGEST_CAPTION]
        value = sum(right) / len(right) if self._partial else parts["correct"]
        return Score(value, parts, ", ".join(caption) or "nothing")

    def _colours(self, image: NDArray[np.uint8], label: str, boxes: Sequence[Box]) -> list[str]:
        """Return the likeliest colour of each object. ScoreError without a CLIP."""
        if self._clip is None:
            raise ScoreError("a color is checked by a CLIP, whose folder the parameter `clip` names")
        if label not in self._texts:
            texts = [text.format(colour=colour, label=label) for colour in COLOURS for text in _TEXTS]
            rows = self._clip.texts(texts).astype(np.float64).reshape(len(COLOURS), len(_TEXTS), -1).mean(axis=1)
            self._texts[label] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = self._clip.images([cut_out(image, box) for box in boxes]).astype(np.float64)
        return [COLOURS[i] for i in (rows @ self._texts[label].T).argmax(axis=1)]

    def _detect(self, images: list[NDArray[Any]]) -> list[list[tuple[str, Box]]]:
        """Return labels and boxes above the lower threshold for each image, (height, width, 3) uint8."""
        import torch

        inputs = self._processor(images=images, return_tensors="pt").to(self._device)
        with torch.no_grad():
            outputs = self._model(**inputs)
        sizes = torch.tensor([image.shape[:2] for image in images])
        each = self._processor.post_process_object_detection(
            outputs, threshold=min(self._thresholds), target_sizes=sizes
        )
        return [
            [
                (self._labels[int(label)], Box(float(score), *map(float, box)))
                for score, label, box in zip(one["scores"], one["labels"], one["boxes"], strict=True)
            ]
            for one in each
        ]


Check = dict[str, Any]


def checks_of(metadata: Mapping[str, Any]) -> tuple[list[Check], list[Check]]:
    """Return the checks that a prompt's metadata include and exclude, each {class, count, color, position}.

    ValueError describes the first mistake in them."""
    include = [_check("include", i, one) for i, one in enumerate(_list(metadata, "include"))]
    exclude = [_check("exclude", i, one) for i, one in enumerate(_list(metadata, "exclude"))]
    if not include and not exclude:
        raise ValueError("the prompt's metadata have neither `include` nor `exclude`, lists of objects to look for")
    for i, one in enumerate(include):
        if one["position"] is not None and not (one["position"][1] < len(include) and one["position"][1] != i):
            raise ValueError(f"include {i}: position: there is no other entry {one['position'][1]}")
    return include, exclude


def _list(metadata: Mapping[str, Any], key: str) -> list[Any]:
    found = metadata.get(key, [])
    if not isinstance(found, list):
        raise ValueError(f"{key}: expected a list, got {found!r:.100}")
    return found


def _check(key: str, number: int, given: Any) -> Check:
    where = f"{key} {number}"
    if not isinstance(given, dict) or not isinstance(given.get("class"), str):
        raise ValueError(f"{where}: expected an object with a `class`, got {given!r:.100}")
    colour = given.get("color")
    if colour is not None and colour not in COLOURS:
        raise ValueError(f"{where}: color: expected one of {', '.join(COLOURS)}, got {colour!r:.50}")
    count = given.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{where}: count: expected a positive integer, got {count!r:.50}")
    position = given.get("position")
    if position is not None:
        fits = isinstance(position, list | tuple) and len(position) == 2 and position[0] in _RELATIONS
        if not fits or not isinstance(position[1], int) or position[1] < 0:
            relations = ", ".join(map(repr, _RELATIONS))
            raise ValueError(
                f"{where}: position: expected one of {relations} and an entry's number, got {position!r:.80}"
            )
    return {"class": given["class"].lower(), "count": count, "color": colour, "position": position}


def cut_out(image: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    """Return the part of an image (height, width, 3) in a box, at least one pixel."""
    height, width = image.shape[:2]
    left, top = min(max(round(box.left), 0), width - 1), min(max(round(box.top), 0), height - 1)
    right, bottom = max(round(box.right), left + 1), max(round(box.bottom), top + 1)
    return np.ascontiguousarray(image[top:bottom, left:right])


def checked(
    objects: Mapping[str, Sequence[Box]],
    include: Sequence[Check],
    exclude: Sequence[Check],
    colours: Callable[[str, Sequence[Box]], list[str]] = lambda label, boxes: [],
) -> list[bool]:
    """Return which checks hold: each entry of `include`, in order, then each of `exclude`.

    Args:
        objects: the detected objects, by label, the likeliest first.
        include: objects that must be there, with their colour and their position.
        exclude: objects that must not be there.
        colours: returns the colours of objects with a label."""
    right = []
    for one in include:
        found = objects.get(one["class"], [])[: one["count"]]
        holds = len(found) >= one["count"]
        if holds and one["color"] is not None:
            holds = colours(one["class"], found).count(one["color"]) >= one["count"]
        if holds and one["position"] is not None:
            relation, other = one["position"]
            target = include[other]
            others = objects.get(target["class"], [])[: target["count"]]
            holds = bool(others) and all(relation in relations(a, b) for a in found for b in others)
        right.append(holds)
    return right + [len(objects.get(one["class"], [])) < one["count"] for one in exclude]


def relations(one: Box, other: Box) -> set[str]:
    """Return the position of one object relative to another: at most one of left and right, and of above and below."""
    dx = (one.left + one.right - other.left - other.right) / 2
    dy = (one.top + one.bottom - other.top - other.bottom) / 2
    width = one.right - one.left + other.right - other.left
    height = one.bottom - one.top + other.bottom - other.top
    far_x, far_y = max(abs(dx) - _MARGIN * width, 0.0), max(abs(dy) - _MARGIN * height, 0.0)
    distance = math.hypot(dx, dy)
    if max(far_x, far_y) < 1e-3:
        return set()
    found = set()
    if far_x / distance > 0.5:
        found.add("left of" if dx < 0 else "right of")
    if far_y / distance > 0.5:
        found.add("above" if dy < 0 else "below")
    return found
