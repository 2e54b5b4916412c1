"""Defines the keys of `rollout.sampling` for LTX-2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText, MediaShape, SamplingSpec
from omni_async_pipelines.sampling import other_layout, read_config, require_frames

SPATIAL, TEMPORAL = 32, 8  # pixels, and frames after the first, that become one latent of the video
# Mel frames a second, and how many become one latent of the sound. The vocoder turns mel frames into samples again.
MEL_RATE, MEL_TEMPORAL, VOCODER_RATE, CHANNELS = 100, 4, 24_000, 2
# The configuration of a checkpoint's parts that these numbers require, by folder and key.
_LAYOUT: tuple[tuple[str, str, Any], ...] = (
    ("vae", "spatial_compression_ratio", SPATIAL),
    ("vae", "temporal_compression_ratio", TEMPORAL),
    ("vae", "timestep_conditioning", False),
    ("transformer", "patch_size", 1),
    ("transformer", "patch_size_t", 1),
    ("audio_vae", "sample_rate", 16_000),
    ("audio_vae", "mel_hop_length", 16_000 // MEL_RATE),
    ("audio_vae", "is_causal", True),
    ("vocoder", "_class_name", "LTX2Vocoder"),
    ("vocoder", "out_channels", CHANNELS),
    ("vocoder", "output_sampling_rate", VOCODER_RATE),
)


class LTX2Sampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[int, doc("Video height in pixels.", ge=64, most=16_384, multiple_of=32)] = 512
    width: Annotated[int, doc("Video width in pixels.", ge=64, most=16_384, multiple_of=32)] = 768
    num_frames: Annotated[int, doc("Frames of a video: 8k + 1. The sound is as long.", ge=9, most=10_000)] = 121
    fps: Annotated[float, doc("Frames per second, an input of the model.", gt=0, most=1000)] = 24.0
    guidance_scale: Annotated[
        float, doc("Classifier-free guidance of the video; 1 switches it off.", ge=1, most=1000)
    ] = 1.0
    audio_guidance_scale: Annotated[float, doc("That of the sound; null: the same.", ge=1, most=1000)] | None = None
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt where there is guidance.")] = ""
    max_sequence_length: Annotated[int, doc("Gemma3 tokens of a prompt; longer ones are cut.", ge=1, le=1024)] = 1024

    def __post_init__(self) -> None:
        require_frames(self.num_frames, TEMPORAL)
        if self.audio_frames < 2:
            raise ValueError(f"fps: {self.num_frames} frames at {self.fps:g} a second are too short for their sound")

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        length = self.max_sequence_length
        return (EncodedText(tokenizer="tokenizer", cls="AutoTokenizer", text=text.strip(), most=length),)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a part of another size than LTX-2's, and a prompt length that the text connectors do not divide."""
        if other := other_layout(checkpoint, _LAYOUT):
            return f"num_frames: no sizes are known of a checkpoint whose {other}"
        registers = read_config(checkpoint, "connectors").get("video_connector_num_learnable_registers", 128)
        if not registers or self.max_sequence_length % registers:
            return (
                f"max_sequence_length: this checkpoint takes multiples of {registers}, got {self.max_sequence_length}"
            )
        return None

    @property
    def guided(self) -> bool:
        return max(self.scales) > 1

    @property
    def scales(self) -> tuple[float, float]:
        """The guidance of video and sound."""
        audio = self.audio_guidance_scale
        return self.guidance_scale, self.guidance_scale if audio is None else audio

    @property
    def grid(self) -> tuple[int, int, int]:
        """The frames, rows and columns of the video's latents."""
        return (self.num_frames - 1) // TEMPORAL + 1, self.height // SPATIAL, self.width // SPATIAL

    @property
    def audio_frames(self) -> int:
        """The number of the sound's latents, rounded exactly as in diffusers' pipeline."""
        return round(self.num_frames / self.fps * (MEL_RATE / MEL_TEMPORAL))

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens of video and sound, which are a sample's latents in this order."""
        return math.prod(self.grid), self.audio_frames

    def media(self) -> tuple[MediaShape, ...]:
        mel_frames = (
            MEL_TEMPORAL * (self.audio_frames - 1) + 1
        )  # the first latent is of one frame, because the VAE is causal
        return (
            MediaShape("video", (self.num_frames, 3, self.height, self.width), self.fps),
            MediaShape("audio", (CHANNELS, mel_frames * VOCODER_RATE // MEL_RATE), VOCODER_RATE),
        )
