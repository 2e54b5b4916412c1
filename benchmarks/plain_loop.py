"""Trains the quickstart in a plain synchronous loop, as a price to compare omni_async with.

One process, one thread: diffusers generates, RapidOCR scores, and PyTorch trains. Imports nothing of omni_async; reads
its recipe, prompts and checkpoint. Model, reward, window, transition, advantages, objective and optimizer are those of
the recipe. Noise differs, because a plain loop draws it from torch's generator.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import cv2
import numpy as np
import torch
import yaml
from rapidfuzz.distance import Levenshtein
from rapidocr import RapidOCR
from torch import Tensor
from torch.nn import functional as F

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34  # dropped from the encoder's states, as by diffusers' pipeline
HEIGHT, WIDTH = 48, 64  # of a line of text, as the recogniser takes it
AT_ONCE = 16  # images of one pass of the recogniser, the fastest number on a CPU


class Prompt(NamedTuple):
    """A prompt: its states (L, E), and the digit to draw."""

    states: Tensor
    target: str


class Steps(NamedTuple):
    """R trained steps: latents before and after (R, T, C); sigmas, levels and log-probs (R,); the row's sample."""

    before: Tensor
    after: Tensor
    sigma: Tensor
    sigma_next: Tensor
    level: Tensor
    log_prob: Tensor
    sample: Tensor


class Model:
    """The checkpoint's parts. `size`: height and width of images in tokens of the transformer."""

    def __init__(self, folder: Path, size: tuple[int, int], steps: int) -> None:
        # Optional packages. A CUDA build of one of them fails on import next to a CPU torch.
        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules[name] = None  # type: ignore[assignment]
        from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

        def load(cls: Any, part: str) -> Any:
            return cls.from_pretrained(folder, subfolder=part, local_files_only=True)

        self.size = size
        self.tokenizer = load(Qwen2Tokenizer, "tokenizer")
        self.encoder = load(Qwen2_5_VLForConditionalGeneration, "text_encoder").model.eval()
        self.transformer = load(QwenImageTransformer2DModel, "transformer").eval()
        self.vae = load(AutoencoderKLQwenImage, "vae").eval()
        for module in self.vae.modules():
            # Before the first frame a causal convolution sees zeros, so an image needs the kernel's last slice alone.
            if type(module).__name__ == "QwenImageCausalConv3d":
                module.weight = torch.nn.Parameter(module.weight[:, :, -1:].clone())
                module._padding = (*module._padding[:4], 0, 0)
        scheduler = load(FlowMatchEulerDiscreteScheduler, "scheduler")
        known = scheduler.config
        bounds = known.base_image_seq_len, known.max_image_seq_len, known.base_shift, known.max_shift
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(size[0] * size[1], *bounds)
        )
        self.sigmas: Tensor = scheduler.sigmas

    @torch.no_grad()
    def encode(self, path: Path) -> list[Prompt]:
        """Return the prompts of a file."""
        found = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            tokens = self.tokenizer(TEMPLATE.format(row["prompt"]), return_tensors="pt")
            states = self.encoder(**tokens, output_hidden_states=True).hidden_states[-1]
            found.append(Prompt(states[0, TEMPLATE_TOKENS:].clone(), row["target"]))
        return found

    def velocity(self, latents: Tensor, sigma: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigma,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *self.size)]] * len(latents),
            return_dict=False,
        )[0]
        return velocity

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        """Return images uint8 (B, H, W, 3) of latents (B, T, 64)."""
        maps = F.pixel_shuffle(latents.transpose(1, 2).unflatten(2, self.size), 2)[:, :, None]
        known = self.vae.config
        mean, std = (torch.tensor(each)[:, None, None, None] for each in (known.latents_mean, known.latents_std))
        pixels = self.vae.decoder(self.vae.post_quant_conv(maps * std + mean))[:, :, 0]
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


