"""Supports Qwen-Image: a text-to-image MMDiT with a Qwen2.5-VL text encoder and a 16-channel VAE. Importing this
package imports no torch."""

from omni_async.policy import PipelineFamily

FAMILY = PipelineFamily(
    name="qwen_image",
    policy="pipelines.qwen_image.policy:QwenImagePolicy",
    model_index_class="QwenImagePipeline",
    vllm_pipeline="pipelines.qwen_image.rollout.QwenImageRolloutPipeline",
    vllm_extension="omni_async.rollout.vllm_worker.RolloutWorkerExtension",
)
