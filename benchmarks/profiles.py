"""Builds the shipped profiles from published figures.

`python -m benchmarks.profiles` writes the profiles and prints the steps that they reproduce.

A published step is one number. Other figures of the publication fix some of its stages. The rest is split by counting
the transformer's passes (g = 2 with guidance, else 1; N steps, W of them trained) and by assumptions, which the profile
lists under `assumed`:

    generation                                       N g   forward
    log-probs of the samples, before an update       W g   forward
    an update, gradient checkpointing                W g   forward, recomputed forward, and backward: as long as one
                                                           forward through frozen weights, as two if these have
                                                           their own gradients

`profiles_reproduced` lists the published arrangements. `docs/profiles.md` explains them.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from statistics import NormalDist, pstdev

from msgspec.structs import replace

from benchmarks.profiles_reproduced import table
from omni_async.performance.profile import Payload, Profile, ServiceTime, TokenTimes, write_profile

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "omni_async" / "performance" / "profiles"

_SAMPLES = 512  # samples of a step, in every published run: 32 prompts of 16 images, or 64 of 8 videos
_HAND_OVER_S = 12.0  # a GPU unloads one role's model and loads another's (20 to 55 GB between host and device)
_JUDGE_BATCH = 8

# Qwen-Image's transformer and the data of one of its 512 x 512 samples; conditioning in bfloat16.
_PARAMETERS = 20_430_401_088
_LORA_PARAMETERS = 424_673_280  # rank 64 on the 720 linear layers that the recipe names
_LATENTS = (2 + 1) * 1024 * 64 * 4  # two trained steps: three float32 latents of 1024 tokens x 64 channels
_TOKEN = 3584 * 2
_PROMPT_TOKENS, _NEGATIVE_TOKENS = 64, 6
_IMAGE = 512 * 512 * 3

_FIGURES = "verl-project/verl-omni, docs/algo/performance.md"
_VARIATION = (
    "Coefficients of variation are assumed: 0.03 of generation and training (fixed numbers of denoising steps), 0.2 of"
    " scoring, 0.1 of what moves weights. "
)


def shipped() -> tuple[Profile, ...]:
    lora, full = qwen_image_lora_h800(), qwen_image_full_h200()
    return lora, full, qwen_image_full_h100_64(full), wan22_dance(), remote_judge(lora), qwen3_omni_thinker()


def qwen_image_lora_h800() -> Profile:
    """Solve two equations, sync and async reward on 4 GPUs, for the seconds of scoring an image and of the training."""
    gpus, sync, async_reward, one_by_one, in_batches = 4, 420.0, 360.0, 226.4, 107.9
    single, batch = one_by_one * gpus / _SAMPLES, 32 * in_batches * gpus / _SAMPLES
    unit = (batch - single) / 31
    # Scoring on a separate GPU overlaps with generation, except for its last batch, and costs no hand-over there.
    score = (sync - async_reward - _HAND_OVER_S) / (_SAMPLES / gpus - _JUDGE_BATCH)
    export, publish, swap, step = 1.0, 2.0, 0.5, 0.5
    passes = sync - one_by_one - score * _SAMPLES / gpus - 3 * _HAND_OVER_S - export - publish - swap - 2 * step
    return Profile(
        name="qwen_image_lora_h800",
        source=(
            f"{_FIGURES}: Qwen-Image, LoRA rank 64, guidance, 512 images of 512 x 512 a step; 420 s on 4 H800, 360 s"
            " with the reward on a fifth (one worker here is one GPU). docs/start/rollout_batching.md of the same"
            " repository: generating them takes 226.4 s one by one and 107.9 s in batches of 32."
        ),
        assumed=(
            "Both steps generate images one by one: their table is older than batching. Generation is linear between"
            " batches of 1 and 32. A GPU changes hands in 12 s. A version takes 1 s to copy out, 2 s to reach the"
            f" engines and 0.5 s to merge, an optimizer step 0.5 s. Then the two steps leave {score:.2g} s to score an"
            f" image and {passes:.1f} s for passes of the trainer, split 1 : 3 between log-probs and the update."
            f" {_VARIATION}Payloads are computed: 64 prompt and 6 negative tokens of conditioning."
        ),
        generate=ServiceTime(_rounded(single - unit), _rounded(unit), cv=0.03),
        score=ServiceTime(unit_s=_rounded(score), cv=0.2),
        proximal=ServiceTime(unit_s=_rounded(passes / 4 * gpus / _SAMPLES), cv=0.03),
        train=ServiceTime(unit_s=_rounded(passes * 3 / 4 * gpus / _SAMPLES), cv=0.03),
        step=ServiceTime(step),
        export=ServiceTime(export, cv=0.1),
        publish=ServiceTime(publish, cv=0.1),
        swap=ServiceTime(swap, cv=0.1),
        switch=ServiceTime(_HAND_OVER_S, cv=0.1),
        payload=Payload(_LATENTS + (_PROMPT_TOKENS + _NEGATIVE_TOKENS) * _TOKEN, _IMAGE, 4 * _LORA_PARAMETERS),
    )


def qwen_image_full_h200() -> Profile:
    """Split the step without scoring, hand-overs, optimizer and weights by passes.

    10 to generate, 2 for log-probs, 8 to train."""
    gpus, seconds, score, step = 4, 250.0, 0.4, 4.0
    export, publish, swap = 4.0, 8.0, 1.0
    passes = seconds - score * _SAMPLES / gpus - 3 * _HAND_OVER_S - export - publish - swap - 2 * step
    each = passes / 20 * gpus / _SAMPLES
    return Profile(
        name="qwen_image_full_h200",
        source=(
            f"{_FIGURES}: Qwen-Image, all weights, no guidance, 512 images of 512 x 512 a step; 250 s on 4 H200, 0.510"
            " images/GPU/s (one worker here is one GPU)."
        ),
        assumed=(
            "An image is scored in 0.4 s as on H800 (profile qwen_image_lora_h800). A GPU changes hands in 12 s. A"
            " version of 41 GB takes 4 s to copy out, 8 s to reach the engines, 1 s to switch to; an optimizer step 4"
            f" s (its state lies on the host). The other {passes:.1f} s are split by passes, all equally long: 10 to"
            f" generate, 2 for log-probs, 8 to train a sample. Batches save no time. {_VARIATION}Payloads are computed:"
            " 64 prompt tokens of conditioning."
        ),
        generate=ServiceTime(unit_s=_rounded(10 * each), cv=0.03),
        score=ServiceTime(unit_s=score, cv=0.2),
        proximal=ServiceTime(unit_s=_rounded(2 * each), cv=0.03),
        train=ServiceTime(unit_s=_rounded(8 * each), cv=0.03),
        step=ServiceTime(step),
        export=ServiceTime(export, cv=0.1),
        publish=ServiceTime(publish, cv=0.1),
        swap=ServiceTime(swap, cv=0.1),
        switch=ServiceTime(_HAND_OVER_S, cv=0.1),
        payload=Payload(_LATENTS + _PROMPT_TOKENS * _TOKEN, _IMAGE, 2 * _PARAMETERS),
    )


def qwen_image_full_h100_64(four: Profile) -> Profile:
    """Take the same work as on `four` H200, sixteen times as fast.

    The remaining time of the step does not shrink with the number of GPUs."""
    seconds, groups, node = 100.0, 32, 8
    step = four.step.mean() * 4 / 64
    weights = four.export.mean() + four.publish.mean() + four.swap.mean()
    work = (four.generate.unit_s + four.score.unit_s + four.proximal.unit_s + four.train.unit_s) * _SAMPLES / 64
    fixed = (seconds - work - 2 * step - weights - 3 * _HAND_OVER_S) / groups

    def shared(service: ServiceTime, fixed_s: float = 0.0) -> ServiceTime:
        return replace(service, fixed_s=_rounded(fixed_s), unit_s=_rounded(service.unit_s / node))

    return replace(
        four,
        name="qwen_image_full_h100_64",
        source=(
            f"{_FIGURES}: the same job as in profile qwen_image_full_h200 on 64 H100; 100 s a step, 0.079 images/GPU/s."
            " One worker here is a node of 8 GPUs."
        ),
        assumed=(
            "A sample takes as long on one H100 as on one H200 of profile qwen_image_full_h200, and a node is 8 times"
            " as fast as a GPU; weights and hand-overs take as long as there, an optimizer step a sixteenth. The"
            f" {groups * fixed:.1f} s that are then missing are communication of the trainer's passes, however many"
            f" nodes take part: {fixed:.1f} s for each group, split 1 : 4 between log-probs (weights gathered once) and"
            f" the update (twice, and float32 gradients scattered). {_VARIATION}Payloads are those of that profile."
        ),
        generate=shared(four.generate),
        score=shared(four.score),
        proximal=shared(four.proximal, fixed / 5),
        train=shared(four.train, fixed * 4 / 5),
        step=ServiceTime(step),
    )


def wan22_dance() -> Profile:
    """Take the log's stages; its generation phase ends long after the last video is generated and scored."""
    npus, phase, log_probs, update, weights = 8, 869.4, 548.9, 735.3, 6.8
    generated, last_score = 403.6, 246.5
    unit = generated * npus / _SAMPLES
    # One worker scores first come, first served, from the first video on.
    score = (generated + last_score - unit) / _SAMPLES
    rest = phase - generated - last_score
    steps, step = 4, 2.0
    scaled = npus / _SAMPLES
    latents = (2 + 1) * 48 * 2 * 44 * 80 * 4
    conditioning = 2 * 512 * 4096 * 2
    return Profile(
        name="wan22_dance",
        source=(
            "verl-project/verl-omni, issue 402, a step's log of Wan2.2-TI2V-5B with DanceGRPO, 512 videos (735.3 s of"
            " 1.436 s each) of 8 frames of 704 x 1280 (one worker here is one NPU): generation phase 869.4 s, old"
            " log-probs 548.9 s, update 735.3 s, weights 6.8 s, step 2160.4 s; the slowest video took 403.6 s to be"
            " made and 246.5 s more to be scored. The first took 5.9 s, as long as generation here: 6.3 s."
        ),
        assumed=(
            "8 NPUs and one reward worker, as in the script of that recipe. All videos are requested at once and each"
            f" NPU makes them one by one; the reward worker scores in order of arrival, so a video takes {score:.2f} s."
            f" The {rest:.1f} s that the generation phase lasts longer are hand-overs of the NPUs, 2 of"
            f" {rest / 2:.1f} s. Of the update 4 x 2 s are optimizer steps; of the 6.8 s a version takes 2 s to copy"
            f" out and 0.5 s to switch to. {_VARIATION}Payloads are computed: latents of 48 channels x 2 frames x 44 x"
            " 80, conditioning of 2 x 512 tokens."
        ),
        generate=ServiceTime(unit_s=_rounded(unit), cv=0.03),
        score=ServiceTime(unit_s=_rounded(score), cv=0.2),
        proximal=ServiceTime(unit_s=_rounded(log_probs * scaled), cv=0.03),
        train=ServiceTime(unit_s=_rounded((update - steps * step) * scaled), cv=0.03),
        step=ServiceTime(step),
        export=ServiceTime(2.0, cv=0.1),
        publish=ServiceTime(_rounded(weights - 2.5), cv=0.1),
        swap=ServiceTime(0.5, cv=0.1),
        switch=ServiceTime(_rounded(rest / 2), cv=0.1),
        payload=Payload(latents + conditioning, 8 * 704 * 1280 * 3, 2 * 4_999_787_712),
    )


