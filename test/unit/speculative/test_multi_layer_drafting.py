"""Drafts of several layers propose what the definition says, whatever the chunks and contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.speculative.multi_layer_drafting import MultiLayerDrafting
from sglang.srt.speculative.spec_info import DraftShape
from sglang.test.fakes.spec_rig import Proposals, TinyPair, finish_all, serve, worker_of
from sglang.test.fakes.tiny_drafts import make_tiny_mtp_copies
from sglang.test.fakes.tiny_models import BOS_ID
from sglang.test.mtp_reference import MtpReference

LAYERS = 3
PROMPTS = [[BOS_ID, BOS_ID, BOS_ID, *(5 + (7 * i) % 90 for i in range(11))], [17]]


@pytest.mark.parametrize(("chunk", "page", "overlap"), [(2, 1, False), (16, 4, True)])
def test_proposals_are_those_of_the_definition(
    tmp_path: Path, chunk: int, page: int, overlap: bool
) -> None:
    folder = make_tiny_mtp_copies(tmp_path, LAYERS, "mimo", state_share=0.03)
    reference = MtpReference(folder, LAYERS)
    pair = TinyPair(folder, {"NEXTN": folder})
    flags = ("--enable-multi-layer-eagle", "--chunked-prefill-size", chunk, "--page-size", page)
    with serve(pair, "NEXTN", *flags, overlap=overlap) as served:
        proposals = Proposals(worker_of(served))
        rids = [served.submit(prompt, 10) for prompt in PROMPTS]
        finish_all(served, rids)
        for rid, prompt in zip(rids, PROMPTS):
            tokens = [*prompt, *served.answer_of(rid).tokens]
            # Behind the end steps may have been launched already.
            seen = {n: drafts for n, drafts in proposals.seen[rid].items() if n < len(tokens)}
            assert seen
            assert seen == {n: reference.proposals(tokens[: n + 1]) for n in seen}


def test_there_must_be_a_layer_for_each_step() -> None:
    shape = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
    with pytest.raises(ValueError, match="2 draft layers"):
        MultiLayerDrafting([None, None], shape, 9)  # type: ignore[list-item]
