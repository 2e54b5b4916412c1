"""Builds what the built-in scorers load, small and random, and scores media with a scorer that a recipe names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_async.config import reward as sections
from omni_async.media import Media
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt, Score
from tests.support import tiny_clip
from tests.support.images import score_all
from tests.support.tiny_clip import SIDE
from tests.support.tiny_judge import CHAT_TEMPLATE

RATE, WIDTH = 16000, 16  # of sounds, and of most models
LABELS = {0: "cat", 1: "dog", 2: "bench"}
QUESTION = "rate it: {text_prompt} and <|Reward|> it\n"
_SIZES = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass
class Tiny:
    """The parameters of a scorer, and the model and the predictor in the files that they name."""

    params: dict[str, str]
    model: Any
    head: Any = None
    mark: int = 0  # HPSv3's special token

    def __post_init__(self) -> None:
        self.folder = Path(self.params["path"])


def config(name: str, **params: Any) -> sections.Scorer:
    return sections.Scorer(name=name, params=params)


def scored(name: str, media: list[Media], prompts: list[Prompt], *, gpus: float = 0.0, **params: Any) -> list[Score]:
    reward = sections.Reward(scorers=(config(name, **params),))
    return score_all(LoadedReward.load(reward, gpus), media, prompts[: len(media)])


def film(frames: np.ndarray) -> Media:
    """Makes a video of frames (frame, height, width, 3)."""
    return Media(video=np.ascontiguousarray(frames.transpose(0, 3, 1, 2)), fps=8)


def _spread(*modules: torch.nn.Module, std: float, least: int = 0) -> None:
    """Draws weights larger than they begin, so that the inputs matter."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.ndim > least:
                torch.nn.init.normal_(parameter, std=std)


def _clip(folder: Path) -> Tiny:
    from transformers import CLIPModel

    tiny_clip.build(folder)
    return Tiny({"path": str(folder)}, CLIPModel.from_pretrained(folder).eval())


def _aesthetic(folder: Path) -> Tiny:
    tiny = _clip(folder)
    head, tiny.head = head_of(folder, 12, 8, 4, 1)
    tiny.params["head"] = str(head)
    return tiny


def head_of(folder: Path, *widths: int) -> tuple[Path, list[tuple[np.ndarray, np.ndarray]]]:
    """Writes a predictor as the published one is: layers with dropout between them, which has no weights."""
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(after, before)), rng.normal(size=after)) for before, after in pairwise(widths)]
    names = [f"layers.{2 * i}." for i in range(len(layers))] if len(layers) > 1 else [""]
    tensors = {
        f"{name}{part}": torch.tensor(value)
        for name, layer in zip(names, layers, strict=True)
        for part, value in zip(("weight", "bias"), layer, strict=True)
    }
    torch.save(tensors, folder / "head.pth")
    return folder / "head.pth", layers


def _image_reward(folder: Path) -> Tiny:
    from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "the", "digit"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    settings = BlipConfig(
        text_config={**_SIZES, "vocab_size": 12, "encoder_hidden_size": WIDTH, "max_position_embeddings": 64},
        vision_config={**_SIZES, "image_size": SIDE, "patch_size": 8},
        image_text_hidden_size=8,
    )
    model = BlipForImageTextRetrieval(settings).eval()
    _spread(model, std=0.3, least=-1)
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise((WIDTH, 8, 6, 4, 3, 1))))
    weights = _published_blip(model)
    for number, layer in zip((0, 2, 4, 6, 7), head, strict=True):  # between the first ones are training's dropouts
        weights |= {f"mlp.layers.{number}.{name}": one.data for name, one in layer.named_parameters()}
    settings.vision_config.image_size = 384  # of the folder that the configuration is from
    settings.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(weights, folder / "ImageReward.pt")
    return Tiny({"path": str(folder), "weights": str(folder / "ImageReward.pt")}, model, head.double())


