"""Refuses arguments of vLLM-Omni's and vLLM's engines that contradict the recipe, or that a run cannot use."""

from __future__ import annotations

from collections.abc import Iterator

from omni_async.config.schema import Config

# The arguments that `omni_async.rollout.vllm_omni_engine` sets, and the key that controls each.
SET_BY_THE_RUN = {
    "model": "model.path",
    "dtype": "model.dtype",
    "enforce_eager": "rollout.compile",
    "diffusion_attention_backend": "rollout.attention_backend",
    "diffusion_attention_config": "rollout.attention_backend",
    "max_num_seqs": "rollout.max_batch",
    "step_execution": "rollout.batching",
    "request_batch_max_wait_ms": "rollout.batching",
    "init_timeout": "run.startup_timeout_s",
    "stage_init_timeout": "run.startup_timeout_s",
    "log_stats": None,
    "num_gpus": "placement.rollout.gpus",
    "worker_extension_cls": None,
}
# The same of `omni_async.rollout.vllm_engine`.
SET_BY_THE_TOKEN_RUN: dict[str, str | None] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "enforce_eager": "rollout.compile",
    "max_num_seqs": "rollout.max_batch",
    "tensor_parallel_size": "placement.rollout.gpus",
    "mm_processor_cache_gb": "rollout.conditioning_cache",
    **dict.fromkeys(("worker_extension_cls", "logprobs_mode", "generation_config", "async_scheduling")),
    **dict.fromkeys(("limit_mm_per_prompt", "disable_log_stats", "speculative_config", "load_format")),
    "stream_interval": None,
}
# A version is loaded into the weights under their checkpoint names and in their dtype, in the engine's process or, for
# vLLM, in workers on its machine. Other workers, and weights that are kept elsewhere or in another form, would not get
# it.
_LOADED_ELSEWHERE = {
    *("parallel_config", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("sequence_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree", "cfg_parallel_size"),
    *("vae_patch_parallel_size", "text_encoder_tp_size", "enable_expert_parallel", "use_hsdp"),
    *("distributed_executor_backend", "enable_sleep_mode", "custom_pipeline_args", "diffusion_load_format"),
    *("lora_path", "quantization", "quantization_config", "enable_cpu_offload", "enable_layerwise_offload"),
    *("cpu_offload_gb", "kv_transfer_config"),
    *("enable_distributed_layerwise_offload", "diffusion_offload_config", "host_weight_runtime_mode"),
}

# Each contains further arguments, or names a file of arguments, which would not be checked.
_HOLD_OTHERS = {"stage_overrides", "deploy_config", "strategy_config", "stage_configs_path", "model_class_name"}
# They skip or approximate computation that the trainer repeats exactly.
_APPROXIMATE = {"cache_backend", "cache_config", "diffusion_kv_cache_dtype", "fastvideo_vsa_topk", "kv_cache_dtype"}
_APPROXIMATE_ATTENTION = {"SAGE_ATTN", "SAGE_ATTN_3", "FASTVIDEO_VSA", "RAINFUSION_ATTN"}
_NOT_THE_POLICY = "it approximates the model, so samples would not be the trained policy's"


def engine_problems(c: Config) -> Iterator[str]:
    """Yield error texts for `rollout.engine_args`, `attention_backend` and `compile`."""
    rollout = c.rollout
    set_by_the_run = SET_BY_THE_TOKEN_RUN if rollout.engine == "vllm" else SET_BY_THE_RUN
    workers = "workers of one machine" if rollout.engine == "vllm" else "one worker in the engine's own process"
    for name in rollout.engine_args:
        key = f"rollout.engine_args.{name}"
        if name in set_by_the_run:
            decided = set_by_the_run[name]
            yield f"{key}: the run sets it; " + (f"use {decided}" if decided else "leave it out")
        elif name in _LOADED_ELSEWHERE:
            yield (
                f"{key}: new weights are loaded in place, into {workers}, which this argument would change; leave it"
                " out, and use more rollout.workers"
            )
        elif name in _HOLD_OTHERS:
            yield f"{key}: it sets other arguments, which cannot be checked there; name them in rollout.engine_args"
        elif name in _APPROXIMATE:
            yield f"{key}: {_NOT_THE_POLICY}; leave it out"
    if rollout.attention_backend in _APPROXIMATE_ATTENTION:
        yield f"rollout.attention_backend: {rollout.attention_backend}: {_NOT_THE_POLICY}; use auto or an exact one"
    if rollout.engine == "vllm_omni" or c.emulation is not None:
        return
    for name, value in (
        ("engine_args", rollout.engine_args and rollout.engine != "vllm"),
        ("attention_backend", rollout.attention_backend != "auto"),
        ("compile", rollout.compile == "on" and rollout.engine != "vllm"),
    ):
        if value:
            yield f"rollout.{name}: expected rollout.engine vllm_omni, got {rollout.engine}; leave it out"
