"""Output constraints: what the scheduler needs of a grammar engine, and the cache of compilations.

Owns the worker threads and the cache of compiled grammars; knows no request (that is
`managers.grammar_manager`) and no engine (that is a subclass). `compile_async`, `reset` and
`shutdown` are called on the scheduler thread; `_compile` runs on a worker thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from sglang.srt.sampling.sampling_params import GRAMMAR_KINDS

logger = logging.getLogger(__name__)

BitmaskRow = npt.NDArray[np.int32]  # [bitmask_width(vocab_size)], bit i of word w = token 32 w + i

NUM_COMPILE_THREADS = 2
MAX_CACHED_GRAMMARS = 256
# Longest accepted grammar text in bytes. Schemas of real tools stay far below.
MAX_GRAMMAR_BYTES = {
    "json_schema": 512 * 1024,
    "regex": 32 * 1024,
    "ebnf": 128 * 1024,
    "structural_tag": 512 * 1024,
}
# Backend names of the original interface; one engine serves them all with the same grammars.
_LLGUIDANCE_NAMES = ("llguidance", "xgrammar", "outlines")


class GrammarError(ValueError):
    """The client's grammar is invalid, too complex, or cannot go on; the text says why."""


def bitmask_width(vocab_size: int) -> int:
    """int32 words of one mask row."""
    return (vocab_size + 31) // 32


class GrammarMatcher(ABC):
    """The state of one request's output in its grammar. Used on the scheduler thread only."""

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Advance by one token. False (state unchanged): the grammar forbids it here.

        An end token is accepted where the text so far is complete; then `is_terminated()`.
        """

    @abstractmethod
    def fill_mask(self, row: BitmaskRow) -> None:
        """Write the allowed next tokens into `row`: all bits are set or cleared.

        Only the end tokens are allowed where nothing can follow, and where `error` is set.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether an end token was accepted: the output is a complete document."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, and an `error` that came behind them.

        Of 0 tokens: the error alone. Raises ValueError beyond the start.
        """

    @abstractmethod
    def copy(self) -> GrammarMatcher:
        """An independent matcher in the same state."""

    @property
    @abstractmethod
    def error(self) -> str | None:
        """Why the matcher cannot go on (resource limit), or None. Stays until a rollback."""


class BaseGrammarBackend(ABC):
    """Compiles grammars on worker threads and remembers the latest results, failures included."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._cache: OrderedDict[tuple[str, str], Future[GrammarMatcher]] = OrderedDict()
        self._executor = ThreadPoolExecutor(NUM_COMPILE_THREADS, "grammar-compile")

    @abstractmethod
    def _compile(self, kind: str, text: str) -> GrammarMatcher:
        """Compile on a worker thread. Raises GrammarError."""

    def compile_async(self, kind: str, text: str) -> Future[GrammarMatcher]:
        """A future of the grammar in its start state; `copy()` its result, do not advance it.

        Never blocks. The future's exception is a GrammarError where the client is at fault.
        """
        key = (kind, text)
        future = self._cache.get(key)
        if future is None:
            future = self._submit(kind, text)
            self._cache[key] = future
            while len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return future

    def forget(self, kind: str, text: str) -> None:
        """Drop one entry, so that the next request compiles afresh."""
        self._cache.pop((kind, text), None)

    def reset(self) -> None:
        """Empty the cache. Compilations that are under way still reach those who wait."""
        self._cache.clear()

    def shutdown(self) -> None:
        """Stop the worker threads; what has not started is cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, kind: str, text: str) -> Future[GrammarMatcher]:
        limit = MAX_GRAMMAR_BYTES.get(kind)
        problem = None
        if limit is None:
            problem = f"Unknown grammar kind {kind!r}; known: {', '.join(GRAMMAR_KINDS)}."
        elif len(text.encode(errors="surrogatepass")) > limit:
            problem = f"The {kind} is too long: at most {limit} bytes are accepted."
        if problem is not None:
            failed: Future[GrammarMatcher] = Future()
            failed.set_exception(GrammarError(problem))
            return failed
        return self._executor.submit(self._compile_guarded, kind, text)

    def _compile_guarded(self, kind: str, text: str) -> GrammarMatcher:
        """Thread boundary: whatever goes wrong with a client's grammar ends that request only."""
        try:
            return self._compile(kind, text)
        except GrammarError:
            raise
        except BaseException as exc:  # a panic of the native engine is no Exception
            logger.exception("The grammar engine failed on a %s of %d chars", kind, len(text))
            raise GrammarError(f"The grammar engine failed on this {kind}.") from exc


def create_grammar_backend(
    name: str,
    tokenizer_json: str | None,
    vocab_size: int,
    eos_token_ids: Sequence[int],
) -> BaseGrammarBackend | None:
    """The engine called `name`, or None for "none" (then constrained requests get a 400).

    `tokenizer_json` is the text of the model's tokenizer.json, `vocab_size` the width of the
    logits. Raises ValueError for an unknown engine or where the
    engine has no `tokenizer.json` to work with. Takes about half a second.
    """
    if name == "none":
        return None
    if name in _LLGUIDANCE_NAMES:
        if tokenizer_json is None:
            raise ValueError(f"grammar backend {name!r} needs the model's tokenizer.json")
        # Registry factory: the engine is an optional third-party package.
        from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend

        if name != "llguidance":
            logger.info("Grammar backend %s: served by llguidance.", name)
        return LLGuidanceBackend(tokenizer_json, vocab_size, eos_token_ids)
    raise ValueError(f"Unknown grammar backend {name!r}; known: llguidance, none.")
