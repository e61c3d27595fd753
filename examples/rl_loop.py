"""A small policy-gradient loop against a running server: roll out, reward, learn, push, repeat.

    sglang serve --model-path <model> --port 30000 &
    python examples/rl_loop.py --model <model> --url http://127.0.0.1:30000 --steps 30

Every step samples a group of answers for each prompt over HTTP, scores them by a rule, takes one
gradient step on the log-probabilities (rewards centred and scaled within each group, a baseline
that needs no second model), and pushes the layers that changed as one flattened bucket. The server
answers the next step with the new weights: `meta_info.weight_version` is checked on every sample.

The rule: the share of words of at most four letters. It needs no data, and a model learns it in
minutes on a CPU. Only the last layers are trained (`--layers`), so that a step is short.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

PROMPTS = (
    "The best thing about the sea is",
    "When I was young, my family",
    "A good friend is someone who",
    "Yesterday the weather was",
)
SHORT_WORD = 4  # letters


def share_of_short_words(text: str) -> float:
    """0 to 1; 0 for an answer without words."""
    words = [word.strip(".,;:!?\"'()") for word in text.split()]
    words = [word for word in words if word]
    return sum(len(word) <= SHORT_WORD for word in words) / max(len(words), 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `layers`: how many of the last ones are trained, 0 for the whole model."""

    model: str
    url: str
    prompts: Sequence[str] = PROMPTS
    steps: int = 30
    samples: int = 8  # answers a prompt
    new_tokens: int = 16
    layers: int = 6
    learning_rate: float = 3e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. `prompt` numbers the group that it is compared with."""

    prompt: int
    prompt_ids: list[int]
    output_ids: list[int]
    reward: float


@dataclass(slots=True)
class History:
    """What a run did, by step."""

    rewards: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


class Server:
    """The three calls that a trainer needs."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def generate(self, prompts: Sequence[list[int]], settings: Settings, seed: int) -> list[Any]:
        """`settings.samples` answers for each prompt, prompt after prompt."""
        return self._post(
            "/generate",
            {
                "input_ids": list(prompts),
                "sampling_params": {
                    "n": settings.samples,
                    "temperature": 1.0,
                    "max_new_tokens": settings.new_tokens,
                    "sampling_seed": seed,
                },
            },
        )

    def push(self, named: Sequence[tuple[str, torch.Tensor]], version: str) -> None:
        """Write these tensors into the server's model, whose caches are emptied."""
        bucket = FlattenedTensorBucket(named_tensors=named)
        payload = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        data = MultiprocessingSerializer.serialize(payload, output_str=True)
        self._post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [data],
                "load_format": "flattened_bucket",
                "weight_version": version,
            },
        )

    def version(self) -> str:
        reply = requests.get(f"{self._url}/model_info", timeout=60)
        reply.raise_for_status()
        return str(reply.json()["weight_version"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = requests.post(self._url + path, json=body, timeout=600)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text}")
        return reply.json()


class Learner:
    """The policy with gradients: the same checkpoint as the server's."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self.model.eval()  # no dropout: the policy that learns is the one that answered
        num_layers = self.model.config.num_hidden_layers
        first = num_layers - settings.layers if settings.layers else 0
        chosen = [f"model.layers.{index}." for index in range(first, num_layers)]
        for name, parameter in self.model.named_parameters():
            is_chosen = not settings.layers or name.startswith(tuple(chosen))
            parameter.requires_grad_(is_chosen)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(self._trained, lr=settings.learning_rate)

    def learn(self, samples: Sequence[Sample]) -> float:
        """One gradient step; returns the mean reward."""
        advantages = group_advantages(samples)
        longest = max(len(s.prompt_ids) + len(s.output_ids) for s in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.int64)
        mask = torch.zeros(len(samples), longest)  # 1 where a token was sampled
        for row, sample in enumerate(samples):
            start, tokens = len(sample.prompt_ids), sample.prompt_ids + sample.output_ids
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, start : len(tokens)] = 1
        # Causal attention: what pads the end is seen by nobody who counts.
        logits = self.model(ids).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        per_sample = (logprobs * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1).clamp(min=1)
        loss = -(torch.tensor(advantages) * per_sample).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        return statistics.fmean(sample.reward for sample in samples)

    def changed_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What the server must be sent, under checkpoint names."""
        return [(n, p.detach()) for n, p in self.model.named_parameters() if p.requires_grad]


def group_advantages(samples: Sequence[Sample]) -> list[float]:
    """How much better each answer is than the others of its prompt, in standard deviations."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample.reward)
    return [
        (sample.reward - statistics.fmean(groups[sample.prompt]))
        / (statistics.pstdev(groups[sample.prompt]) + 1e-3)
        for sample in samples
    ]


def run(
    settings: Settings,
    reward: Callable[[str], float] = share_of_short_words,
    show_progress: bool = True,
) -> History:
    """The whole loop. Raises RuntimeError where the server refuses something."""
    server, learner, history = Server(settings.url), Learner(settings), History()
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    prompts = [tokenizer.encode(prompt) for prompt in settings.prompts]
    version = server.version()
    bar = tqdm(range(settings.steps), disable=not show_progress, desc="policy gradient")
    for step in bar:
        answers = server.generate(prompts, settings, seed=settings.seed + step)
        samples = []
        for position, answer in enumerate(answers):
            if answer["meta_info"]["weight_version"] != version:
                raise RuntimeError(f"an answer of {answer['meta_info']['weight_version']}")
            prompt = position // settings.samples
            ids = answer["output_ids"]
            samples.append(Sample(prompt, prompts[prompt], ids, reward(answer["text"])))
        history.rewards.append(learner.learn(samples))
        version = f"step-{step + 1}"
        server.push(learner.changed_tensors(), version)
        history.versions.append(version)
        bar.set_postfix(reward=f"{history.rewards[-1]:.3f}")
    return history


def plot(history: History, path: Path) -> None:
    """Reward by step as a picture. Needs matplotlib."""
    from matplotlib import pyplot

    pyplot.plot(range(1, len(history.rewards) + 1), history.rewards)
    pyplot.xlabel("step")
    pyplot.ylabel("mean reward")
    pyplot.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder that the server was started with")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--samples", type=int, default=Settings.samples)
    parser.add_argument("--new-tokens", type=int, default=Settings.new_tokens)
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--plot", type=Path, help="write the reward curve to this picture")
    options = vars(parser.parse_args())
    picture = options.pop("plot")
    history = run(Settings(**options))
    quarter = max(1, len(history.rewards) // 4)
    first = statistics.fmean(history.rewards[:quarter])
    last = statistics.fmean(history.rewards[-quarter:])
    tqdm.write(f"mean reward: {first:.3f} in the first steps, {last:.3f} in the last")
    if picture is not None:
        plot(history, picture)


if __name__ == "__main__":
    main()
