"""Tests learning-rate numbers and clipping."""

import pytest
import torch

from omni_async.config.trainer import StepSize
from omni_async.training.optimizer import (
    build_optimizer,
    clip_factor,
    gradient_norm,
    learning_rate,
    limit_alignment,
    step_size_factor,
)
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


@pytest.mark.parametrize(
    ("by", "target", "metrics", "factor"),
    [
        ("drift", 0.5, {"log_ratio_nats/variance": 4.0}, 0.5),
        ("drift", 0.5, {"log_ratio_nats/variance": 1.0}, 1.0),
        ("drift", 0.5, {"log_ratio_nats/variance": 0.0}, 1.0),
        ("ess", 1.0, {"ess": 0.25}, 0.5),
        ("ess", 0.8, {"ess": 0.2}, 0.5),
        ("ess", 0.8, {"ess": 0.9}, 1.0),
    ],
)
def test_the_rate_falls_with_the_root_of_drift_beyond_the_target(by, target, metrics, factor):
    assert step_size_factor(StepSize(by=by, target=target), metrics) == factor


@pytest.mark.parametrize("options", [{}, {"betas": (0.0, 0.9)}, {"name": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize(("cosine", "most"), [(0.8, 0.0), (0.8, 0.6), (0.5, 0.6), (-0.8, 0.0)])
def test_a_gradient_along_the_momentum_is_shortened_to_the_largest_cosine(options, cosine, most):
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((2, 2), (3,))]
    unused = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    config = make_config(**{"trainer.optimizer": {"weight_decay": 0, **options}}).trainer.optimizer
    optimizer = build_optimizer(config, [*parameters, unused], torch.device("cpu"))
    earlier = [torch.tensor([[1.0, 2.0], [-2.0, 1.0]]).double(), torch.tensor([3.0, 0.0, 1.0]).double()]

    def give(grads: list[torch.Tensor]) -> tuple[float, float]:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad.clone()
        return limit_alignment([*parameters, unused], optimizer, gradient_norm(grads), most)

    assert give(earlier) == (0.0, 1.0), "there is no momentum yet"
    optimizer.step()
    across = [torch.tensor([[2.0, -1.0], [1.0, 2.0]]).double(), torch.zeros(3).double()]
    length, sine = 10.0**0.5, (1 - cosine**2) ** 0.5
    grads = [
        5 * (cosine * a / gradient_norm(earlier) + sine * b / length) for a, b in zip(earlier, across, strict=True)
    ]
    found, left = give(grads)
    assert found == pytest.approx(cosine)
    got = torch.cat([p.grad.flatten() for p in parameters])
    if cosine <= most:
        assert left == 1.0
        assert torch.equal(got, torch.cat([grad.flatten() for grad in grads]))
        return
    rest = 5 * sine * torch.cat([b.flatten() for b in across]) / length
    along = torch.cat([a.flatten() for a in earlier]) / gradient_norm(earlier)
    torch.testing.assert_close(got, rest + along * 5 * sine * most / (1 - most**2) ** 0.5)
    assert got @ along / got.norm() == pytest.approx(most, abs=1e-12)
    assert left == pytest.approx(got.norm().item() / 5)


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
