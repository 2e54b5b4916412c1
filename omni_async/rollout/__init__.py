"""Draws samples: rollout engines behind one Protocol, `base.RolloutEngine`.

`factory.build_engine` builds the one that `rollout.engine` names: `vllm_omni` (production), `diffusers` (reference) or
`emulated` (no model). An engine keeps one version of the policy and swaps it at the boundary it is told; it returns a
`Trajectory` or raises an `EngineError`. A family runs on vLLM-Omni by `vllm_worker.RolloutPipelineMixin`.
"""
