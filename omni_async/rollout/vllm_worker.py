"""Implements the worker's half of the vLLM-Omni engine, for any family.

It records trajectories, takes SDE steps, and swaps weights.

A family's rollout pipeline is `class P(RolloutPipelineMixin, ItsVllmOmniPipeline)` with `warm_up` and `policy_class`.
vLLM-Omni mixes requests of different prompts and at different steps in one batch. `denoise_step` computes the velocity
of the batch with the policy on the native denoisers, takes every sample's transition, and decodes samples that finish
together. Per-request hooks that follow only pass rows on, because a Python call per request and step would cost more
than a small model's forward.

This is step-wise batching. In request batching vLLM-Omni passes a batch once, and `forward` takes all its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.errors import OmniClientError

from omni_async.diffusion.components import compute_velocity, named_parameters
from omni_async.diffusion.policy import Codec, Policy, modalities_of
from omni_async.plugins.families import SamplingSpec
from omni_async.rollout import vllm_cpu_rope
from omni_async.rollout.base_weights import BaseWeights
from omni_async.rollout.payloads import Staged
from omni_async.rollout.prefixes import Prefixes
from omni_async.rollout.stepping import ConditioningCache, InFlight, take_steps
from omni_async.rollout.upload import Upload
from omni_async.rollout.vllm_kernels import kernels_of
from omni_async.types import Prompt, SampleRequest, VersionSpans

REQUEST_KEY = "omni_async_request"
RESULT_KEY = "omni_async"
_SAMPLE = "omni_async_sample"
_CONDITIONING = "omni_async_conditioning"
_ENCODED = "omni_async_encoded"
_MEDIA = "omni_async_media"
_PROBES = 4


def pass_through(od_config: Any) -> Callable[..., Any]:
    """Return a function for vLLM-Omni that returns a request, or a result, unchanged.

    A family's rollout module must have it under this name."""
    return lambda value, **_: value


