"""Names the extra of `pyproject.toml` that installs a module which the base package does without."""

from __future__ import annotations

EXTRAS = {
    "mlflow": "mlflow",
    "rapidocr": "ocr",
    "onnxruntime": "ocr",
    "rapidfuzz": "ocr",
    "cv2": "ocr",
    "av": "video",
    "soundfile": "video",
    "matplotlib": "plots",
    "wandb": "sinks",
    "tensorboard": "sinks",
    "math_verify": "math",
}


def missing_extra(module: str | None) -> str | None:
    """Return one line with the way to install a missing module; None if it belongs to no extra.

    `module`: its dotted name, as `ModuleNotFoundError.name`."""
    package = (module or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"the package {package} is not installed; pip install 'omni-async[{EXTRAS[package]}]'"