class Reader:
    """RapidOCR's recogniser. A score is (similarity + probability of the digit) / 2, as by `ocr` with `dense`."""

    def __init__(self) -> None:
        options = {"use_det": False, "use_cls": False}
        one_thread = {f"EngineConfig.onnxruntime.{which}_op_num_threads": 1 for which in ("intra", "inter")}
        shape = {"Rec.rec_img_shape": [3, HEIGHT, WIDTH], "Rec.rec_batch_num": 1}
        engine = RapidOCR(params={**{f"Global.{k}": v for k, v in options.items()}, **one_thread, **shape})
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)
        engine(np.zeros((HEIGHT, WIDTH, 3), np.uint8), **options, use_rec=True)  # loads the model
        self.recogniser = cast(Any, engine.text_rec)
        alphabet = self.recogniser.postprocess_op.character
        self.column = {character: i for i, character in enumerate(alphabet)}
        self.silent = [0, *(i for i, character in enumerate(alphabet) if i and character.isspace())]

    def score(self, images: np.ndarray, targets: list[str]) -> tuple[np.ndarray, float]:
        """Return the scores (B,) of images uint8 (B, H, W, 3), and the share that is read exactly right."""
        lines = (cv2.resize(image[:, :, ::-1], (HEIGHT, HEIGHT), interpolation=cv2.INTER_AREA) for image in images)
        tensors = np.stack([self.recogniser.resize_norm_img(line, WIDTH / HEIGHT) for line in lines]).astype(np.float32)
        parts = [self.recogniser.session(tensors[i : i + AT_ONCE]) for i in range(0, len(tensors), AT_ONCE)]
        frames = np.concatenate(parts)
        read = ["".join(text.split()).lower() for text, _ in self.recogniser.postprocess_op(frames)[0]]
        similarity = np.array([Levenshtein.normalized_similarity(*pair) for pair in zip(read, targets, strict=True)])
        wanted = np.stack([frames[i, :, self.column[target]] for i, target in enumerate(targets)])
        # CTC over two symbols: nothing, and the wanted digit.
        both = torch.from_numpy(np.stack([frames[:, :, self.silent].sum(2), wanted], 2)).double().clamp_min(1e-30)
        lengths = torch.full((len(both),), both.shape[1]), torch.ones(len(both), dtype=torch.long)
        ones = torch.ones(len(both), 1, dtype=torch.long)
        probability = F.ctc_loss(both.log().transpose(0, 1), ones, *lengths, reduction="none").neg().exp().numpy()
        return (similarity + probability) / 2, float(np.mean([r == t for r, t in zip(read, targets, strict=True)]))


def stacked(prompts: list[Prompt]) -> tuple[Tensor, Tensor | None]:
    """Return states (B, L, E), padded on the right, and their mask; no mask without padding."""
    text = torch.nn.utils.rnn.pad_sequence([prompt.states for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt.states) for prompt in prompts])
    mask = torch.arange(text.shape[1]) < lengths[:, None]
    return text, None if mask.all() else mask


