"""Computes conditioning, latent shape and velocity of LTX-2, a video with its sound from a text.

All three follow diffusers' `LTX2Pipeline` with only classifier-free guidance. Its defaults add spatio-temporal
guidance, modality guidance and rescaling in three more predictions a step, which are not implemented here.

Latents are (Tv + Ta, 128): the tokens of the video, frame by frame, then the tokens of the sound. One schedule, for the
video's length, and one transition serve both, so one log-probability covers both; `modalities` returns the rows of
each. The transformer computes the two together and takes 1000 sigma for each.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_async.diffusion.sde.schedules import scheduler_sigmas
from omni_async.media import Media
from omni_async_pipelines.ltx_2.sampling import MEL_RATE, VOCODER_RATE, LTX2Sampling
from omni_async_pipelines.parts import DiffusersCodec, DiffusersPolicy, stack_pixels, to_uint8
from omni_async_pipelines.sampling import read_config

# Defaults of diffusers' pipeline for keys that the checkpoint's scheduler lacks.
_SHIFT = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
# The window and the floor of the audio VAE's training spectrograms.
_WINDOW, _LEAST = 1024, 1e-5


class LTX2Codec(DiffusersCodec):
    """A `Codec` for LTX-2: Gemma3 and its connectors, a VAE for each modality, and a vocoder."""

    decoders = ("audio_vae", "vocoder")

    def __init__(self, *, tokenizer: Any, text_encoder: Any, connectors: Any, audio_vae: Any, vocoder: Any, vae: Any):
        super().__init__(
            vae=vae, text_encoder=text_encoder, connectors=connectors, audio_vae=audio_vae, vocoder=vocoder
        )
        self.tokenizer, self.text_encoder, self.connectors = tokenizer, text_encoder, connectors
        self.audio_vae, self.vocoder = audio_vae, vocoder

    def encode_text(self, text: str, spec: LTX2Sampling) -> dict[str, Tensor]:
        """Return video and sound embeddings, (max_sequence_length, E) each. Learned registers follow the text."""
        tokens = self.tokenizer(
            [text.strip()],
            padding="max_length",
            padding_side="left",
            max_length=spec.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        # The decoder alone: the language-model head would only compute unused logits.
        states = self.text_encoder.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states
        embeds, audio_embeds, _ = self.connectors(
            torch.stack(states, dim=-1), tokens.attention_mask, padding_side="left"
        )
        return {"embeds": embeds[0], "audio_embeds": audio_embeds[0]}

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: LTX2Sampling) -> list[Media]:
        video, audio = latents.to(self.vae.device).split(spec.lengths, dim=1)
        maps = video.unflatten(1, spec.grid).movedim(-1, 1)
        mean, std = self._statistics(maps)
        batches = (maps * std + mean).to(self.vae.dtype).split(self.most_at_once(spec))
        videos = torch.cat([to_uint8(self.vae.decode(batch, return_dict=False)[0]) for batch in batches])
        mel = (audio * self.audio_vae.latents_std + self.audio_vae.latents_mean).to(self.audio_vae.dtype)
        mel = mel.unflatten(2, (self.audio_vae.config.latent_channels, -1)).transpose(1, 2)
        sounds = self.vocoder(self.audio_vae.decode(mel, return_dict=False)[0]).float().clamp(-1, 1).cpu()
        return [
            Media(video=frames.contiguous(), fps=spec.fps, audio=sound.clone(), sample_rate=VOCODER_RATE)
            for frames, sound in zip(videos.transpose(1, 2), sounds, strict=True)
        ]

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: LTX2Sampling) -> Tensor:
        videos = stack_pixels(media, spec).transpose(1, 2).to(self.vae.device, self.vae.dtype)
        maps = self.vae.encode(videos).latent_dist.mode().float()
        mean, std = self._statistics(maps)
        sounds = torch.stack([torch.as_tensor(one.audio) for one in media]).to(self.vae.device)
        spectrograms = _log_mel(sounds, self.audio_vae.config).to(self.audio_vae.dtype)
        audio = self.audio_vae.encode(spectrograms).latent_dist.mode().float().transpose(1, 2).flatten(2)
        audio = (audio - self.audio_vae.latents_mean) / self.audio_vae.latents_std
        return torch.cat([((maps - mean) / std).movedim(1, -1).flatten(1, 3), audio], dim=1)

    def _statistics(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the video's latents (B, C, F, h, w), per channel."""
        vae = self.vae
        mean, std = (value.view(1, -1, 1, 1, 1).to(maps) for value in (vae.latents_mean, vae.latents_std))
        return mean, std / vae.config.scaling_factor


