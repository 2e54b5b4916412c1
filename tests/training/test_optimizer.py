"""Tests learning-rate numbers and clipping."""

import pytest
import torch

from omni_async.training.optimizer import build_optimizer, clip_factor, gradient_norm, learning_rate
from tests.training.training_world import make_config


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]),
    ],
)
def test_warm_up_then_the_schedule_over_all_optimizer_steps(schedule, rates):
    optimizer = {"lr": 1.0, "schedule": schedule, "warmup_steps": 2}
    config = make_config(**{"trainer.updates": 3, "steps_per_update": 2, "trainer.optimizer": optimizer})
    assert [learning_rate(config.trainer, i) for i in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-9, "weight_decay": 0.3}, torch.optim.AdamW),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.7, "weight_decay": 0.2}, torch.optim.SGD),
    ],
)
def test_configured_values_reach_the_optimizer(options, kind):
    config = make_config(**{"trainer.optimizer": options}).trainer.optimizer
    built = build_optimizer(config, [torch.nn.Parameter(torch.ones(2))], torch.device("cpu"))
    assert type(built) is kind
    assert {"name": config.name, **built.defaults}.items() >= options.items()


def test_clipping_is_torchs():
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert gradient_norm(grads) == 5.0
    assert clip_factor(5.0, None) == clip_factor(5.0, 10.0) == 1.0
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2)


def test_the_fused_kernel_is_for_accelerators_unless_the_recipe_decides(monkeypatch):
    def fused(given: bool | None, device: str) -> bool | None:
        config = make_config(**{"trainer.optimizer": {"fused": given}}).trainer.optimizer
        return build_optimizer(config, [torch.nn.Parameter(torch.ones(2))], torch.device(device)).defaults["fused"]

    # The meta device has the kernel, as an accelerator's torch may have.
    assert [fused(None, "cpu"), fused(None, "meta"), fused(False, "meta"), fused(True, "cpu")] == [
        None,
        True,
        None,
        True,
    ]
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: False)
    assert fused(None, "meta") is None
