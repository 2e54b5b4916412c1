"""Prepares prompts for Qwen3-Omni's thinker, and computes tokens and their log-probs with it."""

from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy


class Qwen3OmniPolicy(QwenOmniPolicy):
    """The `omni_async.tokens.policy.TokenPolicy` of Qwen3-Omni."""

    thinker_class = "omni_async_pipelines.qwen3_omni.thinker:Thinker"
    processor_class = "transformers:Qwen3OmniMoeProcessor"
