"""What the branches of a draft tree see of each other's keys."""

from __future__ import annotations

import torch

from sglang.srt.speculative.eagle_utils import extend_paths, select_top_k
from sglang.srt.speculative.tree_attention import branch_attention

B, K, STEPS = 3, 3, 4


def test_a_branch_sees_its_ancestors_and_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(B * K * K).view(-1, K)
    frontier, paths, parents = None, None, []
    for step in range(STEPS):
        probs = torch.rand(B if step == 0 else B * K, K, generator=generator)
        frontier = select_top_k(step, probs, ids[: len(probs)], frontier)
        paths = extend_paths(paths, frontier)
        parents.append(frontier.parent_branches)
        attention = branch_attention(paths)
        mask = attention.custom_mask
        assert attention.tokens_per_req == K and mask is not None
        assert mask.shape == (B, K, (step + 1) * K) and mask.is_contiguous()
        for request in range(B):
            for branch in range(K):
                wanted, node = set(), branch
                for above in range(step, -1, -1):
                    wanted.add(above * K + node)
                    node = int(parents[above][request, node])
                assert set(mask[request, branch].nonzero().flatten().tolist()) == wanted
