"""Compares a family's policy with diffusers' pipeline of the same checkpoint, and with its own contract.

Everything is in float32 on the CPU, unless the row notes otherwise; the bounds allow for rounding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.commands.parity.case import STEPS, Case, Upstream
from omni_async.commands.parity.layers import first_difference, recorded
from omni_async.commands.parity.table import Found, Row, measure
from omni_async.diffusion.components import compute_velocity, named_parameters
from omni_async.diffusion.policy import Codec, Policy
from omni_async.diffusion.sde.noise import initial_noise
from omni_async.diffusion.sde.transitions import log_prob, nats_per_log_prob, transition
from omni_async.media import Media, require_media
from omni_async.plugins.families import SamplingSpec

DRAWN = 1e-4  # for latents after all steps
ROUNDING = 1e-5  # for one step
_SIGMAS = (1.0, 0.5, 0.02)
_SEED = 3


class Subject:
    """A checkpoint as the trainer loads it: its policy, its denoisers in float32, its codec; and the upstream pipeline.

    Each part is loaded at its first use."""

    def __init__(self, case: Case, path: str, policy: Policy) -> None:
        self.case, self.path, self.policy = case, path, policy

    @cached_property
    def model(self) -> dict[str, nn.Module]:
        return self.policy.load_components(torch.float32)

    @cached_property
    def codec(self) -> Codec:
        return self.policy.load_codec(torch.float32)

    @cached_property
    def upstream(self) -> Upstream:
        return self.case.upstream(self.path)

    def noise(self, spec: SamplingSpec) -> Tensor:
        return initial_noise(_SEED, self.policy.latent_shape(spec))[None]

    def conditioning(self, spec: SamplingSpec, number: int = 1) -> TensorDict:
        return self.policy.stack_conditioning([self.codec.encode(self.case.prompts[number], spec)])

    @torch.no_grad()
    def draw(self, latents: Tensor, conditioning: TensorDict, spec: SamplingSpec, steps: int = STEPS) -> Tensor:
        """Draw a sample without noise, (1, *shape) to (1, *shape)."""
        for sigma, sigma_next in itertools.pairwise(self.policy.sigmas(steps, spec)):
            latents = latents + (sigma_next - sigma) * self.velocity(latents, sigma[None], conditioning, spec)
        return latents

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: TensorDict, spec: SamplingSpec) -> Tensor:
        """Compute the velocity of rows, whose sigmas may need different components."""
        needs = [self.policy.component_of(one) for one in sigma.tolist()]
        return compute_velocity(self.policy, self.model, latents, sigma, conditioning, spec, needs)


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinity if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def check_model(subject: Subject) -> Iterator[Row]:
    """Yield a row for every check of the policy, as it completes."""
    of_every_spec = {
        "noise-free samples": _drawn,
        "schedule": _schedule,
        "media": _media,
        "rows of a batch": _rows,
        "blank conditioning": _blank,
        "media to latents": _round_trip,
    }
    for number, spec in enumerate(subject.case.specs, 1):
        what = "guided" if spec.guided else f"spec {number}"
        for name, check in of_every_spec.items():
            yield measure("model", f"{name}, {what}", partial(check, subject, spec))
    of_the_model = {
        "gradient": _gradient,
        "LoRA targets": _targets,
        "float32 from bfloat16": _dtype,
        "log-prob in bfloat16, nats": _bfloat16,
    }
    if any(spec.guided for spec in subject.case.specs):
        of_the_model = {"guidance": _guidance} | of_the_model
    for name, check_whole in of_the_model.items():
        yield measure("model", name, partial(check_whole, subject))


def _drawn(subject: Subject, spec: SamplingSpec) -> Found:
    noise, [prompt] = subject.noise(spec), subject.case.prompts[1:2]
    with recorded(subject.upstream.denoisers(subject.policy.components)) as expected:
        wanted = subject.upstream.latents(prompt, spec, noise)
    with recorded(subject.model) as got:
        made = subject.draw(noise, subject.conditioning(spec), spec)
    off = difference(made, wanted)
    return Found(off, DRAWN, "" if off <= DRAWN else first_difference(expected, got, ROUNDING))


def _schedule(subject: Subject, spec: SamplingSpec) -> Found:
    ours, theirs = subject.policy.sigmas(STEPS, spec), subject.upstream.pipeline.scheduler.sigmas
    if ours.shape != theirs.shape:
        return Found(float("inf"), 0, f"{tuple(ours.shape)} in place of {tuple(theirs.shape)}")
    wrong = (ours != theirs).nonzero().flatten().tolist()
    note = f"sigmas {wrong} differ, the first by {difference(ours, theirs):.1e}" if wrong else ""
    return Found(len(wrong), 0, note)


def _media(subject: Subject, spec: SamplingSpec) -> Found:
    noise = subject.noise(spec)
    wanted = subject.upstream.media(subject.case.prompts[1], spec, noise)
    final = subject.draw(noise, subject.conditioning(spec), spec)
    [made] = subject.codec.decode(final, spec)
    require_media([made], spec)
    off = {part: media_difference(part, torch.as_tensor(getattr(made, part)), value) for part, value in wanted.items()}
    return Found(max(off.values()), 1, " and ".join(off))


def media_difference(part: str, made: Tensor, wanted: Tensor) -> float:
    """Return by how many levels two media differ; audio in [-1, 1] has a thousand levels per unit.

    A pixel may round to its neighbour."""
    return 1000 * difference(made, wanted) if part == "audio" else difference(made.float(), wanted.float().round())


def _rows(subject: Subject, spec: SamplingSpec) -> Found:
    policy, prompts = subject.policy, subject.case.prompts
    rows = [subject.codec.encode(prompt, spec) for prompt in prompts]
    latents = torch.randn(len(rows), *policy.latent_shape(spec), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([_SIGMAS[i % len(_SIGMAS)] for i in range(len(rows))])
    with torch.no_grad():
        batch = subject.velocity(latents, sigma, policy.stack_conditioning(rows), spec)
        alone = [
            subject.velocity(latents[i : i + 1], sigma[i : i + 1], policy.stack_conditioning([row]), spec)
            for i, row in enumerate(rows)
        ]
    return Found(difference(batch, torch.cat(alone)), ROUNDING, f"{len(rows)} prompts of different lengths")


def _blank(subject: Subject, spec: SamplingSpec) -> Found:
    def kinds(conditioning: TensorDict) -> dict[str, tuple[torch.dtype, int]]:
        return {str(key): (value.dtype, value.ndim) for key, value in conditioning.items()}

    blank, real = subject.policy.blank_conditioning(spec), subject.codec.encode(subject.case.prompts[0], spec)
    subject.policy.stack_conditioning([blank, blank])
    wrong = sorted({key for key, _ in kinds(blank).items() ^ kinds(real).items()})
    return Found(len(wrong), 0, ", ".join(wrong))


def _round_trip(subject: Subject, spec: SamplingSpec) -> Found:
    media = subject.codec.decode(subject.noise(spec), spec)
    require_media(media, spec)
    latents = subject.codec.encode_media(media, spec)
    shape, wanted = tuple(latents.shape[1:]), subject.policy.latent_shape(spec)
    if shape != wanted:
        return Found(float("inf"), 0, f"latents {shape} in place of {wanted}")
    try:
        subject.codec.encode_media([Media(image=torch.zeros(3, 16, 16, dtype=torch.uint8))], spec)
        return Found(float("inf"), 0, "media of another shape are taken")
    except ValueError:
        pass
    again = subject.codec.encode_media(media, spec)
    return Found(difference(latents, again) if latents.isfinite().all() else float("inf"), 0)


def _guidance(subject: Subject) -> Found:
    """Count the violations: guidance needs its own branch, and gradients flow through both or one, as requested."""
    guided = next(spec for spec in subject.case.specs if spec.guided)
    plain = next((spec for spec in subject.case.specs if not spec.guided), None)
    latents, sigma, wrong = subject.noise(guided), torch.tensor([0.5]), []
    if plain is not None:
        try:
            subject.policy.velocity(subject.model, latents, sigma, subject.conditioning(plain), guided)
            wrong.append("conditioning without a negative prompt is taken")
        except ValueError:
            pass
    gradients = []
    for both in (True, False):
        found = _gradients(subject, guided, unconditional_gradient=both)
        gradients.append(torch.cat([gradient.flatten() for gradient in found.values()]))
    if torch.equal(*gradients):
        wrong.append("unconditional_gradient changes nothing")
    if not all(gradient.abs().max() > 0 for gradient in gradients):
        wrong.append("no gradient")
    return Found(len(wrong), 0, "; ".join(wrong))


def _gradients(subject: Subject, spec: SamplingSpec, **options: bool) -> dict[str, Tensor]:
    """Return the gradient of every parameter of the velocities at the largest and the smallest sigma."""
    parameters = dict(named_parameters(subject.model))
    for parameter in parameters.values():
        parameter.grad = None
    conditioning = subject.conditioning(spec)
    for value in (_SIGMAS[0], _SIGMAS[-1]):
        sigma = torch.tensor([value])
        subject.policy.velocity(
            subject.model, subject.noise(spec), sigma, conditioning, spec, **options
        ).square().mean().backward()
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def _gradient(subject: Subject) -> Found:
    reached = {name for name, gradient in _gradients(subject, subject.case.specs[-1]).items() if gradient.any()}
    idle = _idle(subject)
    missed = [name for name, _ in named_parameters(subject.model) if name not in reached]
    unlisted, wrong = [name for name in missed if name not in idle], sorted(idle & reached)
    note = f"{len(reached)} of {len(reached) + len(missed)} parameters, {len(missed)} feed nothing"
    if unlisted or wrong:
        note = f"no gradient reaches {unlisted[:3]}" if unlisted else f"listed as idle, but they train: {wrong[:3]}"
    return Found(len(unlisted) + len(wrong), 0, note)


def _idle(subject: Subject) -> set[str]:
    """Return the parameters that the case lists as idle; see `Case.idle`."""
    names = [name for name, _ in named_parameters(subject.model)]
    found = set()
    for pattern in subject.case.idle:
        layers, marker, rest = pattern.partition("{last}")
        if marker:
            numbers = [int(name[len(layers) :].partition(".")[0]) for name in names if name.startswith(layers)]
            pattern = f"{re.escape(layers)}{max(numbers, default=0)}{rest}"
        exact = re.compile(pattern)
        found |= {name for name in names if exact.fullmatch(name)}
    return found


def target_layers(subject: Subject) -> dict[str, list[str]]:
    """Return the linear layers that the case's adapters change, by component."""
    suffixes = tuple(f".{target}" for target in subject.case.targets)
    return {
        component: [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and f".{name}".endswith(suffixes)
        ]
        for component, model in subject.model.items()
    }


