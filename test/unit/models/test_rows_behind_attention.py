"""Of a prefill step, the last layer computes only the rows that are read; nobody sees that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    EAGLE3_ARCHITECTURE,
    EAGLE_ARCHITECTURE,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import (
    MIN_DROPPED_ROWS,
    LogitsProcessorOutput,
    rows_to_keep,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogprobRequest,
)
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models import eagle_draft, llama
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import VOCAB_SIZE, make_tiny_checkpoint

FAMILIES = [
    "llama", "qwen2", "mimo", "qwen3", "qwen3_moe", "gemma3", "qwen3_next", "deepseek_v2",
    "deepseek_v3",
]  # fmt: skip
PREFIXES = [[(5 * i + n) % 250 for i in range(n)] for n in (3, 7, 12)]
PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (6, 41, 1)]
ENDS, NUM_TOKENS = [5, 46, 47], 48
HIDDEN = 60
NULL, LAST, FULL = CaptureHiddenMode.NULL, CaptureHiddenMode.LAST, CaptureHiddenMode.FULL


def load(folder: Path, family: str = "llama", **overrides: Any) -> LlamaForCausalLM:
    root = make_tiny_checkpoint(folder, family, **overrides)
    model = load_model(ModelConfig.from_path(str(root)), show_progress=False)
    assert isinstance(model, LlamaForCausalLM)
    return model


def load_draft(folder: Path, architecture: str, **overrides: Any) -> EagleDraftModel:
    """A draft with a random target's embedding and head."""
    root = make_tiny_draft(folder, architecture, **overrides)
    model = load_model(ModelConfig.from_path(str(root)), show_progress=False)
    assert isinstance(model, EagleDraftModel)
    generator = torch.Generator().manual_seed(5)
    tables = torch.randn(2, VOCAB_SIZE, HIDDEN, generator=generator)
    embed, head = (torch.nn.Parameter(table, requires_grad=False) for table in tables)
    model.set_embed_and_head(embed, head)
    return model


def layers_of(model: LanguageModel) -> Any:
    return model.get_submodule("layers" if isinstance(model, EagleDraftModel) else "model.layers")


@contextmanager
def rows_seen(model: LanguageModel) -> Iterator[list[int]]:
    """Rows that the MLP of each layer gets in the steps meanwhile."""
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        for layer in layers_of(model)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@contextmanager
def choosing(rows: torch.Tensor | None) -> Iterator[None]:
    """All rows go on (None), or these in steps of `NUM_TOKENS`."""

    def choice(batch: ForwardBatch, all_captured: bool) -> torch.Tensor | None:
        return rows if batch.num_tokens == NUM_TOKENS else None

    with pytest.MonkeyPatch.context() as patch:
        for user in (llama, eagle_draft):
            patch.setattr(user, "rows_to_keep", choice)
        yield


def extend(model: LanguageModel, **wishes: Any) -> LogitsProcessorOutput:
    """The prompts in one step, behind prefixes of an earlier one."""
    runner = MiniRunner(model, page_size=4)
    rows = [runner.new_request() for _ in PROMPTS]
    states = wishes.pop("features", None)
    before = None if states is None else torch.zeros(sum(map(len, PREFIXES)), states.shape[1])
    runner.extend(rows, PREFIXES, hidden_states=before)
    return runner.extend(rows, PROMPTS, hidden_states=states, **wishes)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen3_next", {"num_hidden_layers": 3}),  # the last layer is a recurrent one
        ("llama", {"num_hidden_layers": 1}),
    ],
)
def test_logits_are_those_of_a_model_that_computes_all_rows(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    model = load(tmp_path, family, **overrides)
    num_before = model.config.num_hidden_layers - 1
    with choosing(None), rows_seen(model) as seen:
        whole = extend(model).next_token_logits
    assert seen[-num_before - 1 :] == [NUM_TOKENS] * (num_before + 1)
    with rows_seen(model) as seen:
        logits = extend(model).next_token_logits
    assert seen[-num_before - 1 :] == [NUM_TOKENS] * num_before + [len(PROMPTS)]
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-5)
    # These are far from what other rows would give.
    with choosing(torch.tensor(ENDS) - 1):
        others = extend(model).next_token_logits
    assert ((others - whole).abs().amax(dim=1) > 1e-2).all()


