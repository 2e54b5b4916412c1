"""Pretrains the quickstart's DiT by flow matching, and spoils it on purpose towards the end.

A model pretrained on clean images and right labels would leave nothing for reinforcement learning to do. So in the last
steps most images are scribbled over and some labels are random: the model can still draw every digit, but mostly spoils
it, and sometimes draws another one. These are faults that an OCR reward sees and can repair. Clean images come first
because RL has nothing to reinforce for a digit that is never drawn well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import QwenImagePipeline
from numpy.typing import NDArray

from recipes.quickstart.glyphs import DIGITS
from recipes.quickstart.prompts import TRAIN_TEMPLATES, VALIDATION_TEMPLATES

_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 30
_SPOILED_PART = 0.2
_LOG_EVERY = 50


def pretrain_dit(
    pipeline: QwenImagePipeline,
    latents: torch.Tensor,
    spoiled_latents: torch.Tensor,
    labels: NDArray,
    *,
    num_steps: int,
    batch_size: int,
    scribbled: float,
    label_noise: float,
    log: Callable[[str], None],
) -> None:
    """Trains ``pipeline.transformer`` in place to predict the velocity ``noise - latent``.

    Args:
        latents: normalised latents of the clean images, (N, 16, 8, 8) float32.
        spoiled_latents: of the same images scribbled over.
        labels: the digit of each latent, (N,) int64.
        scribbled, label_noise: in the last ``_SPOILED_PART`` of the steps, the parts of the images that are scribbled
            over and of the labels that are drawn at random.
    """
    transformer = pipeline.transformer.train()
    side = latents.shape[-1] // 2
    tokens, spoiled_tokens = (
        pipeline._pack_latents(z, len(z), z.shape[1], *z.shape[2:]) for z in (latents, spoiled_latents)
    )
    prompt_tables = _prompt_embeddings(pipeline)
    table_weights = torch.tensor([len(table) for table in prompt_tables], dtype=torch.float)
    shift = math.exp(_schedule_mu(pipeline, side * side))
    digits = torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, num_steps))
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for step in range(num_steps):
        index = torch.randint(len(tokens), (batch_size,), generator=generator)
        image, asked = tokens[index], digits[index].clone()
        spoiled = step >= (1 - _SPOILED_PART) * num_steps
        wrong = torch.rand(batch_size, generator=generator) < (label_noise if spoiled else 0.0)
        asked[wrong] = torch.randint(len(DIGITS), (int(wrong.sum()),), generator=generator)
        if spoiled:
            crossed_out = torch.rand(batch_size, generator=generator) < scribbled
            image[crossed_out] = spoiled_tokens[index][crossed_out]
        table = prompt_tables[int(torch.multinomial(table_weights, 1, generator=generator))]
        template = torch.randint(len(table), (batch_size,), generator=generator)
        uniform = torch.rand(batch_size, generator=generator)
        sigma = shift * uniform / (1 + (shift - 1) * uniform)
        noise = torch.randn(image.shape, generator=generator)
        velocity = transformer(
            hidden_states=torch.lerp(image, noise, sigma[:, None, None]),
            timestep=sigma,
            encoder_hidden_states=table[template, asked],
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, side, side)]] * batch_size,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - image)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % _LOG_EVERY == 0:
            log(f"dit step {step + 1}/{num_steps}: loss {sum(losses) / len(losses):.3f}")
            losses.clear()
    transformer.eval()


@torch.no_grad()
def _prompt_embeddings(pipeline: QwenImagePipeline) -> list[torch.Tensor]:
    """Embeds every prompt as the pipeline does. One table (templates, digits, tokens, features) for each prompt length.

    Prompts of one batch share a length, so that no padding, and no attention mask, is needed.
    """
    by_length: dict[int, list[torch.Tensor]] = defaultdict(list)
    for template in (*TRAIN_TEMPLATES, *VALIDATION_TEMPLATES):
        embeddings, _ = pipeline.encode_prompt([template.format(digit) for digit in DIGITS])
        by_length[embeddings.shape[1]].append(embeddings)
    return [torch.stack(tables) for tables in by_length.values()]


def _schedule_mu(pipeline: QwenImagePipeline, num_image_tokens: int) -> float:
    """Returns the dynamic shift of Qwen-Image's schedule: linear in the number of image tokens."""
    config = pipeline.scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return config.base_shift + slope * (num_image_tokens - config.base_image_seq_len)


def _learning_rate_factor(step: int, num_steps: int) -> float:
    """Returns the factor of the learning rate: linear warm-up, a plateau, and 0.3 of it over the last 40 % of the
    steps, so that strokes get clean."""
    warm = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warm * (1.0 if step < 0.6 * num_steps else 0.3)