def _targets(subject: Subject) -> Found:
    found = target_layers(subject)
    idle = _idle(subject) & {f"{c}.{name}.weight" for c, layers in found.items() for name in layers}
    note = ", ".join(f"{len(layers)} layers of {component}" for component, layers in found.items())
    missing = sum(not layers for layers in found.values())
    return Found(missing, 0, note + (f"; {len(idle)} of them feed nothing" if idle else ""))


def _dtype(subject: Subject) -> Found:
    spec = subject.case.specs[0]
    half = subject.policy.load_components(torch.bfloat16)
    wrong = [name for name, parameter in named_parameters(half) if parameter.dtype != torch.bfloat16]
    with torch.no_grad():
        v = subject.policy.velocity(half, subject.noise(spec), torch.tensor([1.0]), subject.conditioning(spec), spec)
    if v.dtype != torch.float32:
        wrong.append(f"the velocity is {v.dtype}")
    return Found(len(wrong), 0, ", ".join(wrong[:3]))


def _bfloat16(subject: Subject) -> Found:
    """Compare a transition's log-prob between denoisers in bfloat16 and in float32."""
    spec = subject.case.specs[0]
    half = subject.policy.load_components(torch.bfloat16)
    sigmas, latents = subject.policy.sigmas(STEPS, spec), subject.noise(spec)
    sigma, sigma_next, conditioning = sigmas[1:2], sigmas[2:3], subject.conditioning(spec)
    found = []
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(latents.shape, generator=generator)
    taken: Tensor | None = None
    with torch.no_grad():
        for components in (subject.model, half):
            v = subject.policy.velocity(components, latents, sigma, conditioning, spec)
            made = transition("flow", latents, v, sigma, sigma_next, sigmas[1:2], torch.tensor([0.7]))
            taken = made.mean + made.scale.view(-1, *[1] * (latents.ndim - 1)) * noise if taken is None else taken
            found.append(log_prob("flow", taken, made.mean, made.scale))
        nats = nats_per_log_prob("flow", made.scale.double(), latents.numel())
    return Found(float((nats * (found[1] - found[0])).abs().max()), None, "one step, against float32")