def test_the_output_projection_is_spared_too_and_the_keys_are_complete(tmp_path: Path) -> None:
    model = load(tmp_path)
    seen: list[int] = []
    o_proj = layers_of(model)[-1].self_attn.o_proj
    o_proj.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))

    def keys_after(prompt: list[int]) -> torch.Tensor:
        runner = MiniRunner(model)
        runner.extend([runner.new_request()], [prompt])
        assert isinstance(runner.kv_pool, MHATokenToKVPool)
        return runner.kv_pool.get_key_buffer(model.config.num_hidden_layers - 1).clone()

    keys = keys_after(PROMPTS[1])
    with choosing(None):
        assert torch.equal(keys_after(PROMPTS[1]), keys)
    assert seen == [1, len(PROMPTS[1])]


def test_greedy_tokens_are_the_same_in_chunks_of_all_sizes(tmp_path: Path) -> None:
    model = load(tmp_path)
    with choosing(None):
        expected = MiniRunner(model).greedy(PROMPTS, 6)
    for chunk_size in (None, 1, 2, 16):
        assert MiniRunner(model).greedy(PROMPTS, 6, chunk_size) == expected


def logprob_request(starts: list[int]) -> LogprobRequest:
    following = [[*prompt[1:], 9] for prompt in PROMPTS]
    targets = [ids[start:] for ids, start in zip(following, starts)]
    return LogprobRequest(
        enabled=[True] * 3,
        top_nums=[2] * 3,
        token_ids=[[5, 200]] * 3,
        start_lens=starts,
        target_ids=targets,
    )


def test_input_logprobs_need_all_rows_and_output_logprobs_do_not(tmp_path: Path) -> None:
    model = load(tmp_path)
    with rows_seen(model) as seen:
        output = extend(model, logprobs=logprob_request([6, 39, 1]))
    assert seen[-1] == NUM_TOKENS
    assert output.input_token_logprobs is not None
    assert [None if rows is None else len(rows) for rows in output.input_token_logprobs] == [
        None, 2, None,
    ]  # fmt: skip
    with choosing(None):
        whole = extend(model, logprobs=logprob_request([6, 39, 1]))
    assert whole.input_token_logprobs is not None
    assert torch.equal(output.input_token_logprobs[1], whole.input_token_logprobs[1])  # type: ignore[arg-type]
    with rows_seen(model) as seen:
        output = extend(model, logprobs=logprob_request([6, 41, 1]))
    assert seen[-1] == len(PROMPTS)
    assert output.input_token_logprobs == [None] * 3


