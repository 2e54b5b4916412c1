"""Every family that draws latents, with its cases (`omni_async.commands.parity`), and requests for its samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_async.commands.parity.case import PROMPTS as PROMPTS
from omni_async.commands.parity.case import STEPS as STEPS
from omni_async.commands.parity.case import Case
from omni_async.commands.parity.model import Subject
from omni_async.diffusion.policy import Policy, load_policy
from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import SamplingSpec, family_names, find_family
from omni_async.types import SampleRequest

_OURS = [find_family(name) for name in family_names() if find_family(name).policy.startswith("omni_async_pipelines.")]
NAMES = [family.name for family in _OURS if family.draws == "latents"]


@dataclass(frozen=True)
class Family:
    name: str
    case: Case

    @property
    def specs(self) -> tuple[SamplingSpec, ...]:
        return self.case.specs

    @property
    def label(self) -> str:
        return f"{self.name}-{self.case.label}" if self.case.label else self.name

    def build(self, folder: Path) -> str:
        return str(self.case.build(folder))

    def policy(self, checkpoint: str) -> Policy:
        return load_policy(find_family(self.name), checkpoint)

    def subject(self, folder: Path) -> Subject:
        checkpoint = self.build(folder)
        return Subject(self.case.with_media(folder), checkpoint, self.policy(checkpoint))


FAMILIES = tuple(Family(name, case) for name in NAMES for case in load_named(str(find_family(name).parity)))


def first_of(name: str) -> Family:
    """Returns the family's first case."""
    return next(family for family in FAMILIES if family.name == name)


QWEN_IMAGE, SD3, WAN = map(first_of, ("qwen_image", "stable_diffusion_3", "wan2_2"))


def make_request(spec: SamplingSpec, number: int = 0, **changes: Any) -> SampleRequest:
    """Makes a request with a window of three steps, starting at 0, 1 or 2."""
    return QWEN_IMAGE.case.request(spec, number, **changes)
