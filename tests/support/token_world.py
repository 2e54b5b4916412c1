"""A small token policy: a causal transformer with a frozen tower for images, answers it draws, and groups of them.

The policy computes the same logits in packed rows as with keys and values that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.plugins.families import MediaShape, PipelineFamily, SamplingSpec
from omni_async.tokens.head import log_probs_of
from omni_async.tokens.policy import Packed, Prepared, TokenPolicy
from omni_async.training.groups import GroupBatch
from omni_async.types import Prompt, PromptImage
from tests.support.configs import build

WIDTH, HEADS, PIXELS = 16, 2, 4
END, IMAGE, VOCABULARY = 10, 11, 12  # tokens 0 to 9 are digits


class ToySampling(SamplingSpec, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_tokens: int = 6
    temperature: float = 1.0
    system: str | None = None

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("text", ()),)


FAMILY = PipelineFamily(
    name="toy_tokens",
    policy="tests.support.token_world:ToyTokenPolicy",
    model_index_class="ToyTokens",
    sampling=ToySampling,
    components=("thinker",),
    prompt_images=2,
    draws="tokens",
    layout="transformers",
)


class ToyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """(B, L, C), with keys and values (B, heads, L', C / heads) of the tokens before -> (B, L, C), keys, values."""
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(WIDTH, dim=2)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x), k, v


class ToyTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(PIXELS, WIDTH)  # a layer of the same name as in the thinker's own layers

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.out(pixels.to(self.out.weight.dtype))
        return found.tanh()


