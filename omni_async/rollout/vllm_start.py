"""Starts vLLM for the engine of tokens: its environment, its arguments, and its child processes."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any, Literal

import torch

from omni_async.compat import child_environment

# Read when vLLM and tqdm are imported. A user's own choice takes precedence. Several engines must not bind their
# threads to the same cores.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    # The configurations of real checkpoints cause a page of warnings, in each process.
    "TRANSFORMERS_VERBOSITY": "error",
}
# vLLM's second model runner keeps no counts of tokens, and the worker finds answers by the suffix of their names.
_REQUIRED = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0"}
ENGINE = "OMNI_ASYNC_VLLM_ENGINE"  # the number of the engine's process, for vLLM's processes alone
_ARGUMENTS = {
    "worker_extension_cls": "omni_async.rollout.vllm_token_worker.TokenWorkerExtension",
    "logprobs_mode": "processed_logprobs",  # of the distribution that a token was drawn from, at its temperature
    "generation_config": "vllm",  # none of the checkpoint's
    "async_scheduling": False,  # the worker's counts would contain tokens that it has not drawn yet
    "stream_interval": 1,  # a swap waits for the tokens before it
    "mm_processor_cache_gb": 0,  # the engine caches prompts with their images
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}
_CPU_CACHE_BYTES = 2**30  # of keys and values; without a number vLLM would take nearly all memory


def set_environment(start_timeout_s: float) -> None:
    """Set the variables of this process that vLLM reads, before it is imported."""
    chosen = {"VLLM_PLUGINS": ",".join(_plugins()), "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s))}
    for variable, value in (_ENVIRONMENT | chosen).items():
        os.environ.setdefault(variable, value)
    os.environ.update(_REQUIRED)


def start_vllm(compiled: Literal["auto", "on", "off"], given: Mapping[str, Any]) -> Any:
    """Start vLLM's `AsyncLLM`, and wait until its child processes have loaded the model.

    Args:
        compiled: `rollout.compile`.
        given: arguments of vLLM, which take precedence.

    Raises:
        TypeError, ValueError, RuntimeError: vLLM refuses the arguments or the model, or did not start."""
    from transformers.utils import logging
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = not torch.accelerator.is_available()
    arguments: dict[str, Any] = _ARGUMENTS | {"enforce_eager": compiled == "off" or (compiled == "auto" and on_cpu)}
    if given.get("tensor_parallel_size", 1) > 1:
        # In a placement group of Ray, vLLM would have its workers started by Ray, elsewhere.
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        arguments |= {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "skip_mm_profiling": True}
    before, verbosity = os.environ.get("PYTHONPATH"), logging.get_verbosity()
    os.environ.update(child_environment() | {ENGINE: str(os.getpid())})
    logging.set_verbosity_error()
    try:
        config = AsyncEngineArgs(**arguments | {**given}).create_engine_config()
        refuse_experts(config.model_config.is_moe, on_cpu)
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    finally:
        logging.set_verbosity(verbosity)
        os.environ.pop(ENGINE, None)
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def end_with(engine: int) -> None:
    """End vLLM's processes when the engine's process ends in any way; vLLM itself would wait for it for ever.

    Call it in vLLM's worker, which is a child of vLLM's core, or the core itself.

    `engine`: the number of the engine's process."""
    core = os.getpid() if os.getppid() == engine else os.getppid()

    def watch() -> None:
        with suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(engine)], [], [])
        for process in (core, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-engine", daemon=True).start()


def refuse_experts(is_moe: bool, on_cpu: bool) -> None:
    """Raise ValueError for a mixture of experts on a CPU, where vLLM keeps experts in a form that is not reloaded."""
    if is_moe and on_cpu:
        raise ValueError(
            "on a CPU vLLM does not load new weights of a mixture of experts; use rollout.engine: transformers, or"
            " placement.rollout.gpus"
        )


def _plugins() -> list[str]:
    """Return the names of vLLM's plugins without those of vLLM-Omni, which replace vLLM's own Omni models."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    found = [plugin for group in groups for plugin in entry_points(group=group)]
    return [plugin.name for plugin in found if plugin.dist is None or plugin.dist.name != "vllm-omni"]
