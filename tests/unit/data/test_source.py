import json
import pickle

import pytest

from lora_rl.data import Prompt, PromptSource


def make_prompts(n: int, prefix: str = "p") -> list[Prompt]:
    return [Prompt(id=f"{prefix}{i}", text=str(i), token_ids=(i,), answer=str(i)) for i in range(n)]


def draw(source: PromptSource, *sizes: int) -> list[str]:
    return [prompt.id for size in sizes for prompt in source.next_batch(size)]


def test_every_epoch_is_a_fresh_permutation():
    source = PromptSource(make_prompts(50), seed=1)
    epochs = [draw(source, 20, 20, 10) for _ in range(3)]
    assert all(len(set(epoch)) == 50 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert source.epoch == 3


def test_order_depends_on_the_seed_alone():
    prompts = make_prompts(50)
    assert draw(PromptSource(prompts, seed=1), 50) == draw(PromptSource(prompts, seed=1), 50)
    assert draw(PromptSource(prompts, seed=1), 50) != draw(PromptSource(prompts, seed=2), 50)


def test_batches_cross_epochs_and_may_exceed_one():
    by_sevens = PromptSource(make_prompts(10), seed=5)
    at_once = PromptSource(make_prompts(10), seed=5)
    assert draw(by_sevens, 7, 7, 7, 7, 7) == draw(at_once, 35)


def test_without_shuffle_the_order_is_kept():
    prompts = make_prompts(5)
    assert draw(PromptSource(prompts, shuffle=False), 7) == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]


@pytest.mark.parametrize("drawn", [0, 3, 10, 14, 27])
def test_resume_continues_exactly(drawn):
    source = PromptSource(make_prompts(10), seed=7)
    if drawn:
        source.next_batch(drawn)
    state = json.loads(json.dumps(source.state_dict()))  # must survive a checkpoint
    resumed = PromptSource(make_prompts(10), seed=99)  # the saved seed wins
    resumed.load_state_dict(state)
    assert draw(resumed, 4, 9, 12) == draw(source, 4, 9, 12)
    assert resumed.state_dict() == source.state_dict()


def test_resume_refuses_other_prompts():
    state = PromptSource(make_prompts(10)).state_dict()
    with pytest.raises(ValueError, match="belongs to other prompts"):
        PromptSource(make_prompts(10, prefix="q")).load_state_dict(state)


@pytest.mark.parametrize("change", [{"position": 10}, {"position": -1}, {"epoch": -1}])
def test_resume_refuses_an_impossible_cursor(change):
    source = PromptSource(make_prompts(10))
    with pytest.raises(ValueError, match=r"position 0\.\.9"):
        source.load_state_dict(source.state_dict() | change)


def test_resume_names_missing_keys():
    with pytest.raises(ValueError, match="lacks epoch, position, prompts, shuffle"):
        PromptSource(make_prompts(3)).load_state_dict({"seed": 0})


def test_bad_prompts_and_sizes():
    with pytest.raises(ValueError, match="empty"):
        PromptSource([])
    with pytest.raises(ValueError, match="'p1' occurs more than once"):
        PromptSource(make_prompts(3) + make_prompts(2)[1:])
    with pytest.raises(ValueError, match="n is 0"):
        PromptSource(make_prompts(3)).next_batch(0)


def test_prompts_are_hashable_and_travel_between_processes():
    prompt = Prompt(id="x", text="1", token_ids=(1,), answer="1", metadata={"a": 1})
    assert pickle.loads(pickle.dumps(prompt)) == prompt
    assert len({prompt, prompt}) == 1
