"""Accept lengths: simulated on greedy answers for many prompts, and by real decoding for a few.

The simulation is exact where the target's greedy answer is given: as long as a chain is right, its
inputs are the answer's tokens, which is what the unrolled forward reads; and the entries before it
are made of real features, as after an extend. So one unrolled pass gives every chain of an answer,
and walking along tells which of them would have been drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import DynamicCache

from sglang.training.eagle3.attention import TttAttention
from sglang.training.eagle3.draft import Eagle3Draft
from sglang.training.eagle3.samples import Sample
from sglang.training.eagle3.target import FrozenTarget


@torch.no_grad()
def simulate(
    target: FrozenTarget,
    draft: Eagle3Draft,
    samples: Sequence[Sample],
    num_steps: int,
    attention: TttAttention,
    batch_tokens: int,
) -> list[int]:
    """Tokens of every verification, the bonus token included, in samples with greedy answers.

    An answer's last few tokens are left out, where a chain would reach beyond its end.
    """
    accept_lens: list[int] = []
    ordered = sorted(samples, key=lambda s: len(s.token_ids))
    while ordered:
        size = max(batch_tokens // len(ordered[-1].token_ids), 1)
        batch, ordered = ordered[-size:], ordered[:-size]
        length = len(batch[-1].token_ids)
        token_ids = torch.zeros(len(batch), length + num_steps, dtype=torch.int64)
        for row, sample in enumerate(batch):
            token_ids[row, : len(sample.token_ids)] = sample.token_ids
        hits = _hits(target, draft, token_ids.to(target.device), length, num_steps, attention)
        for row, sample in enumerate(batch):
            accept_lens += _walk(hits[:, row].tolist(), sample.prompt_length, len(sample.token_ids))
    return accept_lens


def _hits(
    target: FrozenTarget,
    draft: Eagle3Draft,
    token_ids: torch.Tensor,
    length: int,
    num_steps: int,
    attention: TttAttention,
) -> torch.Tensor:
    """bool [steps, B, T] on the CPU: whether step k at p proposes token p + 2 + k."""
    features = target.states(token_ids[:, :length]).features
    embeds = target.embed(token_ids)
    hits = []
    for step, states in enumerate(draft.unroll(embeds, features, num_steps, attention)):
        proposed = torch.stack([draft.token_ids[draft.logits(row).argmax(-1)] for row in states])
        truth = functional.pad(token_ids[:, step + 2 :], (0, 2))[:, :length]
        hits.append((proposed == truth).cpu())
    return torch.stack(hits)


def _walk(hits: list[list[bool]], prompt_length: int, length: int) -> list[int]:
    """Follow the chains that decoding would have drawn, as far as they lie within the answer."""
    accept_lens: list[int] = []
    position = prompt_length - 1
    num_steps = len(hits)
    while position + 1 + num_steps < length:
        accepted = 0
        while accepted < num_steps and hits[accepted][position]:
            accepted += 1
        accept_lens.append(accepted + 1)
        position += accepted + 1
    return accept_lens


class _ChainState:
    """The draft's keys and values of one request."""

    def __init__(self, target: FrozenTarget, draft: Eagle3Draft) -> None:
        self._target = target
        self._draft = draft
        shape = draft.shape
        empty = torch.empty(1, shape.num_heads, 0, shape.head_dim, device=target.device)
        self._keys, self._values = empty, empty

    def read(
        self, token_ids: Sequence[int], states: torch.Tensor, start: int
    ) -> tuple[int, torch.Tensor]:
        """Entries from `start` on anew: the next token, the last state [1, H].

        `states` [n, w] are the target's features or the draft's own state.
        """
        layer = self._draft.midlayer
        if states.shape[-1] != self._draft.shape.hidden_size:
            states = self._draft.fc(states)
        states = states[None].float()
        embeds = self._target.embed(torch.tensor([token_ids], device=states.device))
        positions = torch.arange(start, start + len(token_ids), device=states.device)
        both = layer.attention_input(embeds, states)
        query, key, value = layer.self_attn.project(both, positions)
        self._keys = torch.cat((self._keys[:, :, :start].to(key.dtype), key), dim=2)
        self._values = torch.cat((self._values[:, :, :start].to(value.dtype), value), dim=2)
        seen = torch.arange(self._keys.shape[2], device=states.device) <= positions[:, None]
        mixed = functional.scaled_dot_product_attention(
            query, self._keys, self._values, attn_mask=seen
        )
        last = layer.finish(states, mixed)[0, -1:]
        return int(self._draft.token_ids[self._draft.logits(last)[0].argmax()]), last


@dataclass(slots=True, kw_only=True)
class ChainRun:
    """What decoding one prompt gave."""

    output_ids: list[int]
    accept_lens: list[int]


@torch.no_grad()
def decode_chain(
    target: FrozenTarget,
    draft: Eagle3Draft,
    prompt_ids: Sequence[int],
    num_steps: int,
    max_new_tokens: int,
) -> ChainRun:
    """Greedy decoding with chains, one request; goes on past tokens that end an answer."""
    cache = DynamicCache()
    device = target.device
    logits, features = target.step(torch.tensor([list(prompt_ids)], device=device), cache, 1)
    bonus = int(logits[-1].argmax())
    run = ChainRun(output_ids=[bonus], accept_lens=[])
    chain = _ChainState(target, draft)
    num_read, start = len(prompt_ids), 0
    new_ids = [*prompt_ids[1:], bonus]
    while len(run.output_ids) < max_new_tokens:
        token, state = chain.read(new_ids, features, start)
        proposal = [token]
        for step in range(num_steps - 1):
            token, state = chain.read([token], state, num_read + step)
            proposal.append(token)
        verified = torch.tensor([[bonus, *proposal]], device=device)
        logits, features = target.step(verified, cache, num_steps + 1)
        chosen = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < num_steps and proposal[accepted] == chosen[accepted]:
            accepted += 1
        bonus = chosen[accepted]
        new_ids, features = [*proposal[:accepted], bonus], features[: accepted + 1]
        start = num_read
        num_read += accepted + 1
        cache.crop(num_read - cache.get_seq_length())
        run.output_ids += new_ids
        run.accept_lens.append(accepted + 1)
    return run
