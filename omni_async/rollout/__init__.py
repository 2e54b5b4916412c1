"""Generates samples: rollout engines behind one Protocol, `base.RolloutEngine`.

`factory.build_engine` builds the engine named by `rollout.engine`: `vllm_omni` (production), `diffusers` (reference),
`transformers` (tokens) or `emulated` (no model). An engine holds one version of the policy and swaps it at the
configured boundary; it returns a `Trajectory` or raises an `EngineError`. A family runs on vLLM-Omni with
`vllm_worker.RolloutPipelineMixin`.
"""