def transition(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (B, T, C) and scale (B, 1, 1) of a Flow-CPS step (arXiv 2509.05952); level 0 is the Euler step."""
    s, s_next, angle = (rows[:, None, None] for rows in (sigma, sigma_next, level * (math.pi / 2)))
    kept = s_next * angle.cos()
    return x * (1 - s_next + kept) + v * (kept * (1 - s) - (1 - s_next) * s), s_next * angle.sin()


def log_prob(after: Tensor, mean: Tensor) -> Tensor:
    return -(after - mean).square().flatten(1).mean(dim=1, dtype=torch.float64)


@torch.no_grad()
def generate(model: Model, prompts: list[Prompt], levels: Tensor, noise: torch.Generator) -> tuple[Tensor, Steps]:
    """Return final latents (B, T, C) and the noisy steps. `levels` (B, N): noise level of each sample's step."""
    text, mask = stacked(prompts)
    x = torch.randn(len(prompts), model.size[0] * model.size[1], 64, generator=noise)
    found: list[tuple[Tensor, ...]] = []
    for step, (sigma, sigma_next) in enumerate(zip(model.sigmas[:-1], model.sigmas[1:], strict=True)):
        s, s_next, level = sigma.expand(len(x)), sigma_next.expand(len(x)), levels[:, step]
        mean, scale = transition(x, model.velocity(x, s, text, mask), s, s_next, level)
        rows = level.nonzero().flatten()
        after = mean.clone()
        if len(rows):
            after[rows] += scale[rows] * torch.randn(len(rows), *x.shape[1:], generator=noise)
            noisy = x[rows], after[rows], s[rows], s_next[rows], level[rows], log_prob(after[rows], mean[rows]), rows
            found.append(noisy)
        x = after
    return x, Steps(*(torch.cat(parts) for parts in zip(*found, strict=True))) if found else Steps(*[x[:0]] * 7)


def update(model: Model, steps: Steps, prompts: list[Prompt], advantages: Tensor, clip: float) -> None:
    """Add the gradient of FlowGRPO's mean loss over the trained steps."""
    text, mask = stacked([prompts[i] for i in steps.sample.tolist()])
    velocity = model.velocity(steps.before, steps.sigma, text, mask)
    mean, _ = transition(steps.before, velocity, steps.sigma, steps.sigma_next, steps.level)
    ratio = (log_prob(steps.after, mean) - steps.log_prob).exp()
    advantage = advantages[steps.sample]
    torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean().backward()


def train(recipe: dict[str, Any], folder: Path, updates: int, seed: int) -> dict[str, float]:
    """Train, and return the numbers of the run."""
    rollout, trainer, validation = recipe["rollout"], recipe["trainer"], recipe["validation"]
    sampling, sde, group = rollout["sampling"], rollout["sde"], rollout["group_size"]
    steps, size, (low, high) = rollout["num_inference_steps"], sde["window"]["size"], sde["window"]["range"]
    tokens = sampling["height"] // 16, sampling["width"] // 16
    model, reader = Model(folder / recipe["model"]["path"], tokens, steps), Reader()
    prompts = model.encode(folder / recipe["data"]["prompts"])
    tests = model.encode(folder / validation["prompts"]) * validation["samples_per_prompt"]
    optimizer = torch.optim.AdamW(
        model.transformer.parameters(), lr=trainer["optimizer"]["lr"], weight_decay=1e-4, fused=True
    )
    draw, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    order: list[int] = []
    begun = time.process_time()
    say("training")

    def validate(number: int) -> float:
        silent, own = torch.zeros(len(tests), steps), torch.Generator().manual_seed(10**6 + seed)
        scores, exact = reader.score(model.decode(generate(model, tests, silent, own)[0]), [p.target for p in tests])
        say(f"update {number}: reward {scores.mean():.3f}, exact {exact:.3f}, CPU s {time.process_time() - begun:.1f}")
        return float(scores.mean())

    first, images = validate(0), len(tests)
    for number in range(updates):
        order = order if len(order) >= trainer["groups_per_update"] else [*order, *draw.permutation(len(prompts))]
        taken, order = order[: trainer["groups_per_update"]], order[trainer["groups_per_update"] :]
        batch = [prompts[i] for i in taken for _ in range(group)]
        starts = torch.from_numpy(draw.integers(low, high - size, len(taken), endpoint=True)).repeat_interleave(group)
        ahead = torch.arange(steps) - starts[:, None]
        levels = torch.where((ahead >= 0) & (ahead < size), sde["noise_level"], 0.0)
        latents, trained = generate(model, batch, levels, noise)
        scores = torch.from_numpy(reader.score(model.decode(latents), [prompt.target for prompt in batch])[0])
        groups = scores.unflatten(0, (-1, group))
        advantages = ((groups - groups.mean(1, keepdim=True)).flatten() / (scores.std() + 1e-4)).clamp(-5, 5)
        update(model, trained, batch, advantages, recipe["algorithm"]["clip_range"])
        torch.nn.utils.clip_grad_norm_(model.transformer.parameters(), 1.0)
        warm = min(1.0, (number + 1) / trainer["optimizer"]["warmup_steps"])
        optimizer.param_groups[0]["lr"] = trainer["optimizer"]["lr"] * warm
        optimizer.step()
        optimizer.zero_grad()
        images += len(batch)
        if (number + 1) % validation["every"] == 0 or number + 1 == updates:
            last, images = validate(number + 1), images + len(tests)
    say("trained")
    training = time.process_time() - begun
    return {
        "training_cpu_s": round(training, 2),
        "cpu_s": round(time.process_time(), 2),
        "images": images,
        "images_per_cpu_s": round(images / training, 2),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_reward": round(first, 4),
        "last_reward": round(last, 4),
    }


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plain_loop", description=__doc__)
    parser.add_argument("--updates", type=int, default=100, help="policy updates (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, windows and noise (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = yaml.safe_load(RECIPE.read_text())
    say(json.dumps(train(recipe, RECIPE.parent, options.updates, options.seed)))


if __name__ == "__main__":
    main()
