"""Drafts of several layers: the proposals of the definition, and the target's own tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.speculative.multi_layer_drafting import MultiLayerDrafting
from sglang.srt.speculative.spec_graph_runner import GraphKind
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.spec_rig import (
    Proposals,
    TinyPair,
    finish_all,
    run_all,
    serve,
    worker_of,
)
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer, make_tiny_mtp_copies
from sglang.test.fakes.tiny_models import BOS_ID, make_tiny_checkpoint
from sglang.test.mtp_reference import MtpReference
from sglang.test.small_server import serve as serve_processes

register_cpu_ci(est_time=90, suite="speculative")

LAYERS, NEW_TOKENS = 3, 24
MULTI = "--enable-multi-layer-eagle"


def make_prompts() -> list[list[int]]:
    """Behind tokens that nobody attends to; two of them part late, one is very short."""
    chosen = random.Random(3)
    texts = [[chosen.randrange(256) for _ in range(length)] for length in (19, 33, 40, 1)]
    texts.append([*texts[2][:30], *texts[1][:7]])
    return [[BOS_ID] * LAYERS + text for text in texts]


PROMPTS = make_prompts()
# Contexts that are shorter than the number of layers.
SHORTEST = [[17], [40, 33]]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Drafts that are right."""
    folder = make_tiny_mtp_copies(tmp_path_factory.mktemp("exact"), LAYERS)
    return TinyPair(folder, {"NEXTN": folder})


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Drafts that are right at times, and depend on the states of the layer before."""
    folder = make_tiny_mtp_copies(tmp_path_factory.mktemp("mixed"), LAYERS, state_share=0.03)
    return TinyPair(folder, {"NEXTN": folder})


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Random weights, of two layers over a target of two."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("noise"), "deepseek_v3")
    add_tiny_nextn_layer(folder, num_layers=2)
    return TinyPair(folder, {"NEXTN": folder})


@pytest.fixture(scope="module")
def reference(disturbed: TinyPair) -> MtpReference:
    return MtpReference(disturbed.target, LAYERS)


def mismatches(served: ServedScheduler, reference: MtpReference, rounds: int = 1) -> list[str]:
    """Serve the prompts, and compare every proposal with the reference's."""
    proposals = Proposals(worker_of(served))
    wrong: list[str] = []
    for _ in range(rounds):
        prompts = [*PROMPTS, *SHORTEST]
        rids = [served.submit(prompt, NEW_TOKENS) for prompt in prompts]
        finish_all(served, rids)
        for rid, prompt in zip(rids, prompts):
            tokens = [*prompt, *served.answer_of(rid).tokens]
            for length, drafts in proposals.seen[rid].items():
                # Behind the end steps may have been launched already.
                if length < len(tokens):
                    expected = reference.proposals(tokens[: length + 1])
                    if drafts != expected:
                        wrong.append(f"{rid} at {length}: {drafts}, not {expected}")
            counts = reference.accepted(prompt, NEW_TOKENS)
            spec = served.answer_of(rid).spec
            assert spec is not None
            if spec["spec_verify_ct"] != len(counts):
                wrong.append(f"{rid}: {spec['spec_verify_ct']} steps, not {len(counts)}")
    return wrong


@pytest.mark.parametrize(
    ("page", "overlap", "chunk"), [*itertools.product((1, 16), (False, True), (16, 64))]
)
def test_proposals_are_those_of_the_definition(
    disturbed: TinyPair, reference: MtpReference, page: int, overlap: bool, chunk: int
) -> None:
    flags = (MULTI, "--page-size", page, "--chunked-prefill-size", chunk)
    with serve(disturbed, "NEXTN", *flags, overlap=overlap) as served:
        # The second time from the prefix cache.
        assert mismatches(served, reference, rounds=2) == []


