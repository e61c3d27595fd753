"""Draft vocabulary, samples, batches, texts and options of the trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from sglang.test.fakes.tiny_tokenizer import EOS_TEXT, write_tiny_model
from sglang.training.eagle3.options import (
    OptionsError,
    TrainOptions,
    check_resumable,
)
from sglang.training.eagle3.prompts import builtin_prompts
from sglang.training.eagle3.samples import (
    BatchPlan,
    Sample,
    collate,
    load_samples,
    make_sample,
    save_samples,
)
from sglang.training.eagle3.texts import DataError, Texts, read_entries, repetition_units
from sglang.training.eagle3.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    count_answer_tokens,
    coverage,
    predict_head_rows,
    vocabulary_of_d2t,
)

# -- vocabulary -----------------------------------------------------------------------------------


def test_the_most_frequent_answer_tokens_are_chosen_and_both_maps_agree() -> None:
    samples = [make_sample([9, 9, 9, 9], [3, 7, 7, 5]), make_sample([1], [7, 5, 8])]
    counts = count_answer_tokens(samples, 12)
    assert int(counts[9]) == 0, "prompts are not counted"
    vocabulary = choose_vocabulary(counts, 3)
    assert vocabulary.token_ids.tolist() == [3, 5, 7]
    draft_ids = torch.arange(vocabulary.size)
    assert (draft_ids + vocabulary.d2t).tolist() == [3, 5, 7]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [3, 5, 7]
    assert torch.equal(vocabulary.draft_ids[vocabulary.token_ids], draft_ids)
    assert torch.equal(vocabulary.draft_ids >= 0, vocabulary.t2d)
    again = vocabulary_of_d2t(vocabulary.d2t, 12)
    assert torch.equal(again.token_ids, vocabulary.token_ids)


def test_forced_tokens_stay_and_must_fit() -> None:
    counts = torch.tensor([0, 5, 4, 3, 0, 9])
    assert choose_vocabulary(counts, 3, always=[0, 4]).token_ids.tolist() == [0, 4, 5]
    with pytest.raises(ValueError, match="2 tokens must be"):
        choose_vocabulary(counts, 1, always=[0, 4])


def test_a_vocabulary_that_falls_is_refused() -> None:
    with pytest.raises(ValueError, match="rise"):
        DraftVocabulary(token_ids=torch.tensor([3, 2]), target_size=5)


def test_coverage_counts_occurrences() -> None:
    counts = torch.tensor([6, 0, 3, 1])
    report = coverage(choose_vocabulary(counts, 2), counts)
    assert report.covered_share == 0.9
    assert (report.used_tokens, report.used_tokens_covered) == (3, 2)


def test_predicted_head_rows_follow_the_map_of_the_known_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    target_rows = torch.randn(60, 8, generator=generator)
    mapping = torch.randn(8, 8, generator=generator)
    known, new = torch.arange(40), torch.arange(40, 60)
    rows = predict_head_rows(target_rows, known, target_rows[:40] @ mapping, new)
    torch.testing.assert_close(rows, target_rows[40:] @ mapping, atol=2e-2, rtol=1e-2)


# -- samples and batches --------------------------------------------------------------------------


def _samples(count: int = 40) -> list[Sample]:
    rng = random.Random(0)
    return [make_sample([index] * 4, [7] * rng.randint(8, 60)) for index in range(count)]


def test_samples_survive_their_file(tmp_path: Path) -> None:
    samples = [make_sample([1, 2], [3], weight=0.25), make_sample([4], [5, 6])]
    save_samples(tmp_path / "s", samples)
    for before, after in zip(samples, load_samples(tmp_path / "s"), strict=True):
        assert torch.equal(before.token_ids, after.token_ids)
        assert torch.equal(before.is_answer, after.is_answer)
        assert before.weight == after.weight


def test_an_epoch_has_every_sample_once_in_bounded_batches() -> None:
    plan = BatchPlan(_samples(), batch_tokens=200, num_steps=3, seed=1)
    seen: list[int] = []
    index = 0
    while (batch := plan.batch(0, index)) is not None:
        assert batch.token_ids.numel() <= 200
        seen += batch.token_ids[:, 0].tolist()
        index += 1
    assert sorted(seen) == list(range(40))
    assert index < 20


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        batch = BatchPlan(_samples(), 200, 3, seed).batch(epoch, 0)
        assert batch is not None
        return batch.token_ids[:, 0].tolist()

    assert first(1, 2) == first(1, 2)
    assert first(1, 2) != first(1, 3)
    assert first(1, 2) != first(2, 2)


def test_rows_are_those_before_answer_tokens_that_all_steps_reach() -> None:
    batch = collate([make_sample([1, 2, 3], [4, 5, 6]), make_sample([1], [2, 3, 4, 5])], 2)
    # Row r predicts token r + 1; rows 0 and 1 are out of reach of the second step.
    assert batch.rows.tolist() == [2, 3, 4, 6 + 2, 6 + 3]
    assert batch.num_tokens == 11


# -- texts ----------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    write_tiny_model(tmp_path)
    end = Texts(tmp_path, frozenset()).encode(EOS_TEXT)
    return Texts(tmp_path, frozenset(end))


def test_answers_of_a_conversation_are_learnt_up_to_their_end(texts: Texts) -> None:
    sample = texts.conversation(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello world"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "no"},
        ]
    )
    answers = sample.token_ids[sample.is_answer].tolist()
    assert texts.tokenizer.decode(answers) == f"hello world{EOS_TEXT}no{EOS_TEXT}"
    whole = texts.tokenizer.decode(sample.token_ids.tolist())
    assert whole.count("<|start|>") == 4
    assert whole.endswith("\n")
    prompt = texts.prompt([{"role": "user", "content": "hi"}])
    assert sample.token_ids[: len(prompt)].tolist() == prompt


def test_the_first_time_of_a_repeated_text_is_no_answer(texts: Texts) -> None:
    sample = texts.repeated(" hello there.", 80)
    assert len(sample.token_ids) == 80
    period = len(texts.encode(" hello there."))
    assert sample.prompt_length == period + 1
    body = sample.token_ids[1:]
    assert torch.equal(body[period:], body[:-period])


def test_a_users_turn_can_be_left_open(texts: Texts) -> None:
    before, after = texts.user_turn()
    assert before + texts.encode("hello") + after == texts.prompt(
        [{"role": "user", "content": "hello"}]
    )


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps({"content": "?"}) + "\n")
    with pytest.raises(DataError, match="line 2"):
        list(read_entries(path))


def test_plain_lines_are_user_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('What?\n\n{"prompt": "Why?"}\n')
    contents = [e.messages[0]["content"] for e in read_entries(path, plain_lines=True)]
    assert contents == ["What?", "Why?"]


def test_units_come_from_the_texts_and_need_some() -> None:
    units = repetition_units(["One two three. Four five.\nSix."], random.Random(0))
    words = {word.strip(",") for _ in range(50) for word in next(units).split()}
    assert words <= {"One", "two", "three.", "Four", "five.", "Six."}
    with pytest.raises(DataError):
        next(repetition_units([" "], random.Random(0)))


def test_builtin_prompts_differ_and_depend_on_the_seed() -> None:
    prompts = builtin_prompts(3000, 0)
    assert len(set(prompts)) == len(prompts) == 3000
    assert builtin_prompts(50, 0) != builtin_prompts(50, 1)
    assert not any("{" in prompt for prompt in prompts)


# -- options --------------------------------------------------------------------------------------


def _options(**values: object) -> TrainOptions:
    given = {"model": "m", "output": "o", "builtin_prompts": 5, "max_steps": 10, **values}
    return TrainOptions(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ""}, "--model"),
        ({"max_steps": 0}, "when to stop"),
        ({"builtin_prompts": 0}, "nothing to learn from"),
        ({"chain_weight": 1.5}, "--chain-weight"),
        ({"capture_layers": [3]}, "--capture-layers"),
    ],
)
def test_options_that_cannot_work_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        _options(**values).check()


def test_a_resumed_run_keeps_what_its_numbers_depend_on() -> None:
    saved = json.loads(json.dumps(_options().as_dict()))
    check_resumable(_options(output="p", resume=True, builtin_prompts=0, log_every=1), saved)
    with pytest.raises(OptionsError, match="lr was 0.0005 and is 0.1"):
        check_resumable(_options(lr=0.1), saved)
