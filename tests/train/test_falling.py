"""Property 15 (posttraining-anchors, section 4): rewards of chosen and rejected answers that fall together are told."""

from types import SimpleNamespace

import pytest

from truestep.train.falling import WINDOW, BothFall


def told(rewards, metric="both_fell"):
    words = []
    check = BothFall(words.append)
    for chosen, rejected in rewards:
        metrics = {"reward_chosen": chosen, "reward_rejected": rejected} | ({metric: 0.0} if metric else {})
        assert not check.after(SimpleNamespace(metrics=metrics))  # pyright: ignore[reportArgumentType]
    return words


FALLING = [(-0.01 * step, -0.03 * step) for step in range(3 * WINDOW)]


@pytest.mark.parametrize("metric", ["both_fell", "good"])
def test_both_falling_is_told_once(metric):
    (sentence,) = told(FALLING, metric)
    assert "both fall (-0.115 and -0.345 over the last 8 steps)" in sentence and "preference.sft" in sentence
    assert not told(FALLING[: 2 * WINDOW - 1], metric)


@pytest.mark.parametrize(
    "rewards",
    [
        [(-c, r) for c, r in FALLING],
        [(c + 1.0, r) for c, r in FALLING],
        [(-0.2, -0.5)] * 3 * WINDOW,
        list(reversed(FALLING)),
    ],
    ids=["chosen rises", "chosen falls from above", "neither moves", "both rise"],
)
def test_anything_else_is_not(rewards):
    assert not told(rewards)


def test_rewards_without_a_reference_are_always_below_0():
    assert not told(FALLING, metric="")
