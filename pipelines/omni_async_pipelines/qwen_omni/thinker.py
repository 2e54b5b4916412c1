"""Computes with a Qwen-Omni thinker: log-probs of packed rows for the trainer, next tokens for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen2_5OmniThinkerForConditionalGeneration

from omni_async.tokens.head import log_probs_of
from omni_async.tokens.policy import Packed


class DrawsTokens(nn.Module):
    """Gives transformers' thinkers, which inherit it first, a forward pass that ends in log-probs.

    Names of weights stay transformers'."""

    model: Any
    lm_head: nn.Linear
    config: Any
    get_image_features: Any
    spatial_merge_size: Any
    audio_tower: Any

    @classmethod
    def is_custom_code(cls) -> bool:
        """Let transformers convert weights of files as for its own class, which a subclass elsewhere would not get."""
        return False

    def forward(self, packed: Packed, temperature: float) -> Tensor:
        """Return the log-probs (T,) float32 of a row's answer tokens (`omni_async.tokens.policy.TokenPolicy`)."""
        # Transformers separates the sequences of a row by these four rows of positions, if no mask and no cache is
        # given. Without positions, images would silently get those of text.
        positions = torch.cat([packed.places[None], packed.positions])[:, None]
        given = torch.ones_like(packed.ids, dtype=torch.bool)
        given[(packed.at + 1).clamp(max=len(given) - 1)] = False  # the answers' tokens
        inputs = self.embed(packed.ids[None], packed.media, given[None])
        hidden = self.model(**inputs, position_ids=positions, use_cache=False).last_hidden_state[0]
        return log_probs_of(hidden[packed.at], self.lm_head.weight, packed.targets, temperature)

    def next_logits(self, inputs: Mapping[str, Any], positions: Tensor, cache: DynamicCache) -> Tensor:
        """Append L tokens to each of a cache's B sequences.

        Args:
            inputs: from `embed`, of the L tokens.
            positions: (3, B, L) int64.
            cache: it is extended.

        Returns:
            The logits (B, V) float32 of the token after the last one."""
        output = self.model(**inputs, position_ids=positions, past_key_values=cache, use_cache=True)
        logits: Tensor = self.lm_head(output.last_hidden_state[:, -1])
        return logits.float()

    def embed(self, ids: Tensor, media: Mapping[str, Tensor], given: Tensor) -> dict[str, Any]:
        """Return the language model's arguments for tokens, with images, videos and audio in their places.

        Args:
            ids: (B, L) int64.
            media: the prompts' inputs of the towers.
            given: (B, L) bool, false for tokens of answers, because a model may draw a placeholder."""
        embeds: Tensor = self.model.embed_tokens(ids)
        if "input_features" in media:
            sounds = self._audio_features(media["input_features"], media["audio_lengths"]).to(embeds)
            embeds = embeds.masked_scatter((given & (ids == self.config.audio_token_id))[..., None], sounds)
        seen = [
            (given & (ids == token), self._visual_features(media[pixels], media[grids]).to(embeds))
            for token, pixels, grids in (
                (self.config.image_token_id, "pixel_values", "image_grid_thw"),
                (self.config.video_token_id, "pixel_values_videos", "video_grid_thw"),
            )
            if pixels in media
        ]
        if not seen:
            return {"inputs_embeds": embeds}
        places = torch.stack([of for of, _ in seen]).any(0)
        joint = embeds.new_empty(int(places.sum()), seen[0][1].shape[-1])  # of images and videos, in the row's order
        for of, features in seen:
            joint[of[places]] = features
        first, *deep = joint.split(embeds.shape[-1], dim=-1)
        inputs: dict[str, Any] = {"inputs_embeds": embeds.masked_scatter(places[..., None], first)}
        return inputs | ({"visual_pos_masks": places, "deepstack_visual_embeds": deep} if deep else {})

    def _visual_features(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Return the features of images or of videos, one after the other, from the patches and the grid of each.

        Answers to one prompt repeat its files; the tower computes each once."""
        patches = grids.prod(1).tolist()
        first, places = _distinct(pixels.split(patches))
        alone = torch.cat([pixels.split(patches)[image] for image in first])
        merged = self.spatial_merge_size**2
        of_each = self.tower(alone, grids[first]).split([patches[image] // merged for image in first])
        return torch.cat([of_each[place] for place in places])

    def _audio_features(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Return the features of sounds, one after the other; the tower computes each sound once.

        Args:
            frames: (F, bins), the spectrograms of all.
            lengths: (N,) int64, the frames of each."""
        sounds = frames.split(lengths.tolist())
        first, places = _distinct(sounds)
        heard = torch.cat([sounds[sound] for sound in first]).T.to(self.audio_tower.dtype)
        features, tokens = self.hear(heard, lengths[first])
        of_each = features.split(tokens.tolist())
        return torch.cat([of_each[place] for place in places])

    def tower(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Return the tower's features (tokens, n H) of distinct images or videos.

        The first H replace the tokens' embeddings. Further ones, if any, are added behind as many of the first layers.
        """
        return joined(self.get_image_features(pixels, grids, return_dict=True).pooler_output)

    def hear(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tower's features (tokens, H) of distinct sounds, and the number of tokens (N,) of each.

        Args:
            frames: (bins, F).
            lengths: (N,) int64, as for `_audio_features`."""
        after_convolutions, tokens = self.audio_tower._get_feat_extract_output_lengths(lengths)
        found = self.audio_tower(frames, feature_lens=lengths, aftercnn_lens=after_convolutions)
        return found.last_hidden_state, tokens


class Thinker(DrawsTokens, Qwen2_5OmniThinkerForConditionalGeneration):
    """The thinker of Qwen2.5-Omni."""


def joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features of images as one tensor: transformers 5.14 joins them, 5.17 returns one for each image."""
    return features if isinstance(features, Tensor) else torch.cat(list(features))


def _distinct(images: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the numbers of the files that differ from all before, and the place among these of every file."""
    first: list[int] = []
    places: list[int] = []
    for number, image in enumerate(images):
        same = (place for place in reversed(range(len(first))) if _equal(images[first[place]], image))
        place = next(same, len(first))
        if place == len(first):
            first.append(number)
        places.append(place)
    return first, places


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