@pytest.mark.parametrize(("page", "overlap"), [(1, False), (16, True)])
def test_layers_whose_keys_have_heads(tmp_path: Path, page: int, overlap: bool) -> None:
    folder = make_tiny_mtp_copies(tmp_path, LAYERS, "mimo", state_share=0.03)
    pair = TinyPair(folder, {"NEXTN": folder})
    flags = (MULTI, "--page-size", page, "--chunked-prefill-size", 16)
    with serve(pair, "NEXTN", *flags, overlap=overlap) as served:
        assert mismatches(served, MtpReference(folder, LAYERS), rounds=2) == []


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_tiny_chunks_and_few_layers(
    disturbed: TinyPair, reference: MtpReference, chunk: int
) -> None:
    with serve(disturbed, "NEXTN", MULTI, "--chunked-prefill-size", chunk) as served:
        assert mismatches(served, reference, rounds=2) == []
    flags = (MULTI, "--chunked-prefill-size", chunk)
    fewer = MtpReference(disturbed.target, 2)
    with serve(disturbed, "NEXTN", *flags, num_steps=2) as served:
        worker = worker_of(served)
        assert isinstance(worker, DraftModelWorker) and len(worker.draft_runner_list) == 2
        assert served.scheduler.tree_cache.lookahead == 2
        assert mismatches(served, fewer) == []


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, what: str) -> Iterator[None]:
    """One thing done wrong."""
    with monkeypatch.context() as patch:
        if what == "kept states":
            run = MultiLayerDrafting._run

            def forgetful(self: MultiLayerDrafting, *args: Any, **fields: Any) -> None:
                self._kept.zero_()
                run(self, *args, **fields)

            patch.setattr(MultiLayerDrafting, "_run", forgetful)
        elif what == "keys of pairs":
            patch.setattr(
                "sglang.srt.managers.scheduler_process.key_lookahead", lambda server_args: 1
            )
        yield


