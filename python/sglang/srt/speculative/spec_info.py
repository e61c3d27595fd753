"""Which speculative algorithms exist, what each needs, and who makes its worker.

Owns the table of algorithms, the shape of a draft (`DraftShape`) and an empty registry of worker
factories; the modules that hold workers fill it when they are imported. Knows no worker, no model
and no scheduler. `SpecInput` is the base of what a speculative step adds to a `ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

# No token: what a draft that must not be accepted is compared as; a token not known yet.
NO_TOKEN = -1


class DraftFeatures(Enum):
    """Which hidden states of the target a draft reads."""

    NONE = "none"
    LAST = "last"  # the final one, after the last norm
    AUX = "aux"  # three of the residual stream, side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTraits:
    """What the rest of the server must know of an algorithm."""

    has_draft_model: bool
    features: DraftFeatures = DraftFeatures.NONE

    @property
    def needs_next_token(self) -> bool:
        """Whether a draft KV entry depends on the token after its own.

        Prefix caches then count pairs of tokens: a prefix of n tokens has n - 1 units.
        """
        return self.features is not DraftFeatures.NONE


class SpeculativeAlgorithm(Enum):
    """Names of `--speculative-algorithm`. NEXTN (an MTP layer in the target's files) is EAGLE."""

    NONE = "NONE"
    EAGLE = "EAGLE"
    NEXTN = "EAGLE"
    EAGLE3 = "EAGLE3"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm:
        """The algorithm of this name in any case; None is NONE. Raises ValueError."""
        if name is None:
            return cls.NONE
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(cls.__members__)
            raise ValueError(f"unknown speculative algorithm {name!r}; known: {known}") from None

    @property
    def traits(self) -> AlgorithmTraits:
        return _TRAITS[self]

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        """True for drafts that read the target's hidden states: EAGLE, NEXTN and EAGLE3."""
        return self.traits.features is not DraftFeatures.NONE

    def create_worker(self, **collaborators: Any) -> Any:
        """Make this algorithm's worker by the registered factory, which gets all arguments.

        Raises ValueError for an algorithm without a factory.
        """
        factory = _FACTORIES.get(self)
        if factory is None:
            raise ValueError(f"no worker is registered for the algorithm {self.name}")
        return factory(**collaborators)


_TRAITS = {
    SpeculativeAlgorithm.NONE: AlgorithmTraits(has_draft_model=False),
    SpeculativeAlgorithm.EAGLE: AlgorithmTraits(has_draft_model=True, features=DraftFeatures.LAST),
    SpeculativeAlgorithm.EAGLE3: AlgorithmTraits(has_draft_model=True, features=DraftFeatures.AUX),
    SpeculativeAlgorithm.STANDALONE: AlgorithmTraits(has_draft_model=True),
    SpeculativeAlgorithm.NGRAM: AlgorithmTraits(has_draft_model=False),
}

# The registry's values are workers of a layer above, and so are most of the arguments.
WorkerFactory = Callable[..., Any]
_FACTORIES: dict[SpeculativeAlgorithm, WorkerFactory] = {}


def register_worker(algorithm: SpeculativeAlgorithm, factory: WorkerFactory) -> None:
    """Let `factory` make the workers of `algorithm`. Raises ValueError where one is registered."""
    if algorithm in _FACTORIES:
        raise ValueError(f"{algorithm.name} has a worker factory already")
    _FACTORIES[algorithm] = factory


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """How much a draft model drafts in a step. Raises ValueError for a shape that cannot be.

    `num_draft_tokens` (w) counts the tokens that the target verifies for a request: the root,
    which is the last known token, and w - 1 drafted ones. `num_steps` bounds the tree's depth.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.topk < 1 or self.num_draft_tokens < 2:
            raise ValueError(
                f"{self.num_steps} draft steps, top {self.topk} and {self.num_draft_tokens} draft "
                "tokens: at least 1, 1 and 2 are needed"
            )
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"a chain of {self.num_steps} steps verifies {self.num_steps + 1} tokens, "
                f"not {self.num_draft_tokens}"
            )
        if self.num_draft_tokens - 1 > self.num_candidates:
            raise ValueError(
                f"{self.num_steps} draft steps of top {self.topk} make {self.num_candidates} "
                f"nodes, {self.num_draft_tokens - 1} are to be verified"
            )

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def num_candidates(self) -> int:
        """Nodes that all steps of a draft model generate, the root not counted."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def max_depth(self) -> int:
        """Longest path from the root, edges."""
        return min(self.num_steps, self.num_draft_tokens - 1)

    @property
    def max_accept_len(self) -> int:
        """Most tokens that one step can add to a request, the bonus token included."""
        return self.max_depth + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecInput:
    """What a speculative step adds to a `ForwardBatch` (its `spec_info`)."""

    tokens_per_req: int  # new tokens of every request in this forward pass