def _published_blip(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights under the names of the authors' file."""
    own, vision = model.state_dict(), model.vision_model.state_dict()
    found = {f"blip.text_encoder.{name}": one for name, one in model.text_encoder.state_dict().items()}
    found["blip.text_encoder.embeddings.position_ids"] = torch.arange(4)[None]
    found["blip.visual_encoder.cls_token"] = vision["embeddings.class_embedding"]
    found["blip.visual_encoder.pos_embed"] = vision["embeddings.position_embedding"]
    block = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv"}
    block |= {"attn.proj": "self_attn.projection", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for part in ("weight", "bias"):
        found[f"blip.visual_encoder.patch_embed.proj.{part}"] = vision[f"embeddings.patch_embedding.{part}"]
        found[f"blip.visual_encoder.norm.{part}"] = vision[f"post_layernorm.{part}"]
        found[f"blip.vision_proj.{part}"] = own[f"vision_proj.{part}"]
        for i in range(2):
            for theirs, ours in block.items():
                name = f"encoder.layers.{i}.{ours}.{part}"
                found[f"blip.visual_encoder.blocks.{i}.{theirs}.{part}"] = vision[name]
    return found


def _hps_v3(folder: Path, *, older: bool) -> Tiny:
    """`older`: with the names of weights that the published file has."""
    from omni_async_pipelines.tiny import qwen2_tokenizer
    from safetensors.torch import save_file
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil

    tokenizer = qwen2_tokenizer(("a photo of a red circle", "rate it: a and it") * 20, 400)
    tokenizer.chat_template = CHAT_TEMPLATE
    texts = {"image_token": "image_pad", "video_token": "video_pad"}
    texts |= {"vision_start_token": "vision_start", "vision_end_token": "vision_end"}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(f"<|{text}|>") for name, text in texts.items()}
    mark = len(tokenizer)  # of the token that the training added
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"intermediate_size": 64, "vocab_size": mark + 1, "rope_parameters": rope}
    text |= {"bos_token_id": 0, "eos_token_id": 0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    settings = Qwen2VLConfig(**ids, tie_word_embeddings=False, text_config=text, vision_config=vision)
    model = Qwen2VLForConditionalGeneration(settings).eval()
    linear, relu, dropout = torch.nn.Linear, torch.nn.ReLU, torch.nn.Dropout
    head = torch.nn.Sequential(linear(32, 8), relu(), dropout(), linear(8, 4), relu(), linear(4, 2)).eval()
    _spread(model, head, std=0.4, least=-1)
    model.get_input_embeddings().weight.data[mark] /= 10  # so that it shows what it attends to
    weights = {f"rm_head.{name}": one for name, one in head.state_dict().items()}
    for name, one in model.state_dict().items():
        saved = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        weights[saved if older else name] = one.contiguous()
    settings.text_config.vocab_size = 600  # of the model that the training began with
    for part in (settings, tokenizer, Qwen2VLImageProcessorPil()):
        part.save_pretrained(folder)
    save_file(weights, folder / "HPSv3.safetensors")
    (folder / "question.txt").write_text(QUESTION)
    files = {"weights": str(folder / "HPSv3.safetensors"), "question": str(folder / "question.txt")}
    return Tiny({"path": str(folder), **files, "dtype": "float32"}, model, head, mark)


def _clap(folder: Path, *, fusion: bool) -> Tiny:
    pytest.importorskip("av", reason="the scorer resamples with it; a bare GPU machine may lack it")
    from omni_async_pipelines.tiny import t5_tokenizer
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

    tokenizer = t5_tokenizer()
    marks = {"vocab_size": len(tokenizer) + 4, "max_position_embeddings": 80, "pad_token_id": tokenizer.pad_token_id}
    audio = {"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "hidden_size": 32, "patch_embeds_hidden_size": 16}
    audio |= {"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2, "num_classes": 4}
    audio |= {"enable_fusion": True, "fusion_type": "aff_2d"} if fusion else {}
    model = ClapModel(ClapConfig(text_config={**_SIZES, **marks}, audio_config=audio, projection_dim=12)).eval()
    _spread(model, std=0.3, least=1)
    sizes = {"feature_size": 16, "hop_length": 160, "fft_window_size": 256, "frequency_max": 8000, "max_length_s": 1}
    extractor = ClapFeatureExtractor(**sizes, sampling_rate=RATE, truncation="fusion" if fusion else "rand_trunc")
    for part in (model, tokenizer, extractor):
        part.save_pretrained(folder)
    return Tiny({"path": str(folder)}, model)


def _video_audio(folder: Path) -> Tiny:
    pytest.importorskip("av", reason="the scorer resamples with it; a bare GPU machine may lack it")
    from transformers import PeAudioFeatureExtractor, PeAudioVideoConfig, PeAudioVideoModel, PeVideoVideoProcessor

    heads = {**_SIZES, "num_hidden_layers": 1, "head_dim": 8}
    vit = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "ref_feat_shape": (4, 4)}
    dac = {"downsampling_ratios": [4, 8], "encoder_hidden_size": 8, "codebook_dim": 8}
    seen = {**heads, "vision_config": {"num_classes": 12, "model_args": vit}}
    settings = PeAudioVideoConfig(
        text_config={**_SIZES, "vocab_size": 40, "pad_token_id": 0},
        audio_video_config={**heads, "audio_config": {**heads, "dac_config": dac}, "video_config": seen},
    )
    model = PeAudioVideoModel(settings).eval()
    _spread(model, std=0.3, least=-1)
    steps = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    half, size = [0.5] * 3, {"height": SIDE, "width": SIDE}
    processor = PeVideoVideoProcessor(**steps, size=size, image_mean=half, image_std=half)
    for part in (model, PeAudioFeatureExtractor(sampling_rate=RATE, hop_length=32), processor):
        part.save_pretrained(folder)
    return Tiny({"path": str(folder)}, model)


def _object_checks(folder: Path) -> Tiny:
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    settings = YolosConfig(
        **_SIZES, image_size=[32, 48], patch_size=16, num_detection_tokens=12, id2label=LABELS, num_labels=3
    )
    model = YolosForObjectDetection(settings).eval()
    _spread(model, std=0.4, least=1)
    model.save_pretrained(folder)
    YolosImageProcessor(size={"height": 32, "width": 48}, do_pad=False).save_pretrained(folder)
    return Tiny({"path": str(folder)}, model)


BUILDERS: dict[str, Callable[[Path], Tiny]] = {
    **dict.fromkeys(("clip_score", "pick_score", "hps_v2", "frame_consistency"), _clip),
    "aesthetic": _aesthetic,
    "image_reward": _image_reward,
    "hps_v3": functools.partial(_hps_v3, older=True),
    "hps_v3 as saved now": functools.partial(_hps_v3, older=False),
    "clap": functools.partial(_clap, fusion=False),
    "fused clap": functools.partial(_clap, fusion=True),
    "video_audio": _video_audio,
    "object_checks": _object_checks,
}
MODELS = [name for name in BUILDERS if " " not in name]
