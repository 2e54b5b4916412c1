"""Loads exports as a user of diffusers does, in a process that imports no omni_async, and computes with them.

`python plain.py JOBS COMPAT`: JOBS is a file of torch with a list of {name, code, calls}: `code` makes `pipeline`;
`calls` are (component, args, kwargs) of its denoisers. Outputs go to JOBS with the ending .out. COMPAT is omni_async's
compat.py: it makes diffusers importable where torchvision is built for CUDA and torch is not.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def main(jobs: Path, compat: str) -> None:
    runpy.run_path(compat)["tolerate_cuda_builds_beside_cpu_torch"]()
    found = {}
    for job in torch.load(jobs, weights_only=False):
        names: dict[str, Any] = {}
        exec(job["code"], names)
        pipeline = names["pipeline"]
        with torch.no_grad():
            found[job["name"]] = [_output(pipeline, call) for call in job["calls"]]
    assert "omni_async" not in sys.modules and "omni_async_pipelines" not in sys.modules
    torch.save(found, jobs.with_suffix(".out"))


def _output(pipeline: Any, call: Any) -> Any:
    component, args, kwargs = call
    output = getattr(pipeline, component)(*args, **kwargs)
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
