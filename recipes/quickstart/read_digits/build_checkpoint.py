"""Rebuilds the checkpoint and the prompts of this recipe, offline: draws digits, trains a small thinker to read them.

    python -m recipes.quickstart.read_digits.build_checkpoint --out recipes/quickstart/read_digits/checkpoint

Takes some minutes on one core. The thinker imitates a teacher who sees little noise and misreads every fourth digit.
The recipe's images have more noise: the base model often guesses, and may answer with any digit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omni_async_pipelines.qwen_omni import tiny  # isort: skip  (before anything imports torchvision)
import torch
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling
from omni_async_pipelines.qwen_omni.thinker import Thinker
from transformers.utils import logging as transformers_logging

from omni_async.data.image_files import prompt_image
from omni_async.tokens.packing import Answered, pack
from omni_async.tokens.policy import Prepared
from omni_async.types import Prompt
from recipes.quickstart.read_digits.images import GREY, TEXT, draw, random_number, write_prompts

HERE = Path(__file__).parent
SPEC = QwenOmniSampling(max_tokens=4)
_MEAN, _STD = GREY / 255, 0.125  # of pixels: a glyph becomes about 1, its background -1


class Reader:
    """Makes the model's input from images, and draws the model's answers."""

    def __init__(self, policy: QwenOmniPolicy, thinker: Thinker, example: Path) -> None:
        self.policy = policy
        self.thinker = thinker
        self._prompt = policy.prepare(Prompt(0, TEXT, images=(prompt_image(example, example.name),)), SPEC)

    def prepare(self, numbers: list[str], noise: float, rng: random.Random) -> list[Prepared]:
        """Returns the input of a new image of each number."""
        images = [draw(number, noise, rng) for number in numbers]
        found = self.policy.processor.image_processor(images=images, return_tensors="pt")
        pixels, grids = (found[name].chunk(len(images)) for name in ("pixel_values", "image_grid_thw"))
        return [
            replace(self._prompt, media={"pixel_values": of_image, "image_grid_thw": grid})
            for of_image, grid in zip(pixels, grids, strict=True)
        ]

    def answer(self, number: str) -> torch.Tensor:
        """Returns the tokens of an answer, with the end token."""
        return torch.tensor([*self.policy.processor.tokenizer(number)["input_ids"], *self.policy.stop_tokens])

    def read(self, prompts: list[Prepared], generator: torch.Generator | None) -> list[str]:
        """Returns an answer to each prompt: drawn, or without a generator the likeliest tokens."""
        components = {"thinker": self.thinker}
        logits, cache = self.policy.prefill(components, prompts, torch.empty(len(prompts), 0, dtype=torch.long))
        drawn: list[torch.Tensor] = []
        for number in range(SPEC.max_tokens):
            if drawn:
                positions = torch.full((len(prompts),), self._prompt.next_position + number - 1)
                logits = self.policy.decode(components, cache, drawn[-1], positions)
            sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            drawn.append(logits.argmax(-1) if generator is None else sampled)
        [stop] = self.policy.stop_tokens
        rows = (row[: row.index(stop)] if stop in row else [] for row in torch.stack(drawn, dim=1).tolist())
        return [self.policy.text(row) for row in rows]

    def accuracy(self, noise: float, count: int = 256) -> str:
        """Returns the share of fixed images that are read right, by the likeliest tokens and by drawn ones."""
        rng = random.Random(1)
        numbers = [random_number(rng) for _ in range(count)]
        prompts = self.prepare(numbers, noise, rng)
        ways = (None, torch.Generator().manual_seed(0))
        right = [sum(map(str.__eq__, self.read(prompts, way), numbers)) for way in ways]
        return f"right {right[0] / count:.3f}, drawn {right[1] / count:.3f}"


def train(reader: Reader, args: argparse.Namespace, log: Callable[[str], None]) -> None:
    """Trains the whole thinker to imitate the teacher, towers included."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(reader.thinker.parameters(), lr=args.lr, weight_decay=0.0)

    def misread(digit: str) -> str:
        return str(rng.randrange(10)) if rng.random() < args.errors else digit

    for step in range(args.steps):
        numbers = [random_number(rng) for _ in range(args.batch)]
        answers = [reader.answer("".join(map(misread, number))) for number in numbers]
        row = pack([*map(Answered, reader.prepare(numbers, args.seen_noise, rng), answers)])
        loss = -reader.thinker(row, 1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 25 == 0:
            log(f"step {step + 1}/{args.steps}: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "checkpoint", help="folder of the checkpoint")
    parser.add_argument("--prompts", type=Path, default=HERE, help="folder of the two prompt files and the images")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and images")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="images in a step")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="learning rate")
    parser.add_argument("--errors", type=float, default=0.25, help="part of the digits that the teacher misreads")
    parser.add_argument("--seen-noise", type=float, default=0.5, help="noise of the teacher's images")
    parser.add_argument("--noise", type=float, default=2.0, help="noise of the recipe's images")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another number changes the last bits")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()  # warns of tokens of the talker, which this checkpoint lacks
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # Adam's decayed moments become denormal and slow a CPU down several times
    started = time.monotonic()

    def log(message: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - started:5.0f} s] {message}\n")
        sys.stdout.flush()

    write_prompts(args.prompts, "train", 3, args.noise, args.seed + 1)
    write_prompts(args.prompts, "validation", 1, args.noise, args.seed + 2)
    processor = tiny.build_processor([TEXT], vocab_size=320, image_mean=[_MEAN] * 3, image_std=[_STD] * 3)
    thinker = tiny.build_thinker(processor.tokenizer, layers=3, heads=3, seed=args.seed)
    log(f"{sum(weight.numel() for weight in thinker.parameters())} parameters")
    tiny.save(thinker, processor, args.out)  # the policy reads configuration and processor
    reader = Reader(QwenOmniPolicy(str(args.out)), thinker, args.prompts / "images" / "train_00_0.png")
    train(reader, args, log)
    tiny.save(thinker, processor, args.out)
    for name, noise in (("teacher's", args.seen_noise), ("recipe's", args.noise)):
        log(f"of the {name} images {reader.accuracy(noise)}")


if __name__ == "__main__":
    main()