@pytest.mark.parametrize(
    ("layers", "mode", "rows", "shape"),
    [
        (None, LAST, 3, (3, HIDDEN)),
        (None, FULL, NUM_TOKENS, (NUM_TOKENS, HIDDEN)),
        ([0, 1], FULL, 3, (NUM_TOKENS, 2 * HIDDEN)),
        ([1, 2], FULL, NUM_TOKENS, (NUM_TOKENS, 2 * HIDDEN)),
        ([2], LAST, NUM_TOKENS, (3, HIDDEN)),
        ([0, 1], LAST, NUM_TOKENS, (3, 2 * HIDDEN)),
        ([2], NULL, 3, None),
    ],
)
def test_hidden_states_are_complete(
    tmp_path: Path,
    layers: list[int] | None,
    mode: CaptureHiddenMode,
    rows: int,
    shape: tuple[int, int] | None,
) -> None:
    model = load(tmp_path)
    if layers is not None:
        model.set_eagle3_layers_to_capture(layers)
    with choosing(None):
        whole = extend(model, capture=mode)
    with rows_seen(model) as seen:
        output = extend(model, capture=mode)
    assert seen[-1] == rows
    torch.testing.assert_close(output.next_token_logits, whole.next_token_logits, atol=1e-4, rtol=0)
    if shape is None:
        assert output.hidden_states is None
        return
    assert output.hidden_states is not None and output.hidden_states.shape == shape
    torch.testing.assert_close(output.hidden_states, whole.hidden_states, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        *((architecture, {}) for architecture in DRAFT_ARCHITECTURES),
        (EAGLE_ARCHITECTURE, {"num_hidden_layers": 2}),
        (EAGLE3_ARCHITECTURE, {"num_hidden_layers": 2}),
        (EAGLE3_ARCHITECTURE, {"norm_output": True}),
    ],
)
def test_drafts_drop_rows_unless_the_states_of_all_are_asked_for(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    model = load_draft(tmp_path, architecture, **overrides)
    generator = torch.Generator().manual_seed(9)
    width = model.draft_config.input_width
    features = torch.randn(NUM_TOKENS, width, generator=generator)
    for mode, rows in ((LAST, 3), (FULL, NUM_TOKENS)):
        with choosing(None):
            whole = extend(model, capture=mode, features=features)
        with rows_seen(model) as seen:
            output = extend(model, capture=mode, features=features)
        assert seen[-1] == rows
        assert output.hidden_states is not None and len(output.hidden_states) == rows
        for got, wanted in (
            (output.hidden_states, whole.hidden_states),
            (output.next_token_logits, whole.next_token_logits),
        ):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)


def test_rows_that_the_batch_names_are_kept_in_their_order(tmp_path: Path) -> None:
    model = load(tmp_path)
    asked = [40, 2, 2]
    with choosing(None):
        whole = extend(model, logits_rows=asked).next_token_logits
    with rows_seen(model) as seen:
        logits = extend(model, logits_rows=asked).next_token_logits
    assert seen[-1] == 3
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-5)


def test_steps_that_read_every_row_or_none_are_left_alone(tmp_path: Path) -> None:
    model = load(tmp_path)
    with rows_seen(model) as seen:
        assert len(extend(model, mode=ForwardMode.TARGET_VERIFY).next_token_logits) == NUM_TOKENS
        assert seen[-1] == NUM_TOKENS
        assert len(extend(model, logits_rows=[]).next_token_logits) == 0
        assert seen[-1] == NUM_TOKENS
        runner = MiniRunner(model)
        rows = [runner.new_request(), runner.new_request()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "take_rows", None)  # nothing to pick where each is the last
            runner.extend(rows, [[1], [2]])
            runner.decode(rows, [3, 4])
    assert seen[-1] == 2


def batch_on(device: str, lens: list[int]) -> ForwardBatch:
    """A prefill step as far as the choice of rows looks at it."""
    ids, of_requests = torch.empty(sum(lens), device=device), torch.tensor(lens, device=device)
    unused: Any = None
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lens),
        input_ids=ids,
        positions=ids,
        req_pool_indices=of_requests,
        seq_lens=of_requests,
        seq_lens_cpu=lens,
        out_cache_loc=ids,
        req_to_token_pool=unused,
        token_to_kv_pool=unused,
        extend_seq_lens=of_requests,
        extend_seq_lens_cpu=lens,
    )


def test_on_a_gpu_a_few_rows_are_not_worth_the_launches() -> None:
    enough = [MIN_DROPPED_ROWS, 2]  # of which two go on
    too_few = [MIN_DROPPED_ROWS - 1, 2]
    # Where values cannot be read at all, as on a device without waiting for it.
    kept = rows_to_keep(batch_on("meta", enough), all_captured=False)
    assert kept is not None and kept.shape == (2,)
    assert rows_to_keep(batch_on("meta", too_few), all_captured=False) is None
    kept = rows_to_keep(batch_on("cpu", too_few), all_captured=False)
    assert kept is not None and kept.tolist() == [MIN_DROPPED_ROWS - 2, MIN_DROPPED_ROWS]