@pytest.mark.parametrize("what", ["kept states", "keys of pairs"])
def test_mistakes_are_noticed(
    disturbed: TinyPair, reference: MtpReference, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with broken(monkeypatch, what), serve(disturbed, "NEXTN", MULTI) as served:
        assert mismatches(served, reference, rounds=2) != []


@pytest.mark.parametrize(("page", "overlap"), [*itertools.product((1, 16), (False, True))])
def test_right_drafts_are_all_accepted(exact: TinyPair, page: int, overlap: bool) -> None:
    with serve(exact, None) as served:
        expected = run_all(served, PROMPTS, NEW_TOKENS)
    variants: list[tuple[str | int | float, ...]] = [
        (),
        ("--chunked-prefill-size", 16),
        ("--disable-radix-cache",),
    ]
    for variant in variants:
        flags = (MULTI, "--page-size", page, *variant)
        with serve(exact, "NEXTN", *flags, overlap=overlap) as served:
            for _ in range(2):
                rids = [served.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
                finish_all(served, rids)
                assert [served.answer_of(rid).tokens for rid in rids] == expected
                for rid in rids:
                    spec = served.answer_of(rid).spec
                    assert spec is not None
                    histogram = spec["spec_correct_drafts_histogram"]
                    # The first token comes from the prompt, the last ones end the request.
                    assert sum(histogram[:LAYERS]) <= 1, (variant, histogram)


@pytest.mark.parametrize(("page", "overlap"), [*itertools.product((1, 16), (False, True))])
def test_answers_are_those_of_the_target_alone(noise: TinyPair, page: int, overlap: bool) -> None:
    with serve(noise, None) as served:
        expected = run_all(served, PROMPTS, NEW_TOKENS)
        biased = run_all(served, PROMPTS, NEW_TOKENS, frequency_penalty=0.7)
    variants: list[tuple[str | int | float, ...]] = [
        ("--chunked-prefill-size", 16),
        ("--max-total-tokens", 192, "--schedule-conservativeness", 0.01),
    ]
    for variant in variants:
        flags = (MULTI, "--page-size", page, *variant)
        with serve(noise, "NEXTN", *flags, num_steps=2, overlap=overlap) as served:
            assert run_all(served, PROMPTS, NEW_TOKENS) == expected
            assert run_all(served, PROMPTS, NEW_TOKENS, frequency_penalty=0.7) == biased
            retracted = served.scheduler.reports.num_retracted_total
            assert (retracted > 0) == ("--max-total-tokens" in variant)


def test_sampled_tokens_are_those_of_the_target(noise: TinyPair) -> None:
    wishes: dict[str, Any] = {"temperature": 0.8, "sampling_seed": 7}
    with serve(noise, None) as served:
        expected = run_all(served, PROMPTS, NEW_TOKENS, **wishes)
    with serve(noise, "NEXTN", MULTI, num_steps=2) as served:
        assert run_all(served, PROMPTS, NEW_TOKENS, **wishes) == expected


def test_large_batches_step_aside_and_come_back(
    disturbed: TinyPair, reference: MtpReference
) -> None:
    with envs.SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS.override(2 * (LAYERS + 1)):
        with serve(disturbed, "NEXTN", MULTI, overlap=True) as served:
            proposals = Proposals(worker_of(served))
            prompts = PROMPTS[:3]
            rids = [served.submit(p, 8 + 20 * (i == 0)) for i, p in enumerate(prompts)]
            finish_all(served, rids)
            tokens = [*prompts[0], *served.answer_of(rids[0]).tokens]
            seen = {n: d for n, d in proposals.seen[rids[0]].items() if n < len(tokens)}
            assert seen and min(seen) > len(prompts[0]) + 4
            for length, drafts in seen.items():
                assert drafts == reference.proposals(tokens[: length + 1])


@pytest.mark.parametrize(
    ("temperature", "kinds"),
    [(0.0, [GraphKind.WHOLE]), (0.8, [GraphKind.FRONT, GraphKind.COMMIT])],
)
def test_captured_steps_are_the_same(
    disturbed: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    kinds: list[GraphKind],
) -> None:
    wishes: dict[str, Any] = {"temperature": temperature, "sampling_seed": 3}
    use_eager_graphs(monkeypatch)
    with serve(disturbed, "NEXTN", MULTI, overlap=True) as served:
        rids = [served.submit(p, 9 + 5 * i, **wishes) for i, p in enumerate(PROMPTS)]
        finish_all(served, rids)
        expected = [served.answer_of(rid) for rid in rids]
    with serve(disturbed, "NEXTN", MULTI, overlap=True) as served:
        worker = worker_of(served)
        worker.capture_graphs([1, 2, 4, 8], pad=True, show_progress=False)
        rids = [served.submit(p, 9 + 5 * i, **wishes) for i, p in enumerate(PROMPTS)]
        finish_all(served, rids)
        # Tokens and numbers of accepted drafts.
        assert [served.answer_of(rid) for rid in rids] == expected
        assert worker.graphs is not None
        assert all((worker.graphs.num_steps[k] > 3) == (k in kinds) for k in GraphKind)
        assert worker.committed_lens[worker.target_runner.req_to_token_pool.padding_row] == 0


def test_layers_have_kv_of_their_own_in_one_pool(noise: TinyPair) -> None:
    with serve(noise, "NEXTN", MULTI, num_steps=2) as served:
        pool, config = served.scheduler._get_draft_kv_pool()
        worker = worker_of(served)
        assert pool is not None and config is not None and isinstance(worker, DraftModelWorker)
        assert pool.layer_num == config.num_hidden_layers == 2
        run_all(served, PROMPTS[:1], 4)
        (stacked,) = pool.buffers()
        for layer, runner in enumerate(worker.draft_runner_list):
            (own,) = runner.token_to_kv_pool.buffers()
            assert own.data_ptr() == stacked[layer].data_ptr() and own[0].any()
        assert not torch.equal(stacked[0], stacked[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_single_step_is_that_of_an_ordinary_draft(noise: TinyPair, overlap: bool) -> None:
    answers = []
    for flags in ((), (MULTI,)):
        with serve(noise, "NEXTN", *flags, num_steps=1, overlap=overlap) as served:
            answers.append(run_all(served, PROMPTS, 12))
            worker = worker_of(served)
            assert isinstance(worker, DraftModelWorker) and len(worker.draft_runner_list) == 1
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("flags", "options", "reason"),
    [
        ((), {"num_steps": 3}, "at most 2, not 3"),
        ((), {"topk": 2}, "must be 1"),
        (("--speculative-use-rejection-sampling",), {"num_steps": 2}, "cannot draw"),
    ],
)
def test_what_cannot_be_is_refused(
    noise: TinyPair, flags: tuple[str, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason), serve(noise, "NEXTN", MULTI, *flags, **options):
        pass


def test_a_draft_of_one_kind_is_refused(noise: TinyPair, tmp_path: Path) -> None:
    pair = TinyPair.make(tmp_path)
    with pytest.raises(ValueError, match="is one draft"), serve(pair, "EAGLE", MULTI):
        pass
    with pytest.raises(ValueError, match="needs --speculative-algorithm"):
        with serve(pair, None, MULTI):
            pass


@pytest.mark.timeout(240)
def test_two_ranks_agree(exact: TinyPair) -> None:
    with serve(exact, None) as served:
        expected = run_all(served, PROMPTS, NEW_TOKENS)
    flags = ["--tp-size", 2, "--speculative-algorithm", "NEXTN", MULTI, "--page-size", 4]
    params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with serve_processes(str(exact.target), *map(str, flags)) as server:
        for _ in range(2):
            replies = server.generate(input_ids=PROMPTS, sampling_params=params)
            assert [reply["output_ids"] for reply in replies] == expected
        for reply in replies:
            assert reply["meta_info"]["spec_accept_length"] >= 3.4
