"""Contains the model families, one package for each: what the engine runs, and what trains its denoisers."""

# First of all: it makes torchvision importable beside a CPU build of torch.
import omni_async  # noqa: F401