def remote_judge(lora: Profile) -> Profile:
    """Take the judge's latencies at 50 probabilities from 1 % to 99 %.

    They are of a log-normal distribution with the given median and 99 % quantile."""
    median, slow, count = 3.0, 60.0, 50
    sigma = math.log(slow / median) / NormalDist().inv_cdf(0.99)
    seconds = [median * math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    mean = sum(seconds) / count
    return replace(
        lora,
        name="remote_judge",
        source=f"Engine and trainer: profile qwen_image_lora_h800 ({_FIGURES}). The judge follows no published run.",
        assumed=(
            "The judge, a model behind an API: a request takes 3 s in the median and 60 s in one of a hundred,"
            " log-normal, whatever other requests it has; a reward worker is one request at a time, on no GPU. The"
            f" rest as in profile qwen_image_lora_h800. {lora.assumed}"
        ),
        score=ServiceTime(fixed_s=_rounded(mean), quantiles=tuple(round(s / mean, 4) for s in seconds)),
    )


def qwen3_omni_thinker() -> Profile:
    """Take 60 % of the step for generation, whose longest answer ends last; the rest is split as for other LoRA runs.

    The lengths are log-normal at 50 probabilities, cut at the longest that the run allows, with the published mean."""
    answers, seconds, share, mean, most, sigma = 64, 1260.0, 0.6, 3600, 8192, 0.9
    prefill, score, export, publish, swap, step = 0.05, 0.02, 1.0, 2.0, 0.5, 0.5

    def cut(median: float) -> tuple[int, ...]:
        drawn = (median * math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / 50)) for i in range(50))
        return tuple(min(most, round(length)) for length in drawn)

    lengths = cut(next(median for median in range(100, most) if sum(cut(median)) / 50 >= mean))
    times = TokenTimes(ServiceTime(1.0, 1 / answers), lengths, ServiceTime(unit_s=prefill))
    # A token of 64 answers takes twice as long as a token of one.
    token = (share * seconds - answers * prefill) / (times.longest(answers) + times.mean_length)
    tokens = replace(times, token=ServiceTime(_rounded(token), _rounded(token / answers)))
    passes = (1 - share) * seconds - answers * score - 2 * _HAND_OVER_S - export - publish - swap - step
    batches = tokens.in_batches
    group = round(pstdev(lengths) / times.mean_length / math.sqrt(8), 3)
    return Profile(
        name="qwen3_omni_thinker",
        source=(
            "verl-project/verl-omni, examples/gspo_trainer/README.md: Qwen3-Omni-30B-A3B thinker, GSPO with LoRA rank"
            " 64, 8 prompts of 8 answers a step on 4 H100 that take turns, one engine over all four (one worker here is"
            " 4 GPUs): 530 to 1260 s a step for mean lengths from 700 to 3600 tokens, at most 8192; generation"
            " dominates. An earlier version of the page has 22 minutes."
        ),
        assumed=(
            f"The upper end: {seconds:g} s for a mean of {mean} tokens. Lengths are log-normal with a standard"
            f" deviation of {sigma} of the logarithm, cut at {most}. Generation takes {share:.0%} of the step, and a"
            f" token of {answers} answers twice as long as a token of one. A prompt takes {prefill:g} s and a score"
            f" {score:g} s. GPUs change hands in 12 s. A version takes 1 s to copy out, 2 s to reach the engine and"
            f" 0.5 s to merge, an optimizer step 0.5 s. The other {passes:.1f} s are passes of the trainer: log-probs"
            " of policy and reference, and the update (1 : 1 : 3), all in `train`; a correction that needs log-probs"
            " takes another such pass. The time of a group varies as the sum of 8 lengths. Payloads are computed: 512"
            " prompt tokens; LoRA rank 64 on attention and experts is taken as 1 GB."
        ),
        generate=ServiceTime(_rounded(batches.fixed_s), _rounded(batches.unit_s)),
        score=ServiceTime(unit_s=score, cv=0.2),
        proximal=ServiceTime(unit_s=_rounded(passes / 5 / answers), cv=group),
        train=ServiceTime(unit_s=_rounded(passes / answers), cv=group),
        step=ServiceTime(step),
        export=ServiceTime(export, cv=0.1),
        publish=ServiceTime(publish, cv=0.1),
        swap=ServiceTime(swap, cv=0.1),
        switch=ServiceTime(_HAND_OVER_S, cv=0.1),
        payload=Payload(4 * 512 + 8 * mean, 4 * mean, 10**9),
        tokens=tokens,
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles", description="Write the shipped profiles and print what they reproduce."
    )
    parser.add_argument("--out", type=Path, default=PROFILES, help="folder to write to (default: the package's own)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    profiles = {profile.name: profile for profile in shipped()}
    for name, profile in profiles.items():
        write_profile(out / f"{name}.json", profile)
    sys.stdout.write(table(profiles) + "\n")


if __name__ == "__main__":
    main()
