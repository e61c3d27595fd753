"""EAGLE-3 chain decoding written out plainly: what the engine's tokens and accept lengths must be.

Shares no code with the server's models, pools or workers. The target is transformers', the draft a
page of torch over the tensors of a published folder, both in float32 on the CPU, one request,
greedy. `run_chain` takes any pair with the two `forward` methods, so that a test can put the
server's models in the places of these. Run as a program it reports one prompt:

    python -m sglang.test.eagle3_reference --target MODEL --draft DRAFT --unit " A sentence."

Notation: x_0 .. x_{n-1} are the tokens whose KV the target holds, x_n the token that it chose last
and has not read yet. The draft's entry at position p is made of x_{p+1} and the target's features
of x_p. Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStep:
    """What the target says about n new tokens."""

    logits: torch.Tensor  # [r, V], of the last r tokens
    features: torch.Tensor  # [n, 3 * hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """What the draft says after its last new token."""

    logits: torch.Tensor  # [draft vocabulary]
    token_id: int  # the likeliest token, in the target's numbering
    state: torch.Tensor  # [1, hidden], input of the next step


class ChainTarget(Protocol):
    """A target with a KV cache of one request."""

    def forward(self, token_ids: list[int], start: int, num_logits: int) -> TargetStep:
        """Forget everything from position `start` on, then read the tokens there."""
        ...


class ChainDraft(Protocol):
    """A draft with a KV cache of one request."""

    def forward(self, token_ids: list[int], states: torch.Tensor, start: int) -> DraftStep:
        """Forget everything from position `start` on, then read tokens [n] and states [n, w]."""
        ...


@dataclass(slots=True, kw_only=True)
class ChainRun:
    """Tokens of one request, and how they came about; one list entry a verification."""

    output_ids: list[int]
    accept_lens: list[int] = field(default_factory=list)  # accepted drafts and the bonus token
    proposals: list[list[int]] = field(default_factory=list)
    draft_logits: list[torch.Tensor] = field(default_factory=list)  # [steps, draft vocabulary]

    @property
    def accept_length(self) -> float:
        """As servers report it: new tokens (the prefill's included) a verification."""
        return len(self.output_ids) / max(len(self.accept_lens), 1)


def run_chain(
    target: ChainTarget,
    draft: ChainDraft,
    prompt_ids: list[int],
    *,
    num_steps: int = 7,
    max_new_tokens: int = 128,
) -> ChainRun:
    """Greedy decoding with chains of `num_steps` proposals; goes on past end-of-text tokens."""
    step = target.forward(prompt_ids, 0, 1)
    bonus = int(step.logits[-1].argmax())
    run = ChainRun(output_ids=[bonus])
    num_read = len(prompt_ids)  # n
    # What the draft has to catch up with: tokens moved up by one, and where they go.
    new_tokens, features, start = [*prompt_ids[1:], bonus], step.features, 0
    while len(run.output_ids) < max_new_tokens:
        proposal = _propose(draft, run, new_tokens, features, start, num_steps)
        step = target.forward([bonus, *proposal], num_read, num_steps + 1)
        chosen = step.logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < num_steps and proposal[accepted] == chosen[accepted]:
            accepted += 1
        bonus = chosen[accepted]
        new_tokens = [*proposal[:accepted], bonus]
        features, start = step.features[: accepted + 1], num_read
        num_read += accepted + 1
        run.output_ids += new_tokens
        run.accept_lens.append(accepted + 1)
    del run.output_ids[max_new_tokens:]
    return run


def _propose(
    draft: ChainDraft,
    run: ChainRun,
    new_tokens: list[int],
    features: torch.Tensor,
    start: int,
    num_steps: int,
) -> list[int]:
    """Read the new tokens with the target's features, then go on from the draft's own states."""
    steps = [draft.forward(new_tokens, features, start)]
    position = start + len(new_tokens)
    while len(steps) < num_steps:
        steps.append(draft.forward([steps[-1].token_id], steps[-1].state, position))
        position += 1
    run.proposals.append([step.token_id for step in steps])
    run.draft_logits.append(torch.stack([step.logits for step in steps]))
    return run.proposals[-1]


class ReferenceTarget:
    """A transformers model; its features are what enters the early, middle and late layer."""

    def __init__(self, folder: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        num_layers = self.model.config.num_hidden_layers
        self._layers = (2, num_layers // 2, num_layers - 3)
        self._cache = DynamicCache()

    @property
    def embedding(self) -> torch.Tensor:
        """[V, hidden]."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @torch.inference_mode()
    def forward(self, token_ids: list[int], start: int, num_logits: int) -> TargetStep:
        """See `ChainTarget`."""
        if start == 0:
            self._cache = DynamicCache()
        elif start < self._cache.get_seq_length():
            self._cache.crop(start - self._cache.get_seq_length())
        output = self.model(
            torch.tensor([token_ids]),
            past_key_values=self._cache,
            output_hidden_states=True,
            logits_to_keep=num_logits,
        )
        # hidden_states[i] enters layer i: the embedding for i = 0, the sum of both branches above.
        features = torch.cat([output.hidden_states[i][0] for i in self._layers], dim=-1)
        return TargetStep(logits=output.logits[0], features=features)


class ReferenceDraft:
    """The plain kind of draft: one layer, no optional norms, own head, default rope."""

    def __init__(self, folder: str | Path, embedding: torch.Tensor) -> None:
        root = Path(folder)
        config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(root / "model.safetensors")
        self._weights = {
            name.removeprefix("midlayer."): tensor.float()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self._token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        self._embedding = embedding
        self._eps: float = config["rms_norm_eps"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config["head_dim"]
        exponents = torch.arange(0, self._head_dim, 2).float() / self._head_dim
        self._frequencies = config["rope_theta"] ** -exponents
        self._keys = torch.empty(self._kv_heads, 0, self._head_dim)
        self._values = torch.empty(self._kv_heads, 0, self._head_dim)

    @torch.inference_mode()
    def forward(self, token_ids: list[int], states: torch.Tensor, start: int) -> DraftStep:
        """See `ChainDraft`."""
        weights = self._weights
        hidden_size = self._embedding.shape[1]
        if states.shape[1] != hidden_size:
            states = functional.linear(states, weights["fc.weight"])
        embedded = self._norm(self._embedding[token_ids], "input_layernorm")
        both = torch.cat((embedded, self._norm(states, "hidden_norm")), dim=-1)
        states = states + self._attend(both, start)
        normed = self._norm(states, "post_attention_layernorm")
        gate = functional.silu(functional.linear(normed, weights["mlp.gate_proj.weight"]))
        up = functional.linear(normed, weights["mlp.up_proj.weight"])
        states = states + functional.linear(gate * up, weights["mlp.down_proj.weight"])
        last = states[-1:]
        logits = functional.linear(self._norm(last, "norm"), weights["lm_head.weight"])[0]
        return DraftStep(logits=logits, token_id=int(self._token_ids[logits.argmax()]), state=last)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self._eps)
        return x * scale * self._weights[f"{name}.weight"]

    def _attend(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Causal attention of [n, 2 * hidden] over the entries before `start` and the new ones."""
        num_new = x.shape[0]
        positions = torch.arange(start, start + num_new)
        queries = self._rotate(self._heads_of(x, "q_proj", self._heads), positions)
        keys = self._rotate(self._heads_of(x, "k_proj", self._kv_heads), positions)
        values = self._heads_of(x, "v_proj", self._kv_heads)
        self._keys = torch.cat((self._keys[:, :start], keys), dim=1)
        self._values = torch.cat((self._values[:, :start], values), dim=1)
        group = self._heads // self._kv_heads
        scores = queries @ self._keys.repeat_interleave(group, 0).mT / self._head_dim**0.5
        future = torch.arange(start + num_new)[None, :] > positions[:, None]
        shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        mixed = shares @ self._values.repeat_interleave(group, 0)  # [heads, n, head_dim]
        return functional.linear(
            mixed.transpose(0, 1).flatten(1), self._weights["self_attn.o_proj.weight"]
        )

    def _heads_of(self, x: torch.Tensor, name: str, num_heads: int) -> torch.Tensor:
        """[num_heads, n, head_dim]."""
        flat = functional.linear(x, self._weights[f"self_attn.{name}.weight"])
        return flat.unflatten(-1, (num_heads, self._head_dim)).transpose(0, 1)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def repeated_prompt(tokenizer_folder: str | Path, unit: str, num_tokens: int = 1024) -> list[int]:
    """The start token and a text repeated, cut to exactly `num_tokens` ids."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids: list[int] = tokenizer.encode(
        unit * num_tokens, add_special_tokens=False, truncation=True, max_length=num_tokens - 1
    )
    return [tokenizer.bos_token_id, *ids]


def chat_prompt(tokenizer_folder: str | Path, text: str) -> list[int]:
    """One user turn in the model's chat form."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids


def main() -> None:
    """Command line: one prompt, its accept lengths and tokens as JSON."""
    parser = argparse.ArgumentParser(description="Greedy EAGLE-3 chain decoding in plain torch.")
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--draft", required=True, help="folder of the draft model")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--unit", help="text to repeat to --prompt-tokens")
    prompt.add_argument("--chat", help="what a user says")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    if args.unit is not None:
        ids = repeated_prompt(args.target, args.unit, args.prompt_tokens)
    else:
        ids = chat_prompt(args.target, args.chat)
    target = ReferenceTarget(args.target)
    draft = ReferenceDraft(args.draft, target.embedding)
    run = run_chain(
        target, draft, ids, num_steps=args.num_steps, max_new_tokens=args.max_new_tokens
    )
    report = {
        "prompt_tokens": len(ids),
        "accept_length": round(run.accept_length, 3),
        "accept_lens": run.accept_lens,
        "output_ids": run.output_ids,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
