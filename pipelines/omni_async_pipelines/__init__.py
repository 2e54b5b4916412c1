"""Contains the model families, one package for each: rollout pipelines, and the policies for training denoisers."""

# First, because it makes torchvision importable alongside a CPU build of torch.
import omni_async  # noqa: F401