def _log_mel(sounds: Tensor, config: Any) -> Tensor:
    """Convert sounds (B, channels, n) in [-1, 1] to the audio VAE's input, (B, channels, frames, mel bins)."""
    from transformers.audio_utils import mel_filter_bank

    num, rate = sounds.shape[-1] * config.sample_rate // VOCODER_RATE, config.sample_rate
    spectrum = torch.fft.rfft(sounds.double())[..., : num // 2 + 1]  # frequencies above the lower rate are dropped
    lower = torch.fft.irfft(spectrum, n=num) * (rate / VOCODER_RATE)
    window = torch.hann_window(_WINDOW, dtype=lower.dtype, device=lower.device)
    found = torch.stft(
        lower.flatten(0, 1), _WINDOW, config.mel_hop_length, window=window, pad_mode="reflect", return_complex=True
    )
    bank = mel_filter_bank(_WINDOW // 2 + 1, config.mel_bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    mel = found.abs().transpose(1, 2) @ torch.as_tensor(bank).to(lower)
    frames = num * MEL_RATE // rate
    return mel.clamp_min(_LEAST).log().unflatten(0, sounds.shape[:2])[:, :, :frames].float()


class LTX2Policy(DiffusersPolicy):
    """The `omni_async.diffusion.policy.Policy` of LTX-2.

    Conditioning: `embeds` and `audio_embeds` (max_sequence_length, E) of the prompt and the negative one. Nothing is
    masked, because registers replace the padding."""

    denoiser = "LTX2VideoTransformer3DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Gemma3ForConditionalGeneration",
        "connectors": "diffusers.pipelines.ltx2.LTX2TextConnectors",
        "audio_vae": "diffusers.AutoencoderKLLTX2Audio",
        "vocoder": "diffusers.pipelines.ltx2.LTX2Vocoder",
        "vae": "diffusers.AutoencoderKLLTX2Video",
    }
    codec = LTX2Codec
    text_rules: ClassVar = {"embeds": "same", "audio_embeds": "same"}

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer, connectors = read_config(path, "transformer"), read_config(path, "connectors")
        self.channels = int(transformer["in_channels"])
        if transformer["audio_in_channels"] != self.channels:
            found = transformer["audio_in_channels"]
            raise ValueError(
                f"model.path: {path}: tokens of video and sound differ, {self.channels} and {found} channels"
            )
        self.text_widths = [
            int(
                connectors[f"{part}_connector_num_attention_heads"] * connectors[f"{part}_connector_attention_head_dim"]
            )
            for part in ("video", "audio")
        ]
        self.scheduler_config = _SHIFT | read_config(path, "scheduler", "scheduler_config.json")

    def modalities(self, spec: LTX2Sampling) -> dict[str, slice]:
        video, _ = spec.lengths
        return {"video": slice(0, video), "audio": slice(video, None)}

    def latent_shape(self, spec: LTX2Sampling) -> tuple[int, ...]:
        return sum(spec.lengths), self.channels

    def sigmas(self, num_inference_steps: int, spec: LTX2Sampling) -> Tensor:
        return scheduler_sigmas(num_inference_steps, spec.lengths[0], self.scheduler_config)

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor], spec: LTX2Sampling) -> dict[str, Any]:
        video, audio = latents.split(spec.lengths, dim=1)
        frames, rows, columns = spec.grid
        return {
            "hidden_states": video,
            "audio_hidden_states": audio,
            "encoder_hidden_states": text["embeds"],
            "audio_encoder_hidden_states": text["audio_embeds"],
            "timestep": sigma * 1000,
            "sigma": sigma * 1000,
            "num_frames": frames,
            "height": rows,
            "width": columns,
            "fps": spec.fps,
            "audio_num_frames": spec.audio_frames,
        }

    def call(self, denoiser: nn.Module, **inputs: Any) -> Any:
        """Run the denoiser and return its two outputs as the tokens of one."""
        return (torch.cat(denoiser(**inputs), dim=1),)

    def scale(self, spec: LTX2Sampling, component: str) -> float:
        return max(spec.scales)

    def combine(self, cond: Tensor, uncond: Tensor, scale: float, spec: LTX2Sampling) -> Tensor:
        """Apply classifier-free guidance to video and sound, each with its own scale."""
        of_rows = [torch.full((n, 1), own) for n, own in zip(spec.lengths, spec.scales, strict=True)]
        return uncond + torch.cat(of_rows).to(cond.device) * (cond - uncond)

    def blank_text(self, spec: LTX2Sampling) -> dict[str, Tensor]:
        length = spec.max_sequence_length
        return {name: torch.zeros(length, n) for name, n in zip(self.text_rules, self.text_widths, strict=True)}
