"""Scores which image people would prefer: HPSv3 (Ma et al. 2025, arXiv:2508.03789).

A Qwen2-VL reads the image and a question about it that contains the prompt. A predictor of three layers with ReLU
between them maps its state at a special token of the question to two numbers, mu and log(sigma). The preference is a
normal distribution, and value = mu. Images are scaled to 256 x 28 x 28 pixels, as for the published scores.

The question belongs to the weights, not to this package: it is read from a file.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.config.reading import read_file
from omni_async.rewards.scorers.head import Head, read_tensors
from omni_async.rewards.scorers.model_scorer import Count, ModelScorer
from omni_async.rewards.scorers.pretrained import Precision, folder_of, load_model, load_part, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media

PIXELS = 256 * 28 * 28
_FIELD = "{text_prompt}"
_TOKEN = "<|Reward|>"
_LARGEST_QUESTION = 2**20  # bytes
_EMBEDDING = "language_model.embed_tokens.weight"


class HpsV3Scorer(ModelScorer):
    """A scorer of images; for a video, the mean over `frames` frames. Part `sigma`: the mean of exp(log(sigma)).

    `path`: a folder with configuration, tokenizer and processor of the trained Qwen2-VL. `weights`: the published
    checkpoint, `HPSv3.safetensors`. `question`: a text file with the question of the training, with `{text_prompt}` for
    the prompt and `<|Reward|>` at the token whose state is read. `dtype`: the precision of Qwen2-VL; the predictor runs
    in float64."""

    name = "hps_v3"
    model_type = "qwen2_vl"
    files = ("weights",)

    def __init__(
        self,
        *,
        path: str,
        weights: str,
        question: str,
        dtype: Precision = "bfloat16",
        frames: Count = 4,
        batch: Count = 4,
        device: str,
    ) -> None:
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        super().__init__(dtype=dtype, frames=frames, batch=batch, device=device)
        folder = folder_of(path)
        self._question = read_question(question)
        tensors = read_tensors(str(folder_of(weights)))
        head = {name: tensors.pop(name) for name in [*tensors] if name.startswith("rm_head.")}
        self._tokenizer = load_part(AutoTokenizer, folder)
        if _TOKEN not in self._tokenizer.get_vocab():  # as at the beginning of the training
            self._tokenizer.add_special_tokens({"additional_special_tokens": [_TOKEN]})
        self._mark = self._tokenizer.get_vocab()[_TOKEN]
        model = self._qwen(path, tensors, weights)
        prepare = load_part(Qwen2VLImageProcessorPil, folder, min_pixels=PIXELS, max_pixels=PIXELS)
        self._process: Any = Qwen2VLProcessor(prepare, self._tokenizer, Qwen2VLVideoProcessor())
        self._head = Head(head, f"weights: {weights}", model.config.text_config.hidden_size, out=2, relu=True)
        asked = blake2b(self._question.encode(), digest_size=16).hexdigest()
        self._set_model(model, folder, self._head.version, f"question {asked}")

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require the configuration's folder, the checkpoint, and the question."""
        if (missing := super().check_params(params)) is not None:
            return missing
        try:
            read_question(params["question"])
        except ValueError as error:
            return str(error)
        return None

    def _qwen(self, path: str, tensors: dict[str, Any], file: str) -> Any:
        """Return the model with as many embeddings as in the checkpoint. ValueError if they are too few."""
        from transformers import Qwen2VLConfig, Qwen2VLModel

        named = {_name(name): tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
        if _EMBEDDING not in named:
            raise ValueError(f"weights: {file} has no embeddings of tokens, so it is no HPSv3 checkpoint")
        config: Any = Qwen2VLConfig.from_pretrained(folder_of(path), local_files_only=True)
        config.text_config.vocab_size = known = named[_EMBEDDING].shape[0]
        if self._mark >= known:
            raise ValueError(f"weights: {file} has {known} tokens, and {_TOKEN} is number {self._mark} in {path}")
        return load_model(Qwen2VLModel, path, config=config, tensors=named)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        shown = self._shown(media)
        found = per_sample(self._head(self._read_all(self._read, shown, prompts)), shown)
        return [Score(float(mu.mean()), {"sigma": float(np.exp(sigma).mean())}) for mu, sigma in (x.T for x in found)]

    def _read(self, images: list[NDArray[np.uint8]], texts: list[str]) -> NDArray[np.float64]:
        """Return the model's state at the special token of each question: (images, width)."""
        import torch

        asked = self._process(
            text=[self._text(text) for text in texts], images=images, padding=True, return_tensors="pt"
        )
        asked["pixel_values"] = asked["pixel_values"].to(self._dtype)
        with torch.inference_mode():
            found = self._model(**asked.to(self._device), use_cache=False).last_hidden_state
        states: NDArray[np.float64] = found[asked["input_ids"] == self._mark].double().cpu().numpy()
        return states

    def _text(self, prompt: str) -> str:
        # Text in a prompt that looks like one of the tokenizer's marks must not become one.
        question = self._question.replace(_FIELD, prompt.replace("<|", "< |"))
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return chat


def read_question(path: str) -> str:
    """Read the file with the question. ValueError unless it has one place for the prompt and one for the answer."""
    file = Path(path).expanduser()
    try:
        text = read_file(file, _LARGEST_QUESTION).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"question: {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for part in (_FIELD, _TOKEN):
        if text.count(part) != 1:
            raise ValueError(f"question: expected {part} once in {file}, found it {text.count(part)} times")
    return text


def _name(name: str) -> str:
    """Return transformers' current name of a weight of Qwen2-VL, given its name in older or newer releases."""
    if re.match(r"model\.(visual|language_model)\.", name):
        return name.removeprefix("model.")
    return re.sub(r"^model\.", "language_model.", name)
