"""Request logs of the front: `--log-requests` and `/configure_logging`.

Levels: 0 ids and counts; 1 also sampling parameters; 2 also inputs and outputs, cut to 2,048
characters; 3 everything. `dump_requests_folder` appends every finished request, whole, to
`requests.jsonl` in that folder.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import orjson

from sglang.srt.managers.io_struct import ConfigureLoggingReq, GenerateReqInput

logger = logging.getLogger(__name__)

_MAX_CHARS = 2048
_META_FIELDS = ("rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num")
_ALWAYS_OUT = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")


class RequestLogger:
    """Decides what is written of each request. Event loop thread only."""

    def __init__(self, enabled: bool, level: int, log_format: str) -> None:
        self.enabled = enabled
        self.level = level
        self.log_format = log_format
        self.dump_folder: Path | None = None

    def configure(self, request: ConfigureLoggingReq) -> None:
        """Apply the fields that are set. Raises ValueError and changes nothing on a bad one."""
        level, log_format = request.log_requests_level, request.log_requests_format
        if level is not None and level not in range(4):
            raise ValueError(f"log_requests_level must be 0, 1, 2 or 3, got {level}.")
        if log_format is not None and log_format not in ("text", "json"):
            raise ValueError(f"log_requests_format must be text or json, got {log_format!r}.")
        if request.crash_dump_folder:
            raise ValueError("crash_dump_folder cannot be changed while the server runs.")
        if request.dump_requests_folder is not None:
            self.dump_folder = _make_folder(request.dump_requests_folder)
        if request.log_requests is not None:
            self.enabled = request.log_requests
        if level is not None:
            self.level = level
        if log_format is not None:
            self.log_format = log_format

    def log_received(self, obj: GenerateReqInput) -> None:
        """One line when a request has come in."""
        if self.enabled and not obj.no_logs:
            self._write("received", self._describe_input(obj))

    def log_finished(self, obj: GenerateReqInput, answers: list[dict[str, Any]]) -> None:
        """One line when a request is done, and its record in the dump folder."""
        if obj.no_logs:
            return
        if self.enabled:
            record = self._describe_input(obj)
            record["out"] = [self._describe_output(answer) for answer in answers]
            self._write("finished", record)
        if self.dump_folder is not None:
            self._dump(obj, answers)

    def _describe_input(self, obj: GenerateReqInput) -> dict[str, Any]:
        record: dict[str, Any] = {name: getattr(obj, name) for name in _META_FIELDS}
        if self.level >= 1:
            record["sampling_params"] = obj.sampling_params
        if self.level >= 2:
            record["text"], record["input_ids"] = self._cut(obj.text), self._cut(obj.input_ids)
        return record

    def _describe_output(self, answer: dict[str, Any]) -> dict[str, Any]:
        meta = answer["meta_info"]
        record = {name: meta.get(name) for name in ("id", *_ALWAYS_OUT, "e2e_latency")}
        if self.level >= 2:
            record["text"] = self._cut(answer.get("text"))
            record["output_ids"] = self._cut(answer.get("output_ids"))
        return record

    def _cut(self, value: Any) -> Any:
        if self.level >= 3 or value is None:
            return value
        if isinstance(value, str):
            return value if len(value) <= _MAX_CHARS else value[:_MAX_CHARS] + "…"
        shown = [self._cut(item) if isinstance(item, (str, list)) else item for item in value[:256]]
        return shown if len(value) <= 256 else [*shown, f"… {len(value)} in all"]

    def _write(self, event: str, record: dict[str, Any]) -> None:
        if self.log_format == "json":
            line = _to_json({"event": f"request.{event}", **record})
            if line is not None:
                logger.info("%s", line.decode())
        else:
            logger.info("Request %s: %s", event, record)

    def _dump(self, obj: GenerateReqInput, answers: list[dict[str, Any]]) -> None:
        assert self.dump_folder is not None
        line = _to_json({"request": dataclasses.asdict(obj), "answers": answers})
        if line is None:
            return
        try:
            with (self.dump_folder / "requests.jsonl").open("ab") as file:
                file.write(line + b"\n")
        except OSError as exc:
            logger.error("Stopped dumping requests to %s: %s", self.dump_folder, exc)
            self.dump_folder = None


def _to_json(record: dict[str, Any]) -> bytes | None:
    """One line; None, and an error in the log, for what JSON cannot hold in any form.

    A caller in this process may send objects that no HTTP client can: they are written as text.
    """
    try:
        return orjson.dumps(record, default=str, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as exc:
        logger.error("A request cannot be logged as JSON: %s", exc)
        return None


def _make_folder(path: str) -> Path | None:
    """The folder, created; None for the empty string, which turns dumping off."""
    if not path:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ValueError(f"dump_requests_folder {path!r} cannot be used: {exc}") from exc
    return folder
