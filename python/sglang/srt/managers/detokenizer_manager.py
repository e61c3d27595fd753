"""The detokenizer process: token ids of a step -> text deltas.

`Detokenizer` is the pure part: it keeps one `DecodeState` a request and fills `new_text` of each
`RequestOutput`. Concatenated deltas are the final text, for every split of the tokens into
messages: parts of a character are held until complete, text that could be the beginning of a stop
string is held until decided, a matched stop string or stop token is cut off.
`run_detokenizer_process` is the process around it: it receives `BatchTokenIDOutput` from the
schedulers and sends `BatchStrOutput` to the front, on one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from sglang.srt.configs.served_tokenizer import load_tokenizer
from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DecodeParams,
    RequestOutput,
    ShutdownReq,
)
from sglang.srt.managers.ipc import PullChannel, PushChannel
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.tokenizer import BaseTokenizer

logger = logging.getLogger(__name__)


class StopPrefixTracker:
    """Longest suffix of the text so far that is a proper prefix of one stop string.

    Knuth-Morris-Pratt: amortised constant work a character, however long the string is.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fail = [0]  # _fail[i]: longest border of stop[: i + 1]; grown as matches grow
        self._matched = 0

    def push(self, text: str) -> int:
        """Feed more text; return the length of the suffix to hold back."""
        stop, fail = self._stop, self._fail
        matched = self._matched
        for char in text:
            while matched and stop[matched] != char:
                matched = fail[matched - 1]
            if stop[matched] == char:
                matched += 1
                if matched > len(fail):
                    self._grow()
            if matched == len(stop):  # a whole stop string that did not end the request
                matched = fail[matched - 1]
        self._matched = matched
        return matched

    def _grow(self) -> None:
        """Append the border length of the next longer prefix."""
        stop, fail = self._stop, self._fail
        position = len(fail)
        border = fail[position - 1]
        while border and stop[border] != stop[position]:
            border = fail[border - 1]
        fail.append(border + 1 if stop[border] == stop[position] else 0)


class DecodeState:
    """Incremental decoding of one request."""

    def __init__(self, params: DecodeParams, tokenizer: BaseTokenizer) -> None:
        self.params = params
        self._decoder = tokenizer.make_decoder(params.skip_special_tokens)
        self._held = ""  # decoded, may still become a stop string
        stops = [] if params.no_stop_trim else [s for s in params.stop_strs if s]
        self._trackers = [StopPrefixTracker(stop) for stop in stops]

    def push(self, token_ids: Sequence[int], finish_reason: dict[str, Any] | None) -> str:
        """Text to append after the tokens of one message."""
        matched = finish_reason.get("matched") if finish_reason else None
        kept = len(token_ids) - self._num_stop_tokens(matched, len(token_ids))
        decode = self._decoder.push
        fresh = "".join([decode(token_id) for token_id in token_ids[: max(kept - 1, 0)]])
        # A stop string ends inside the last token's text; whatever ended before did not count.
        last_start = len(self._held) + len(fresh)
        if kept:
            fresh += decode(token_ids[kept - 1])
        if finish_reason is not None:
            fresh += self._decoder.flush()
            text = self._held + fresh
            self._held = ""
            return text[: self._stop_position(text, matched, last_start)]
        return self._release(fresh)

    def _num_stop_tokens(self, matched: Any, num_tokens: int) -> int:
        """How many tokens at the end are the stop token (or sequence), not text."""
        if self.params.no_stop_trim:
            return 0
        if isinstance(matched, int):
            return min(1, num_tokens)
        return min(len(matched), num_tokens) if isinstance(matched, list) else 0

    def _stop_position(self, text: str, matched: Any, last_start: int) -> int:
        """Where to cut the final text."""
        if not isinstance(matched, str) or matched not in self.params.stop_strs:
            return len(text)
        if self.params.no_stop_trim:
            return len(text)
        position = text.find(matched, max(0, last_start - len(matched) + 1))
        return len(text) if position < 0 else position

    def _release(self, fresh: str) -> str:
        """Give out what cannot be part of a stop string any more."""
        if not self._trackers:
            return fresh
        text = self._held + fresh
        num_held = max(tracker.push(fresh) for tracker in self._trackers)
        split = len(text) - num_held
        self._held = text[split:]
        return text[:split]


class Detokenizer:
    """Decode states of all live requests. One thread.

    Every request's last message has a finish reason; that is what frees its state.
    """

    def __init__(self, tokenizer: BaseTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, DecodeState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def process(self, batch: BatchTokenIDOutput) -> BatchStrOutput:
        """Fill `new_text` of every output, in place."""
        for output in batch.outputs:
            output.new_text = self._text_of(output)
        return BatchStrOutput(outputs=batch.outputs, dp_rank=batch.dp_rank)

    def _text_of(self, output: RequestOutput) -> str:
        state = self._states.get(output.rid)
        if state is None:
            params, output.decode = output.decode, None
            if params is None or params.skip_tokenizer or self._tokenizer is None:
                # Ids only, or a request that ends before its first token.
                return ""
            state = self._states[output.rid] = DecodeState(params, self._tokenizer)
        text = state.push(output.new_token_ids, output.finish_reason)
        if output.finish_reason is not None:
            del self._states[output.rid]
        return text


class DetokenizerManager:
    """The loop around `Detokenizer`: schedulers -> here -> front."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self._detokenizer = Detokenizer(load_tokenizer(server_args))
        self._pull = PullChannel(port_args.detokenizer_ipc_name)
        self._push = PushChannel(port_args.tokenizer_ipc_name)

    def run(self) -> None:
        """Serve until a ShutdownReq comes."""
        while True:
            message = self._pull.recv()
            if isinstance(message, BatchTokenIDOutput):
                self._push.send(self._detokenizer.process(message))
            elif isinstance(message, ShutdownReq):
                return
            else:
                logger.error("The detokenizer cannot handle a %s", type(message).__name__)

    def close(self) -> None:
        self._pull.close()
        self._push.close(linger_s=1.0)


def run_detokenizer_process(
    server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection
) -> None:
    """Body of the detokenizer process; the launcher reports exceptions.

    Sends "ready" over the pipe once it listens.
    """
    manager = DetokenizerManager(server_args, port_args)
    pipe_writer.send("ready")
    try:
        manager.run()
    finally:
        manager.close()
