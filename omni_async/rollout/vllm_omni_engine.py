"""Implements the production engine: vLLM-Omni in this process, with step-wise continuous batching or request batching.

vLLM-Omni owns the queue, the batches and a thread that runs them; this class translates requests and results, and
carries weights. An engine initialises torch.distributed and claims the process, so a process has one engine and no
trainer. The engine waits for the results stream of a request and for the answer of a worker call. vLLM-Omni runs worker
calls between two denoising steps; in request batching, between two batches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDict

from omni_async.aio.threads import in_daemon_thread
from omni_async.config.redact import one_line
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import PipelineFamily
from omni_async.plugins.hidden import hidden
from omni_async.rollout.base import EngineError, StagedVersion, Trajectory
from omni_async.rollout.payloads import Staged, take_in
from omni_async.rollout.stepping import check_request
from omni_async.types import SampleRequest, VersionSpans, WeightManifest, WeightReport

if TYPE_CHECKING:
    import numpy as np

# Read when vLLM and tqdm are imported. A user's own choice takes precedence. Without the event-driven loop two threads
# poll every millisecond, even while the engine idles.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_OMNI_EVENT_DRIVEN_ORCH": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
# Optional for vLLM, which tabulates profiles with one and resamples sound with the other.
_UNUSED = ("pandas", "scipy")
# Concurrent requests arrive one at a time. In request batching, a request that arrives after its batch has begun waits
# for all of it. So a batch begins when it is full, after a fifth of this time without a request, or after this time.
_GATHER_MS = 20.0


class VllmOmniEngine:
    """A `RolloutEngine` on vLLM-Omni.

    `dtype` is the engine's weight dtype by name; it may take `start_timeout_s` to start. `batching`: samples join and
    leave the batch at every denoising step, or are generated in whole batches. `attention_backend`, `compiled` and
    `engine_args` are the keys of `rollout`. `trains_here`: the caller differentiates through the results in this
    process; otherwise a store copies them."""

    def __init__(
        self,
        name: str,
        family: PipelineFamily,
        *,
        path: str,
        dtype: str,
        max_batch: int,
        batching: Literal["step", "request"] = "step",
        start_timeout_s: float = 600.0,
        rpc_timeout_s: float = 600.0,
        conditioning_bytes: int = 512 * 2**20,
        offload: bool = False,
        share_prefix: bool = False,
        attention_backend: str = "auto",
        compiled: Literal["auto", "on", "off"] = "auto",
        engine_args: Mapping[str, Any] | None = None,
        trains_here: bool = True,
    ) -> None:
        self.name = name
        self._family = family
        self._policy = load_policy(family, path)
        self._path = path
        self._dtype = dtype
        self._max_batch = max_batch
        self._stepwise = batching == "step"
        self._start_timeout_s = start_timeout_s
        self._rpc_timeout_s = rpc_timeout_s
        self._conditioning_bytes = conditioning_bytes
        self._offload = offload
        self._share_prefix = share_prefix
        self._attention_backend = attention_backend
        self._compiled = compiled
        self._engine_args = dict(engine_args or {})
        self._trains_here = trains_here
        self._omni: Any = None
        self._staged: StagedVersion[Staged] = StagedVersion(name)
        self._serial = 0

    async def start(self) -> WeightReport:
        """Start vLLM-Omni: tens of seconds, most of it imports, without blocking the event loop."""
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        self._omni = await in_daemon_thread(self._build)
        held = await self._call("begin", self._conditioning_bytes, self._offload, self._share_prefix)
        return WeightReport(engine=self.name, version=held["version"], digest=held["digest"], uses=held["uses"])

    def _build(self) -> Any:
        from transformers.utils.import_utils import is_scipy_available
        from transformers.utils.logging import disable_progress_bar

        # Only if transformers looked without SciPy as well (`roles.libraries`): else it imports SciPy here.
        with hidden(() if is_scipy_available() else _UNUSED):
            from vllm_omni import AsyncOmni
        from vllm_omni.diffusion.registry import register_diffusion_model

        from omni_async.rollout.vllm_worker import pass_through

        disable_progress_bar()
        module, _, name = str(self._family.vllm_pipeline).rpartition(".")
        # The architecture's own functions before and after a request take images, but requests and results here are
        # ours. vLLM-Omni looks for replacements by name, in the pipeline's module.
        register_diffusion_model(
            self._family.model_index_class,
            module,
            name,
            pre_process_func_name=pass_through.__name__,
            post_process_func_name=pass_through.__name__,
        )
        arguments = dict(
            model=self._path,
            dtype=self._dtype,
            enforce_eager=not self._is_compiled(),
            diffusion_attention_backend=self._chosen_attention(),
            num_gpus=1,
            worker_extension_cls=self._family.vllm_extension,
            step_execution=self._stepwise,
            request_batch_max_wait_ms=0.0 if self._stepwise else _GATHER_MS,
            max_num_seqs=self._max_batch,
            log_stats=False,
            init_timeout=math.ceil(self._start_timeout_s),
            stage_init_timeout=math.ceil(self._start_timeout_s),
            **self._engine_args,
        )
        try:
            return AsyncOmni(**arguments)
        except (TypeError, ValueError) as error:
            keys = "rollout.engine_args" if self._engine_args else "rollout.attention_backend"
            raise EngineError(
                f"{self.name}: vLLM-Omni refuses to start, see {keys}: {one_line(str(error), 500)}"
            ) from error

    def _is_compiled(self) -> bool:
        if self._compiled == "auto":
            return torch.accelerator.is_available()
        return self._compiled == "on"

    def _chosen_attention(self) -> str | None:
        """Return the name of the attention backend, None for the device's default."""
        if self._attention_backend != "auto":
            return self._attention_backend
        # A device's default is chosen by its capability and the size of a head, and flash kernels refuse float32.
        return "TORCH_SDPA" if self._dtype == "float32" else None

    async def generate(self, request: SampleRequest) -> Trajectory:
        from vllm_omni.errors import OmniClientError
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        from omni_async.rollout.vllm_worker import REQUEST_KEY, RESULT_KEY

        check_request(request)
        self._policy.latent_shape(request.spec)
        omni = self._require_open()
        parameters = OmniDiffusionSamplingParams(
            # Request batching combines only requests with equal values here; the worker does not require that.
            num_inference_steps=request.num_inference_steps if self._stepwise else None,
            extra_args={REQUEST_KEY: request},
        )
        self._serial += 1
        output: Any = None
        try:
            # The prompt itself is in the request; vLLM-Omni only requires some prompt.
            stream = omni.generate(
                {"prompt": request.prompt.text},
                sampling_params_list=[parameters],
                request_id=f"{request.sample_id}.{self._serial}",
            )
            async for update in stream:
                output = update
        except OmniClientError as error:
            raise ValueError(str(error)) from error
        except Exception as error:
            raise EngineError(f"{self.name}: sample {request.sample_id}: {error}") from error
        result = None if output is None else output.multimodal_output.get("metadata", {}).get(RESULT_KEY)
        if result is None:
            raise EngineError(
                f"{self.name}: sample {request.sample_id}:"
                f" {getattr(output, 'error', None) or 'vLLM-Omni returned no result'}"
            )
        tensors = result["tensors"]
        if self._trains_here:
            # The worker makes inference-mode tensors, which a trainer could not differentiate through; copies are
            # ordinary tensors.
            tensors = {name: value.clone() for name, value in tensors.items()}
        versions = VersionSpans(tuple(result["versions"]))
        return Trajectory(
            TensorDict(tensors, batch_size=[]),
            result["media"],
            versions,
            encoded=result["encoded"],
            shared_steps=result["shared_steps"],
        )

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        return await take_in(self.name, self._staged, manifest, buckets)

    async def swap(self, version: int) -> WeightReport:
        staged = self._staged.take(version)
        answer = await self._call("swap_weights", staged)
        held = await self._call("held_weights")
        if (held["version"], held["digest"]) != (version, staged.manifest.digest):
            raise EngineError(f"{self.name}: swapped to version {version}, but the worker holds {held}")
        return WeightReport(self.name, held["version"], held["digest"], staged.staged_s, answer["swap_s"])

    async def close(self) -> None:
        omni, self._omni = self._omni, None
        if omni is not None:
            await in_daemon_thread(omni.shutdown)

    def _require_open(self) -> Any:
        if self._omni is None:
            raise EngineError(f"{self.name} is not running")
        return self._omni

    async def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the workers' answer to a call.

        vLLM-Omni does not raise for a failed call; its answer is a dictionary with the error."""
        try:
            answers = await self._require_open().collective_rpc(method, timeout=self._rpc_timeout_s, args=arguments)
        except Exception as error:
            raise EngineError(f"{self.name}: {method} failed: {error}") from error
        found = _flatten(answers)
        for a in found:
            if not isinstance(a, dict) or a.get("error") or a.get("todo") or a.get("supported") is False:
                raise EngineError(f"{self.name}: {method} failed: {a}")
        if len({(a.get("version"), a.get("digest")) for a in found}) != 1:
            raise EngineError(f"{self.name}: {method}: the workers disagree: {answers}")
        first: dict[str, Any] = found[0]
        return first


def _flatten(answers: Any) -> list[Any]:
    """Flatten answers, which vLLM-Omni nests by stage, replica and rank."""
    if isinstance(answers, list | tuple):
        return [leaf for answer in answers for leaf in _flatten(answer)]
    return [answers]
