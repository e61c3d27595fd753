"""The example of a policy-gradient loop, shortened: the reward of a tiny model rises."""

from __future__ import annotations

import statistics
from types import ModuleType

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.examples import load_example
from sglang.test.small_server import SmallServer

from .conftest import Models

register_cpu_ci(est_time=25, suite="rl")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("rl_loop")


def share_of_ascii(text: str) -> float:
    return sum(character.isascii() for character in text) / max(len(text), 1)


def test_the_loop_raises_the_reward(
    example: ModuleType, server: SmallServer, models: Models
) -> None:
    settings = example.Settings(
        model=str(models.folders["old"]),
        url=server.url,
        prompts=("ab", "cd"),
        steps=12,
        samples=16,
        new_tokens=8,
        layers=2,
        learning_rate=2e-2,
    )
    with torch.enable_grad():  # an engine in this process has switched gradients off
        history = example.run(settings, share_of_ascii, show_progress=False)
    assert history.versions == [f"step-{step}" for step in range(1, 13)]
    first, last = statistics.fmean(history.rewards[:3]), statistics.fmean(history.rewards[-3:])
    assert last > first + 0.15, history.rewards


def test_without_a_reward_nothing_is_learned(example: ModuleType) -> None:
    same = [example.Sample(0, [1], [2], 0.5), example.Sample(0, [1], [3], 0.5)]
    assert example.group_advantages(same) == [0.0, 0.0]
    assert example.share_of_short_words("We go to the riverside, now!") == pytest.approx(5 / 6)
