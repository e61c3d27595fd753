"""Checks and tokenising of the front: from split requests to prompts of token ids.

`PromptPreparer` refuses what no scheduler could serve (ids outside the vocabulary, lengths beyond
the context, wishes that the server was not started for) and encodes texts, long ones on a thread
pool so that the event loop goes on. Called by the tokenizer manager, on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import SchedulerReady
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.request_normalizer import SingleRequest
from sglang.srt.managers.request_state import ReqState
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.tokenizer import BaseTokenizer

logger = logging.getLogger(__name__)

# Text up to this length is tokenised on the event loop: under half a millisecond.
_INLINE_CHARS = 2048


class PromptPreparer:
    """The limits of one server, and its tokenizer (None with --skip-tokenizer-init)."""

    def __init__(
        self, server_args: ServerArgs, info: SchedulerReady, tokenizer: BaseTokenizer | None
    ) -> None:
        self._args = server_args
        self._dp_size = server_args.dp_size
        self._context_len = info.context_len
        self._max_input_len = info.max_req_input_len
        self._vocab_size = info.vocab_size
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Drop texts that wait to be encoded."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- checks ---------------------------------------------------------------------------------

    def check(self, singles: list[SingleRequest]) -> None:
        """Range checks that need no tokens. Raises RequestError."""
        max_top = min(self._vocab_size, envs.SGLANG_MAX_TOP_LOGPROBS.get())
        checked: set[int] = set()
        for single in singles:
            params = single.sampling_params
            if id(params) not in checked:
                checked.add(id(params))
                self._check_sampling(params)
            if not 0 <= single.top_logprobs_num <= max_top:
                raise RequestError(
                    f"top_logprobs_num must be in [0, {max_top}], got {single.top_logprobs_num}."
                )
            self.check_token_ids("token_ids_logprob", single.token_ids_logprob or ())
            rank = single.routed_dp_rank
            if rank is not None and not 0 <= rank < self._dp_size:
                raise RequestError(
                    f"routed_dp_rank must be in [0, {self._dp_size - 1}], got {rank}."
                )
            if single.return_hidden_states and not self._args.enable_return_hidden_states:
                raise RequestError(
                    "return_hidden_states needs a server started with "
                    "--enable-return-hidden-states."
                )
            if single.text is not None and self.tokenizer is None:
                raise RequestError(
                    "This server runs with --skip-tokenizer-init: send input_ids, not text."
                )

    def _check_sampling(self, params: SamplingParams) -> None:
        try:
            params.verify(self._vocab_size)
            params.normalize()
        except ValueError as exc:
            raise RequestError(str(exc)) from exc
        self.check_token_ids("stop_token_ids", params.stop_token_ids or ())
        if self.tokenizer is None and (params.stop_strs or params.stop_regex_strs):
            raise RequestError(
                "stop and stop_regex need a tokenizer: the server has --skip-tokenizer-init."
            )

    def check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        ids = token_ids if isinstance(token_ids, (list, tuple, array)) else list(token_ids)
        if not ids:
            return
        if isinstance(ids, array):  # its extremes take a hundredth of the time of a list's
            numbers = np.asarray(ids)
            low, high = int(numbers.min()), int(numbers.max())
        else:
            low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"{name} must hold token ids in [0, {self._vocab_size - 1}], "
                f"got {low if low < 0 else high}."
            )

    # -- tokens ---------------------------------------------------------------------------------

    async def tokenize(self, states: list[ReqState]) -> None:
        """Fill `prompt_ids`, checked. Texts shared by samples are encoded once."""
        texts = list(dict.fromkeys(s.single.text for s in states if s.single.text is not None))
        ids_of: dict[str, array[int]] = {}
        if texts:
            for text in texts:
                self.check_text(text)
            encoded = await self.encode(texts)
            ids_of = {text: array("i", ids) for text, ids in zip(texts, encoded)}
        by_source: dict[int, array[int]] = {}
        for state in states:
            single = state.single
            if single.text is not None:
                ids = ids_of[single.text]
            elif id(single.input_ids) in by_source:
                ids = by_source[id(single.input_ids)]
            else:
                ids = by_source[id(single.input_ids)] = self._pack_ids(single.input_ids or ())
            state.prompt_ids = self._fit_prompt(ids)
            self._check_lengths(state)

    def _pack_ids(self, token_ids: Sequence[int]) -> array[int]:
        """A client's ids as an array, checked. Raises RequestError."""
        try:
            ids = array("i", token_ids)
        except OverflowError:  # of no vocabulary, and the check says which
            self.check_token_ids("input_ids", token_ids)
            raise
        self.check_token_ids("input_ids", ids)
        return ids

    def check_text(self, text: str) -> None:
        """Raise RequestError for a prompt that is too long whatever its tokens are.

        Tokenising it only to refuse it would take seconds and much memory.
        """
        bound = self.tokenizer.bound if self.tokenizer is not None else None
        if bound is None or self._args.allow_auto_truncate:
            return
        if not bound.may_exceed(text, self._context_len):
            return
        num_tokens = bound.min_tokens(text)
        if num_tokens > self._context_len:
            raise RequestError(
                f"The input (at least {num_tokens} tokens) is longer than the model's context "
                f"length ({self._context_len} tokens)."
            )

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts; long ones on the thread pool. Raises RequestError."""
        if self.tokenizer is None:
            raise RequestError("This server runs with --skip-tokenizer-init: send token ids.")
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self.tokenizer.encode_batch(texts, add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self.tokenizer.encode_batch, texts, add_special_tokens
        )

    def _fit_prompt(self, ids: array[int]) -> array[int]:
        """The prompt, cut where the server may cut. Raises RequestError when empty or too long."""
        if not ids:
            raise RequestError("The prompt is empty: it holds no tokens.")
        limit = min(self._context_len - 1, self._max_input_len)
        if len(ids) <= limit:
            return ids
        if self._args.allow_auto_truncate:
            logger.warning("Cut a prompt of %d tokens to %d", len(ids), limit)
            return ids[:limit]
        if len(ids) >= self._context_len:
            raise RequestError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({self._context_len} tokens)."
            )
        raise RequestError(
            f"The input ({len(ids)} tokens) is longer than the {limit} tokens that this server's "
            "KV cache can hold for one request."
        )

    def _check_lengths(self, state: ReqState) -> None:
        """Checks and cuts that need the prompt's length."""
        single, num_prompt = state.single, len(state.prompt_ids)
        if single.return_logprob and single.logprob_start_len > num_prompt:
            raise RequestError(
                f"logprob_start_len ({single.logprob_start_len}) is beyond the prompt "
                f"({num_prompt} tokens)."
            )
        if single.logprob_start_len < -1:
            raise RequestError(f"logprob_start_len must be >= -1, got {single.logprob_start_len}.")
        room = self._context_len - num_prompt
        params = single.sampling_params
        if params.max_new_tokens is None:
            single.sampling_params = dataclasses.replace(params, max_new_tokens=room)
        elif params.max_new_tokens > room:
            if not self._args.allow_auto_truncate:
                raise RequestError(
                    f"The request needs {num_prompt + params.max_new_tokens} tokens "
                    f"({num_prompt} of the prompt and {params.max_new_tokens} new ones), but the "
                    f"model's context length is {self._context_len} tokens."
                )
            single.sampling_params = dataclasses.replace(params, max_new_tokens=room)
        if single.sampling_params.min_new_tokens > room:
            raise RequestError(
                f"min_new_tokens ({params.min_new_tokens}) does not fit in the context: the prompt "
                f"leaves room for {room} tokens."
            )