class ToyThinker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = ToyTower()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(ToyLayer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, ids: Tensor, positions: Tensor, media: Mapping[str, Tensor], answers: Tensor) -> Tensor:
        """`answers` (B, L) bool are the tokens of answers, where IMAGE is a token like any other."""
        x = self.embed(ids)
        if "pixel_values" in media:
            images = self.tower(media["pixel_values"]).to(x.dtype)
            x = x.masked_scatter(((ids == IMAGE) & ~answers)[..., None], images)
        angles = positions[..., None] * torch.logspace(0, -2, WIDTH // 2, dtype=torch.float64, device=ids.device)
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)

    def hidden(self, x: Tensor, mask: Tensor | None, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Appends this call's keys and values to those in `past`, which is empty at first."""
        known = list(past) or [None] * len(self.layers)
        past.clear()
        for layer, kept in zip(self.layers, known, strict=True):
            x, k, v = layer(x, mask, kept)
            past.append((k, v))
        return self.norm(x)

    def forward(self, packed: Packed, temperature: float) -> Tensor:
        sequence = (packed.places == 0).cumsum(0)
        causal = torch.ones(len(sequence), len(sequence), dtype=torch.bool, device=sequence.device).tril()
        answers = torch.zeros_like(packed.ids, dtype=torch.bool).index_fill(0, packed.at + 1, True)
        x = self.embedded(packed.ids[None], packed.positions[:1], packed.media, answers[None])
        x = self.hidden(x, causal & (sequence[:, None] == sequence), [])
        return log_probs_of(x[0, packed.at], self.head.weight, packed.targets, temperature)


@dataclass
class ToyCache:
    layers: list[tuple[Tensor, Tensor]]

    def keep(self, rows: Sequence[int]) -> None:
        self.layers = [(k[list(rows)], v[list(rows)]) for k, v in self.layers]


class ToyTokenPolicy:
    """See `omni_async.tokens.policy.TokenPolicy`; `path` is the seed of the weights.

    A prompt's tokens are its images, then the digits of its text."""

    components: tuple[str, ...] = ("thinker",)
    frozen: tuple[str, ...] = ("thinker.tower",)
    stop_tokens: tuple[int, ...] = (END,)

    def __init__(self, path: str = "0") -> None:
        self.path = path

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self.path))
            return {"thinker": ToyThinker().eval().to(dtype)}

    def layers(self, component: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(component, ToyThinker)
        return list(component.layers)

    def prepare(self, prompt: Prompt, spec: Any) -> Prepared:
        ids = [IMAGE] * len(prompt.images) + [int(digit) for digit in prompt.text if digit.isdigit()]
        if not ids:
            raise ValueError(f"prompt {prompt.index} has neither a digit nor an image")
        media = {}
        if prompt.images:
            pixels = [torch.tensor(list(image.content or b""), dtype=torch.float32) / 255 for image in prompt.images]
            media["pixel_values"] = torch.stack(pixels)
        return Prepared(torch.tensor(ids), torch.arange(len(ids))[None], len(ids), media)

    def log_probs(self, components: Mapping[str, nn.Module], packed: Packed, temperature: float) -> Tensor:
        found: Tensor = components["thinker"](packed, temperature)
        return found

    @torch.no_grad()
    def prefill(
        self, components: Mapping[str, nn.Module], prompts: Sequence[Prepared], answers: Tensor
    ) -> tuple[Tensor, ToyCache]:
        thinker = _thinker(components)
        device = thinker.head.weight.device
        rows = [torch.cat([one.ids, answer.cpu()]) for one, answer in zip(prompts, answers, strict=True)]
        places = torch.arange(len(rows[0]), device=device)
        media = {}
        if with_media := [one for one in prompts if one.media]:
            media["pixel_values"] = torch.cat([one.media["pixel_values"] for one in with_media]).to(device)
        drawn = (places >= len(prompts[0].ids)).expand(len(rows), -1)
        x = thinker.embedded(torch.stack(rows).to(device), places.expand(len(rows), -1), media, drawn)
        cache = ToyCache([])
        hidden = thinker.hidden(x, places[:, None] >= places, cache.layers)
        return thinker.head(hidden[:, -1]).float(), cache

    @torch.no_grad()
    def decode(self, components: Mapping[str, nn.Module], cache: ToyCache, tokens: Tensor, positions: Tensor) -> Tensor:
        thinker = _thinker(components)
        x = thinker.embedded(tokens[:, None], positions[:, None], {}, torch.ones_like(tokens[:, None]).bool())
        logits: Tensor = thinker.head(thinker.hidden(x, None, cache.layers)[:, -1]).float()
        return logits

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(str(token) for token in tokens if token < END)


def _thinker(components: Mapping[str, nn.Module]) -> ToyThinker:
    thinker = components["thinker"]
    assert isinstance(thinker, ToyThinker)
    return thinker


def toy_prompt(index: int, images: int = 0) -> Prompt:
    """Makes a prompt of two to five digits, after so many images."""
    text = str(10**6 + 7919 * (index + 1))[: 2 + index % 4]
    made = [bytes((37 * index + 11 * number + place) % 256 for place in range(PIXELS)) for number in range(images)]
    return Prompt(index, text, images=tuple(PromptImage("made", content.hex(), content) for content in made))


def draw_answer(
    policy: TokenPolicy, components: Mapping[str, nn.Module], prepared: Prepared, spec: Any, seed: int
) -> tuple[Tensor, Tensor]:
    """Draws an answer token by token, as an engine does: tokens (T,) int32, log-probs (T,) float32."""
    generator = torch.Generator().manual_seed(seed)
    logits, cache = policy.prefill(components, [prepared], torch.empty(1, 0, dtype=torch.int64))
    tokens, log_probs = list[int](), list[Tensor]()
    while True:
        values = (logits / spec.temperature).log_softmax(-1)
        token = torch.multinomial(values.exp(), 1, generator=generator)[:, 0]
        log_probs.append(values[0, token[0]])
        tokens.append(int(token[0]))
        if tokens[-1] in policy.stop_tokens or len(tokens) == spec.max_tokens:
            return torch.tensor(tokens, dtype=torch.int32), torch.stack(log_probs)
        position = torch.tensor([prepared.next_position + len(tokens) - 1])
        logits = policy.decode(components, cache, token, position)


def alone(thinker: nn.Module, prepared: Prepared, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the log-probs (T,) of an answer, computed alone from the whole logits, in the thinker's dtype."""
    assert isinstance(thinker, ToyThinker)
    ids = torch.cat([prepared.ids, tokens.long()])
    places = torch.arange(len(ids))
    embedded = thinker.embedded(ids[None], places[None], prepared.media, places[None] >= len(prepared.ids))
    hidden = thinker.hidden(embedded, places[:, None] >= places, [])
    logits = thinker.head(hidden[0, len(prepared.ids) - 1 : -1]) / temperature
    return logits.log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]


def token_config(spec: SamplingSpec | None = None, **changes: Any) -> Config:
    """Returns a configuration of token_grpo, changed by dotted keys, that samples with `spec`."""
    defaults = {
        "model": {"pipeline": FAMILY.name, "path": "0"},
        "rollout": {"engine": "transformers", "group_size": 4, "sde": None},
        "algorithm": {"name": "token_grpo", "correction": {"mode": "bypass"}},
        "trainer": {"optimizer": {"lr": 1e-2, "max_grad_norm": None}},
    }
    config = build(defaults, changes)
    return msgspec.structs.replace(config, rollout=replace_spec(config, spec or ToySampling()))


def replace_spec(config: Config, spec: SamplingSpec) -> Any:
    return msgspec.structs.replace(config.rollout, sampling=spec)


def token_group(
    policy: TokenPolicy,
    config: Config,
    seed: int = 0,
    staleness: int = 0,
    images: int = 0,
    components: Mapping[str, nn.Module] | None = None,
    prompt: Prompt | None = None,
) -> GroupBatch:
    """Makes a group of `rollout.group_size` answers with random advantages, every token `staleness` versions old.

    Its prompt is a small one with so many images, unless it is given."""
    spec, number = config.rollout.sampling, config.rollout.group_size
    prompt = prompt or toy_prompt(seed, images)
    prepared = policy.prepare(prompt, spec)
    components = components or policy.load_components(torch.float32)
    samples = []
    for sample in range(number):
        tokens, log_probs = draw_answer(policy, components, prepared, spec, 100 * seed + sample)
        fields = {"prompt": prepared.ids.int(), "tokens": tokens, "log_probs": log_probs}
        samples.append(TensorDict(fields, batch_size=[]))
    return GroupBatch(
        group=seed,
        spec=spec,
        trajectories=samples,
        advantages=torch.randn(number, generator=torch.Generator().manual_seed(seed)).tolist(),
        seeds=[1000 * seed + sample for sample in range(number)],
        staleness=[[staleness] * len(sample["tokens"]) for sample in samples],
        size=number,
        prompts=[prompt] * number,
    )


def token_share(group: GroupBatch, layout: ParallelLayout, start: int = 0) -> GroupBatch:
    """A rank's answers of a whole group; the first answer as padding where it has none."""
    dealt = layout.dealt(group.size, start)
    mine = dealt or range(1)
    picked: dict[str, Any] = {}
    for name in ("trajectories", "advantages", "seeds", "staleness", "weights", "prompts"):
        values = getattr(group, name)
        picked[name] = None if values is None else [values[i] for i in mine]
    return replace(group, **picked, counts=bool(dealt))
