import pytest
import torch

from arealite.api.cli_args import OptimizerConfig
from arealite.engine.optimizer import MOMENTS, LRSchedule, lr_factor, make_adamw, optimizer_state


def factors(shape: str, min_ratio: float = 0.0) -> list[float]:
    return [
        lr_factor(step, shape=shape, total_steps=6, warmup_steps=2, min_ratio=min_ratio) for step in (0, 1, 2, 4, 6, 9)
    ]


def test_schedules_by_hand() -> None:
    assert factors("constant") == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])
    assert factors("linear") == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0, 0.0])
    assert factors("cosine") == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0, 0.0])
    assert factors("linear", 0.2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.6, 0.2, 0.2])
    assert lr_factor(3, shape="cosine", total_steps=6, warmup_steps=2, min_ratio=0.0) == pytest.approx(
        0.853553, abs=1e-6
    )


def test_the_optimizer_follows_its_schedule() -> None:
    config = OptimizerConfig(lr=0.1, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    optimizer = make_adamw([torch.nn.Parameter(torch.zeros(1))], config)
    schedule = LRSchedule(optimizer, config, total_steps=4)
    seen = []
    for _ in range(5):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.set_step(schedule.num_steps + 1)
    assert seen == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


def test_a_falling_schedule_needs_to_know_its_length() -> None:
    config = OptimizerConfig(lr_scheduler_type="cosine")
    optimizer = make_adamw([torch.nn.Parameter(torch.zeros(1))], config)
    with pytest.raises(ValueError, match="cosine schedule must know"):
        LRSchedule(optimizer, config, total_steps=None)


def test_a_small_gradient_is_followed_like_a_large_one() -> None:
    """The root mean square of a 7B model's gradient is about 1e-6 when its norm is 0.1."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = make_adamw([parameter], OptimizerConfig(lr=0.1))
    parameter.grad = torch.tensor([1e-6, -1e-6, 1e-3, 1.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.1, 0.1, -0.1, -0.1], rel=0.02)


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0).grad = torch.zeros_like(parameter)
    make_adamw(model.parameters(), OptimizerConfig(lr=0.1, weight_decay=0.5)).step()
    found = {name: parameter.flatten().tolist()[0] for name, parameter in model.named_parameters()}
    assert found == pytest.approx({"0.weight": 0.95, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0})


def test_asking_for_the_state_takes_no_step() -> None:
    moved = []
    for asks in (False, True):
        model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = make_adamw(model.parameters(), OptimizerConfig(lr=0.1))
        if asks:
            state = optimizer_state(model, optimizer)["weight"]
            assert state["step"] == 0 and not state["exp_avg"].any()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moved.append(model.weight.detach())
    assert torch.equal(*moved)


def reference_step(
    parameter: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor], step: int, config: OptimizerConfig
) -> torch.Tensor:
    """Take a step of AdamW in float64 from moments that are rounded to bfloat16 after it."""
    first, second = (moment.double() for moment in moments)
    first = config.beta1 * first + (1 - config.beta1) * gradient.double()
    second = config.beta2 * second + (1 - config.beta2) * gradient.double().square()
    corrected = first / (1 - config.beta1**step), second / (1 - config.beta2**step)
    decayed = parameter.double() * (1 - config.lr * config.weight_decay)
    moments[:] = [first.float().bfloat16(), second.float().bfloat16()]
    return decayed - config.lr * corrected[0] / (corrected[1].sqrt() + config.eps)


def test_bfloat16_moments_are_rounded_after_a_step_in_float32() -> None:
    config = OptimizerConfig(type="adam_bf16", lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(40, 8, generator=generator))
    expected, moments = parameter.detach().double(), [torch.zeros(40, 8, dtype=torch.bfloat16) for _ in range(2)]
    adam = make_adamw([parameter], config)
    for step in range(1, 6):
        parameter.grad = torch.randn(40, 8, generator=generator) * 10.0 ** torch.arange(-4, 4)
        expected = reference_step(expected, parameter.grad, moments, step, config)
        adam.step()
        torch.testing.assert_close(parameter.detach().double(), expected, atol=2e-6, rtol=0)
    for name, moment in zip(MOMENTS, moments, strict=True):
        found = adam.state[parameter][name]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, moment, atol=0, rtol=2**-7)  # a sum that rounds the other way
