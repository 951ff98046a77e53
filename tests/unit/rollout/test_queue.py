"""The order of prompts as groups: numbers that never repeat, what comes again, what a checkpoint keeps."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_rl.data import PromptSource
from lora_rl.rollout.queue import PromptQueue
from tests.support.rollouts import prompt


def new_queue(prompts: int = 7, seed: int = 3) -> PromptQueue:
    return PromptQueue(PromptSource([prompt(str(n)) for n in range(prompts)], seed=seed))


def test_what_is_given_back_comes_first_as_another_attempt() -> None:
    queue = new_queue()
    first = queue.draw(3)
    assert [g.group_id for g in first] == [0, 1, 2]
    queue.give_back(first[1])
    again, fresh = queue.draw(2)
    assert (again.group_id, again.prompt, again.attempt) == (1, first[1].prompt, 1)
    assert (fresh.group_id, fresh.attempt) == (3, 0)
    assert queue.drawn == 4


def test_what_is_put_back_comes_first_as_the_same_attempt() -> None:
    queue = new_queue()
    first = queue.draw(4)
    queue.give_back(first[3])
    queue.put_back([first[2], first[0]])
    assert queue.draw(3) == [first[0], first[2], dataclasses.replace(first[3], attempt=1)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.sets(st.integers(0, 4))), min_size=1, max_size=8), st.integers(0, 8))
def test_a_continued_order_is_the_same_and_open_groups_are_drawn_again(
    draws: list[tuple[int, set[int]]], interrupt: int
) -> None:
    """Groups left open when the run stops come first; then everything goes on as if it had never stopped."""
    whole, stopped = new_queue(), new_queue()
    open_groups = []
    for step, (count, left_open) in enumerate(draws):
        groups = stopped.draw(count)
        assert groups == whole.draw(count)
        if step == interrupt:
            open_groups = [g for n, g in enumerate(groups) if n in left_open]
            state = json.loads(json.dumps(stopped.state_dict(open_groups)))
            stopped = new_queue()
            stopped.load_state_dict(state)
            assert stopped.draw(len(open_groups)) == open_groups if open_groups else True
    assert stopped.draw(5) == whole.draw(5)
    assert stopped.drawn == whole.drawn


def test_the_state_of_other_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="other prompts"):
        new_queue(6).load_state_dict(new_queue(7).state_dict())
