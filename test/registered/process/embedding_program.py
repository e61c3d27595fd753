"""A program that embeds a server as RL trainers do: its own uvicorn, requests without HTTP.

    python embedding_program.py OLD_MODEL NEW_MODEL

Launches the engine's processes, serves the application on a loop of its own, generates through the
tokenizer manager, sends itself new weights over HTTP. Prints one JSON line with what it saw.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import requests
import uvicorn
from safetensors.torch import load_file

import sglang.srt.entrypoints.engine
from sglang.srt.entrypoints.http_server import (
    Engine,
    ServerArgs,
    _GlobalState,
    app,
    set_global_state,
)
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import MultiprocessingSerializer, get_free_port

PROMPT = [(7 * i + 3) % 190 for i in range(30)]
PARAMS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
configured: list[Any] = []


async def generate(manager: Any, **params: Any) -> dict[str, Any]:
    request = GenerateReqInput(
        rid=None, input_ids=PROMPT, sampling_params=PARAMS | params, return_logprob=True
    )
    answer: dict[str, Any] = await anext(manager.generate_request(request, None))
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    return answer


def push(url: str, weights: Path) -> None:
    named = list(load_file(weights / "model.safetensors").items())
    body = {
        "serialized_named_tensors": [MultiprocessingSerializer.serialize(named, output_str=True)],
        "load_format": None,
        "flush_cache": True,
    }
    reply = requests.post(f"{url}/update_weights_from_tensor", json=body, timeout=60)
    assert reply.status_code == 200 and reply.json()["success"], reply.text


async def main(old: str, new: str) -> dict[str, Any]:
    names: Any = sglang.srt.entrypoints.engine
    names._set_envs_and_config = configured.append
    server_args = ServerArgs(
        model_path=old,
        device="cpu",
        max_total_tokens=1024,
        num_threads=1,
        enable_memory_saver=True,
        enable_metrics=True,
        log_level="error",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
    )
    manager, templates, port_args, schedulers, watchdog = Engine._launch_subprocesses(
        server_args=server_args,
        init_tokenizer_manager_func=names.init_tokenizer_manager,
        run_scheduler_process_func=names.run_scheduler_process,
        run_detokenizer_process_func=names.run_detokenizer_process,
    )
    assert manager is not None and templates is not None
    info = schedulers.scheduler_infos[0]
    set_global_state(
        _GlobalState(tokenizer_manager=manager, template_manager=templates, scheduler_info=info)
    )
    state: Any = app
    state.is_single_tokenizer_mode = True
    state.server_args = server_args
    state.warmup_thread_kwargs = {"server_args": server_args}
    state.warmup_thread_args = (server_args, None, None)
    port = get_free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    manager.server_status = ServerStatus.Up
    url = f"http://127.0.0.1:{port}"
    seen: dict[str, Any] = {"status": info["status"], "slots": info["max_total_num_tokens"]}
    seen["old"] = (await generate(manager))["output_ids"]

    running = asyncio.create_task(generate(manager, max_new_tokens=900))
    while not manager.rid_to_state:
        await asyncio.sleep(0.01)
    await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
    seen["aborted"] = (await running)["meta_info"]["finish_reason"]["type"]
    await manager.release_memory_occupation(
        ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]), None
    )
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]), None)
    await asyncio.to_thread(push, url, Path(new))
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
    await manager.continue_generation(ContinueGenerationReqInput())
    seen["new"] = (await generate(manager))["output_ids"]

    health = await asyncio.to_thread(requests.get, f"{url}/health", timeout=30)
    seen["health"] = health.status_code
    seen["configured"] = len(configured)
    seen["failure"] = watchdog.failure
    server.should_exit = True
    await serving
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