class RolloutPipelineMixin:
    """Runs `SampleRequest`s step by step with the policy's own velocity on vLLM-Omni's denoisers.

    Latents are float32 whatever the model's dtype; only the transformer's input is cast. The sample holds them:
    vLLM-Omni's batch contains one number per request, and so no shapes and no guidance."""

    supports_step_execution = True
    supports_request_batch = True

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self.weight_version = 0
        self.weight_digest = ""
        self.policy = type(self).policy_class(od_config.model)
        self.conditioning = ConditioningCache(self.make_codec())
        self.codec = self.conditioning.codec
        self.prefixes = Prefixes(shared=False)
        self._stacked: dict[SamplingSpec, tuple[list[InFlight], TensorDict]] = {}
        modules = [part for component in self.components.values() for part in component.modules()]
        if self.model_device.type == "cpu":
            vllm_cpu_rope.specialise(modules)
        for module in modules:
            if isinstance(module, LinearBase):
                # On a CPU vLLM repacks a weight after its first load and frees the original, so no second load could
                # follow. The switch is vLLM's own, not declared by the class.
                setattr(module, "skip_weight_relayout", True)  # noqa: B010

    @property
    def components(self) -> dict[str, torch.nn.Module]:
        """Return vLLM-Omni's denoisers by component, which is also the name of their attribute."""
        return {name: getattr(self, name) for name in self.policy.components}

    # ---- defined by a family -----------------------------------------------------------------------------------------

    warm_up: SamplingSpec  # of vLLM-Omni's own first request
    policy_class: Callable[[str], Policy]  # the family's, whose velocity takes vLLM-Omni's denoisers

    def make_codec(self) -> Codec:
        """Make the family's codec from this pipeline's own text encoders and VAE: `policy.codec` of its `parts`."""
        policy: Any = self.policy
        codec: Codec = policy.codec(**{name: getattr(self, name) for name in policy.parts})
        return codec

    def encode_warm_up(self, request: SampleRequest) -> TensorDict:
        """Return the conditioning of vLLM-Omni's own first request, which has no image; a family may override it."""
        return self.conditioning.of(request)[0]

    # ---- vLLM-Omni's step-wise protocol ------------------------------------------------------------------------------

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        given = (state.sampling.extra_args or {}).get(REQUEST_KEY)
        request = given or self._warm_up_request(state)
        sigmas = self.policy.sigmas(request.num_inference_steps, request.spec)
        shape = self.policy.latent_shape(request.spec)
        try:
            conditioning, encoded = self.conditioning.of(request) if given else (self.encode_warm_up(request), False)
        except ValueError as error:
            # vLLM-Omni attributes only this kind of error to the request and not to the engine.
            raise OmniClientError(str(error)) from error
        sample = InFlight(request, sigmas, shape, self.model_device, modalities_of(self.policy, request.spec))
        self.prefixes.join(sample)
        state.extra[_SAMPLE] = sample
        state.extra[_CONDITIONING], state.extra[_ENCODED] = conditioning, encoded
        state.latents = torch.zeros(1, 1, device=self.model_device)
        state.timesteps = (sigmas[:-1] * 1000.0).to(self.model_device)
        state.step_index = sample.step  # later than 0 if other samples took the first steps
        return state

    def denoise_step(self, input_batch: Any, *, states: Any, **kwargs: Any) -> torch.Tensor:
        """Move every sample one step, samples of one spec in one batch.

        The returned tensor is a placeholder, because the batch contains nothing."""
        self.conditioning.release()
        by_spec: dict[SamplingSpec, list[Any]] = {}
        for state in states:
            by_spec.setdefault(state.extra[_SAMPLE].request.spec, []).append(state)
        for spec, same in by_spec.items():
            samples: list[InFlight] = [state.extra[_SAMPLE] for state in same]
            rows = self.prefixes.rows(samples)
            taken = [samples[row[0]] for row in rows]
            velocity = compute_velocity(
                self.policy,
                self.components,
                torch.stack([sample.latents for sample in taken]),
                torch.tensor([sample.sigma for sample in taken], device=self.model_device),
                self._stack(spec, [same[row[0]] for row in rows]),
                spec,
                [self.policy.component_of(sample.sigma) for sample in taken],
            )
            take_steps(taken, velocity.float(), self.weight_version)
            self.prefixes.spread(samples, rows)
            self._decode([state for state in same if state.extra[_SAMPLE].done], spec)
        return torch.zeros(len(states), 1, device=self.model_device)

    def _stack(self, spec: SamplingSpec, states: list[Any]) -> TensorDict:
        """Stack the conditioning of a batch.

        Returns the stack of the spec's last batch if that had the same samples, as in most steps."""
        samples = [state.extra[_SAMPLE] for state in states]
        before, stacked = self._stacked.get(spec, ([], None))
        if stacked is None or samples != before:
            stacked = self.policy.stack_conditioning([state.extra[_CONDITIONING] for state in states])
        self._stacked[spec] = samples, stacked
        if any(sample.step == sample.request.num_inference_steps - 1 for sample in samples):
            del self._stacked[spec]  # the next batch, if any, has other samples
        return stacked

    def step_scheduler(self, state: Any, noise_pred: torch.Tensor, **kwargs: Any) -> None:
        state.step_index += 1

    def post_decode(self, state: Any, **kwargs: Any) -> DiffusionOutput:
        sample: InFlight = state.extra[_SAMPLE]
        tensors = {name: value.cpu() for name, value in sample.tensors(state.extra[_CONDITIONING]).items()}
        versions = VersionSpans.of(sample.versions).spans
        result = {"tensors": tensors, "media": state.extra[_MEDIA], "versions": versions}
        result["encoded"], result["shared_steps"] = state.extra[_ENCODED], sample.shared_steps
        # vLLM-Omni turns the payload's image into a PIL one; it is never read, so it gets a single pixel.
        return DiffusionOutput(output={"payload": {"image": torch.zeros(1, 3, 1, 1)}, "metadata": {RESULT_KEY: result}})

    # ---- vLLM-Omni's request batching --------------------------------------------------------------------------------

    def forward(self, req: Any) -> list[DiffusionOutput]:
        """Generate the samples of a whole `DiffusionRequestBatch`, by the same steps as above.

        Returns one output per request, in order. Requests need not agree in spec or steps; a request that cannot be
        encoded fails alone."""
        outputs: dict[str, DiffusionOutput] = {}
        states: list[StepRequestState] = []
        for request in req.requests:
            state = StepRequestState(request_id=request.request_id, sampling=request.sampling_params)
            try:
                states.append(self.prepare_encode(state))
            except OmniClientError as error:
                outputs[request.request_id] = DiffusionOutput.from_exception(error)
        unfinished = states
        while unfinished:
            self.denoise_step(None, states=unfinished)
            unfinished = [state for state in unfinished if not state.extra[_SAMPLE].done]
        outputs |= {state.request_id: self.post_decode(state) for state in states}
        return [outputs[request.request_id] for request in req.requests]

    @cached_property
    def base_weights(self) -> BaseWeights:
        """Return the checkpoint's weights, whose files stay open from the first swap on."""
        return BaseWeights(Path(self.od_config.model), self.components)  # type: ignore[attr-defined]

    @cached_property
    def upload(self) -> Upload:
        """Return the uploader of new weights to the denoisers' device."""
        return Upload(self.model_device)

    @property
    def model_device(self) -> torch.device:
        return next(parameter.device for _, parameter in named_parameters(self.components))

    def _decode(self, states: list[Any], spec: SamplingSpec) -> None:
        """Decode finished samples of one spec in one batch."""
        if states:
            decoded = self.codec.decode(torch.stack([state.extra[_SAMPLE].latents for state in states]), spec)
            for state, media in zip(states, decoded, strict=True):
                state.extra[_MEDIA] = media

    def _warm_up_request(self, state: Any) -> SampleRequest:
        """Return a small request in place of vLLM-Omni's own, which names no sample of ours."""
        return SampleRequest(
            sample_id=state.request_id,
            kind="validation",
            group=0,
            sample=0,
            prompt=Prompt(index=0, text="warm-up"),
            seed=0,
            spec=self.warm_up,
            num_inference_steps=max(2, state.sampling.num_inference_steps),
            noise_level=0.0,
            sde_kind="flow",
            window=None,
        )


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """The remote calls of the engine.

    vLLM-Omni runs them between two denoising steps, or two batches in request batching, never inside one."""

    def swap_weights(self, staged: Staged) -> dict[str, Any]:
        """Load a version and return the version and digest that the pipeline has now.

        ValueError if names or shapes do not fit, before anything is written; RuntimeError if a parameter was left out
        of the load, or still has another value."""
        started = time.perf_counter()
        pipeline = self.model_runner.pipeline
        components: dict[str, torch.nn.Module] = pipeline.components
        wanted: set[str] = set()
        live = dict(named_parameters(components))
        # Some weights that vLLM-Omni keeps unchanged, not fused or sharded.
        probes = dict(staged.some(live, _PROBES))

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in staged.weights(pipeline.base_weights, live, pipeline.upload):
                wanted.add(name)
                if len(probes) < _PROBES and name in live and live[name].shape == weight.shape:
                    probes[name] = weight
                yield name, weight

        loaded = set(pipeline.load_weights(named()))
        if staged.manifest.payload == "full":
            wanted = {name for name, _ in named_parameters(components)}
        missing = sorted(name for name in wanted if not {name, _fused_name(name, components)} & loaded)
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(wanted)} parameters were not loaded, beginning with {missing[0]!r}"
            )
        for name, weight in probes.items():
            if not torch.equal(live[name].detach(), weight.to(live[name])):
                raise RuntimeError(f"{name!r} was loaded, and still has another value than what was pushed")
        pipeline.weight_version, pipeline.weight_digest = staged.manifest.version, staged.manifest.digest
        pipeline.prefixes.clear()
        return self.held_weights() | {"swap_s": time.perf_counter() - started}

    def begin(self, conditioning_bytes: int, offload: bool, share_prefix: bool) -> dict[str, Any]:
        """Bound the bytes of cached encoded prompts; offload the encoders, and share prefixes, if requested.

        Returns the kernels that the denoisers use as well as the version."""
        pipeline = self.model_runner.pipeline
        pipeline.conditioning.kept.most_bytes = conditioning_bytes
        pipeline.prefixes = Prefixes(share_prefix)
        if offload:
            pipeline.conditioning.offload(pipeline.model_device)
        uses = kernels_of(pipeline.components.values(), compiled=not pipeline.od_config.enforce_eager)
        return self.held_weights() | {"uses": uses}

    def held_weights(self) -> dict[str, Any]:
        pipeline = self.model_runner.pipeline
        return {"version": pipeline.weight_version, "digest": pipeline.weight_digest}


def _fused_name(name: str, components: Mapping[str, torch.nn.Module]) -> str:
    """Return the name of the fused parameter that contains a weight in vLLM-Omni."""
    mapping: Any = getattr(components[name.partition(".")[0]], "stacked_params_mapping", ())
    return next((name.replace(shard, fused) for fused, shard, _ in mapping if shard in name), name)
