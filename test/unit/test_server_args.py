"""ServerArgs: command line, YAML, construction by trainers, derived values and refusals."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang
from sglang import cli
from sglang.srt import server_args_defaults
from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner import resolve_kv_dtype
from sglang.srt.server_args import PortArgs, ServerArgs, prepare_server_args
from sglang.srt.server_args_availability import NOT_BUILT, default_of, warn_ignored
from sglang.srt.server_args_defaults import normalize
from sglang.srt.server_args_fields import LEGACY_FLAGS, human_int
from sglang.test.source_trees import syntax_tree

PACKAGE = Path(sglang.__file__).parent


def _cpu(**kwargs: Any) -> ServerArgs:
    return ServerArgs(**{"model_path": "m", "device": "cpu", **kwargs})


def _parse(*argv: object) -> ServerArgs:
    return prepare_server_args(["--model-path", "m", "--device", "cpu", *map(str, argv)])


def test_defaults_of_the_contract() -> None:
    args = _cpu()
    expected = {
        "tokenizer_path": "m",
        "served_model_name": "m",
        "host": "127.0.0.1",
        "port": 30000,
        "load_format": "auto",
        "weight_version": "default",
        "max_prefill_tokens": 16384,
        "chunked_prefill_size": 2048,
        "page_size": 1,
        "schedule_policy": "fcfs",
        "schedule_conservativeness": 1.0,
        "radix_eviction_policy": "lru",
        "decode_log_interval": 40,
        "watchdog_timeout": 300,
        "stream_interval": 1,
        "log_requests_level": 2,
        "hicache_mem_layout": "page_first",
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "kernel",
        "hicache_host_memory_fraction": 0.8,
        "tokenizer_metrics_custom_labels_header": "x-custom-labels",
        "cpu_weight_format": "auto",
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.url() == "http://127.0.0.1:30000"


def test_cpu_gets_float32_torch_native_and_no_graphs() -> None:
    args = _cpu()
    assert (args.dtype, args.attention_backend, args.sampling_backend) == (
        "float32",
        "torch_native",
        "pytorch",
    )
    assert args.disable_cuda_graph and args.disable_overlap_schedule
    assert _cpu(dtype="bfloat16").dtype == "bfloat16"


def test_overlap_can_be_tried_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", "1")
    assert not _cpu().disable_overlap_schedule
    assert _cpu(disable_overlap_schedule=True).disable_overlap_schedule


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--tp", 2], "tp_size", 2),
        (["--tensor-parallel-size", 2], "tp_size", 2),
        (["--dp", 2], "dp_size", 2),
        (["--data-parallel-size", 2], "dp_size", 2),
        (["--context-length", "1k"], "context_length", 1000),
        (["--context-length", "2Ki"], "context_length", 2048),
        (["--cuda-graph-max-bs", 4], "cuda_graph_max_bs_decode", 4),
        (["--cuda-graph-bs", 1, 2], "cuda_graph_bs_decode", [1, 2]),
        (["--bucket-e2e-request-latency", 0.5, 1], "bucket_e2e_request_latency", [0.5, 1.0]),
        (["--cpu-weight-format", "int8"], "cpu_weight_format", "int8"),
        (["--chunked-prefill-size", -1], "chunked_prefill_size", -1),
        (["--disable-overlap"], "disable_overlap_schedule", True),
        (["--custom-weight-loader"], "custom_weight_loader", []),
    ],
)
def test_flags_aliases_and_abbreviations(argv: list[object], field: str, value: object) -> None:
    assert getattr(_parse(*argv), field) == value


def test_every_field_has_a_flag_and_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    for spec in dataclasses.fields(ServerArgs):
        assert "--" + spec.name.replace("_", "-") in actions[spec.name].option_strings
        assert actions[spec.name].help


def test_defaults_of_the_parser_are_those_of_the_class() -> None:
    parsed, constructed = _parse("--random-seed", 1), _cpu(random_seed=1)
    assert parsed == constructed


def test_a_parser_that_renames_flags_still_works() -> None:
    class Prefixed(argparse.ArgumentParser):
        def add_argument(self, *names: Any, **options: Any) -> Any:
            renamed = [name.replace("--", "--sglang-", 1) for name in names]
            if "dest" in options:
                options["dest"] = "sglang_" + options["dest"]
            options.pop("required", None)
            return super().add_argument(*renamed, **options)

    parser = Prefixed(add_help=False)
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args(["--sglang-page-size", "16"])
    assert namespace.sglang_page_size == 16


def test_yaml_gives_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "model-path: from-yaml\npage_size: 16\ntp-size: 2\nskip-server-warmup: true\n"
        "enable-metrics: false\ncuda-graph-bs: [1, 2]\ndevice: cpu\nrevision: null\n"
    )
    args = prepare_server_args(["--config", str(config), "--tp", "4"])
    assert (args.model_path, args.page_size, args.tp_size) == ("from-yaml", 16, 4)
    assert args.skip_server_warmup and not args.enable_metrics
    assert args.cuda_graph_bs_decode == [1, 2]


@pytest.mark.parametrize("text", ["- a list\n", "a: [b\n", None])
def test_a_broken_yaml_file_is_a_clear_error(tmp_path: Path, text: str | None) -> None:
    config = tmp_path / "server.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ValueError, match="--config"):
        prepare_server_args(["--config", str(config), "--model", "m"])


@pytest.mark.parametrize("legacy", LEGACY_FLAGS, ids=lambda flag: flag.name)
def test_legacy_flags_are_ignored_with_a_warning(
    legacy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [legacy.name] + (["int8"] if legacy.takes_value else [])
    assert _parse(*argv, "--random-seed", 1) == _cpu(random_seed=1)
    assert f"{legacy.name} has no effect" in caplog.text


def test_legacy_keywords_are_dropped_and_unknown_ones_refused() -> None:
    args = ServerArgs.from_kwargs(model_path="m", device="cpu", enable_p2p_check=True)
    assert not hasattr(args, "enable_p2p_check")
    with pytest.raises(ValueError, match="not_a_flag is not a server argument"):
        ServerArgs.from_kwargs(model_path="m", device="cpu", not_a_flag=1)


def test_trainers_can_iterate_pickle_and_assign() -> None:
    args = _cpu(random_seed=3)
    names = {spec.name for spec in dataclasses.fields(ServerArgs)}
    assert {"model_path", "tp_size", "enable_memory_saver", "nccl_port"} <= names
    args.host = "::1"
    assert args.url() == "http://[::1]:30000"
    assert pickle.loads(pickle.dumps(args)) == args
    assert dataclasses.asdict(args)["host"] == "::1"


def test_a_torch_dtype_is_accepted() -> None:
    import torch

    assert _cpu(dtype=torch.bfloat16).dtype == "bfloat16"


def test_normalising_again_changes_nothing() -> None:
    args = _cpu()
    before = dataclasses.asdict(args)
    args.check()
    assert dataclasses.asdict(args) == before


def test_check_sees_values_assigned_later() -> None:
    args = _cpu()
    args.tp_size = 0
    with pytest.raises(ValueError, match="--tp-size must be at least 1"):
        args.check()


@pytest.mark.parametrize("row", NOT_BUILT, ids=lambda row: row.field)
def test_features_of_later_releases_are_refused_with_one_sentence(row: Any) -> None:
    default = default_of(row.field)
    other: Any = {bool: True, int: 2, str: "x", float: 0.5}.get(type(default), "x")
    if isinstance(default, list):
        other = ["x.y"]
    hint = next(f for f in dataclasses.fields(ServerArgs) if f.name == row.field)
    choices = hint.metadata["cli"].choices
    if choices is not None:
        allowed = row.allowed or (default,)
        other = next(choice for choice in choices if choice not in allowed)
    if row.field == "model_loader_extra_config":
        other = '{"a": 1}'
    wanted = str(hint.type)
    if wanted == "int | None":
        other = 8
    if wanted.startswith("list"):
        other = [8] if "int" in wanted else ["a=b"]
    with pytest.raises(ValueError, match="not available in this release") as caught:
        _cpu(**{row.field: other})
    text = str(caught.value)
    assert text.startswith("--" + row.field.replace("_", "-"))
    assert text.endswith(".") and "\n" not in text
    _cpu(**{row.field: default})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"page_size": 16, "chunked_prefill_size": 100}, "multiple of --page-size"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size must be positive"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static"),
        ({"port": 70000}, "--port"),
        ({"nnodes": 2, "tp_size": 2}, "needs --dist-init-addr"),
        ({"nnodes": 2, "tp_size": 3, "dist_init_addr": "h:1"}, "multiple of --nnodes"),
        ({"nnodes": 2, "node_rank": 2, "tp_size": 2, "dist_init_addr": "h:1"}, "--node-rank"),
        ({"dist_init_addr": "nonsense"}, "host:port"),
        ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, "only with"),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "exclude each other"),
        ({"json_model_override_args": "{"}, "not valid JSON"),
        ({"preferred_sampling_params": "[1]"}, "must be a JSON object"),
        ({"ssl_keyfile": "k"}, "given together"),
        ({"schedule_policy": "best"}, "is not one of"),
        ({"attention_backend": "best"}, "is not one of"),
        ({"dtype": "int4"}, "is not one of"),
        ({"log_level": "loud"}, "is not one of"),
        ({"tp_size": "2"}, "--tp-size must be an integer, not '2'"),
        ({"context_length": "many"}, "not an integer"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"log_requests_level": 4}, "--log-requests-level"),
        ({"model_path": ""}, "--model-path"),
        ({"page_size": 0}, "--page-size must be at least 1, not 0"),
        ({"random_seed": 99999999999999999999}, "--random-seed must be at most"),
        ({"num_threads": 5000}, "--num-threads must be at most"),
        ({"max_total_tokens": 1 << 40}, "--max-total-tokens must be at most"),
        (
            {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": "d",
                "cpu_weight_format": "bf16",
            },
            "no plain decode steps",
        ),
        ({"enable_multi_layer_eagle": True}, "needs --speculative-algorithm NEXTN or EAGLE"),
        (
            {
                "speculative_algorithm": "NEXTN",
                "enable_multi_layer_eagle": True,
                "speculative_num_steps": 2,
                "speculative_eagle_topk": 4,
            },
            "topk must be 1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _cpu(**kwargs)


def _fields_read_by_the_program() -> set[str]:
    """Names read from an object called like server arguments, anywhere but where they are checked.

    Names alone would not do: requests, for example, have fields of the same names.
    """
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name.startswith("server_args_"):
            continue
        text = path.read_text(encoding="utf-8")
        if "args" not in text and "getattr" not in text:
            continue  # most files
        owners = {"server_args", "_server_args", "args", "_args"}
        owners |= {"self"} if path.name == "server_args.py" else set()
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else None
                name = owner.id if isinstance(owner, ast.Name) else name
                if name in owners:
                    read.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "getattr" and isinstance(node.args[1], ast.Constant):
                    read.add(str(node.args[1].value))
    return read


def test_every_field_is_used_or_refused() -> None:
    read = _fields_read_by_the_program()
    assert {"page_size", "enable_metrics", "nccl_port"} <= read
    refused = {row.field for row in NOT_BUILT}
    fields = {spec.name for spec in dataclasses.fields(ServerArgs)}
    assert fields - read - refused == set()


def test_what_a_cpu_has_no_use_for_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    warn_ignored(_cpu())
    assert not caplog.records
    warn_ignored(_cpu(cuda_graph_bs_decode=[1, 2], base_gpu_id=1))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "--cuda-graph-bs-decode has no effect on CPU",
        "--base-gpu-id has no effect on CPU",
    ]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_an_8_bit_cache_needs_the_triton_backend(name: str) -> None:
    sentence = f"--kv-cache-dtype {name} needs --device cuda and --attention-backend triton."
    with pytest.raises(ValueError) as caught:
        _cpu(kv_cache_dtype=name)
    assert str(caught.value) == sentence
    with pytest.raises(ValueError) as caught:
        _cpu(device="cuda", attention_backend="torch_native", kv_cache_dtype=name)
    assert str(caught.value) == sentence
    assert _cpu(device="cuda", kv_cache_dtype=name).kv_cache_dtype == name
    with pytest.raises(ValueError, match="--kv-cache-dtype fp4_e2m1: .* not available"):
        _cpu(device="cuda", kv_cache_dtype="fp4_e2m1")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "float16"])
def test_16_bit_caches_go_with_every_backend(name: str) -> None:
    assert _cpu(kv_cache_dtype=name).kv_cache_dtype == name
    assert _cpu(device="cuda", kv_cache_dtype=name).kv_cache_dtype == name
    full = "bfloat16" if name.startswith("b") else "float16"
    assert resolve_kv_dtype(name, "float32") == getattr(torch, full)


def test_triton_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError) as caught:
        _cpu(attention_backend="triton")
    assert str(caught.value) == "--attention-backend triton needs --device cuda."
    assert _cpu(device="cuda", attention_backend="triton").attention_backend == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _cpu(attention_backend="triton").attention_backend == "triton"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"cuda_graph_config": "{bad"}, "--cuda-graph-config {bad: configuring CUDA graphs is"),
        ({"enable_lora": True}, "--enable-lora: serving LoRA adapters is"),
        ({"tool_call_parser": "x"}, "--tool-call-parser x: parsing tool calls is"),
    ],
)
def test_refusals_of_missing_features_are_sentences(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        _cpu(**kwargs)
    assert str(caught.value) == f"{text} not available in this release."


def test_legacy_flags_of_cuda_graphs() -> None:
    args = _parse("--cuda-graph-max-bs", 12, "--cuda-graph-bs", 1, 4, "--disable-cuda-graph")
    assert args.cuda_graph_max_bs_decode == 12
    assert args.cuda_graph_bs_decode == [1, 4]
    assert args.disable_cuda_graph
    assert _cpu(device="cuda", cuda_graph_backend_decode="full").disable_decode_cuda_graph is False
    assert _cpu(device="cuda", cuda_graph_backend_decode="disabled").disable_decode_cuda_graph
    for wrong in ([], [0, 4]):
        with pytest.raises(ValueError, match="--cuda-graph-bs-decode must list"):
            _cpu(cuda_graph_bs_decode=wrong)
    with pytest.raises(ValueError, match="--cuda-graph-max-bs-decode must be at least 1"):
        _cpu(cuda_graph_max_bs_decode=0)


def test_prefill_graphs() -> None:
    def cuda(**fields: Any) -> ServerArgs:
        return _cpu(device="cuda", **fields)

    assert cuda().cuda_graph_max_bs_prefill == 512
    assert _cpu().cuda_graph_max_bs_prefill is None
    assert cuda(cuda_graph_bs_prefill=[8]).cuda_graph_max_bs_prefill is None
    args = _parse("--cuda-graph-max-bs-prefill", 256, "--cuda-graph-bs-prefill", 64, 32)
    assert (args.cuda_graph_max_bs_prefill, args.cuda_graph_bs_prefill) == (256, [64, 32])
    assert cuda(cuda_graph_backend_prefill="full").cuda_graph_max_bs_prefill == 512
    sized = cuda(cuda_graph_backend_prefill="full", cuda_graph_bs_prefill=[8])
    assert sized.cuda_graph_max_bs_prefill is None
    assert not cuda(cuda_graph_max_bs_prefill=64).disable_prefill_cuda_graph
    assert cuda(cuda_graph_backend_prefill="disabled").disable_prefill_cuda_graph
    assert cuda(cuda_graph_max_bs_prefill=0).cuda_graph_max_bs_prefill == 0
    with pytest.raises(ValueError, match="--cuda-graph-max-bs-prefill must be at least 0"):
        cuda(cuda_graph_max_bs_prefill=-1)
    for wrong in ([], [0, 4]):
        with pytest.raises(ValueError, match="--cuda-graph-bs-prefill must list numbers of tokens"):
            cuda(cuda_graph_bs_prefill=wrong)


def test_an_abbreviated_config_flag_is_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("page-size: 16\n")
    with pytest.raises(ValueError, match="--config must be written in full"):
        _parse("--conf", tmp_path / "c.yaml")


def test_defaults_are_weaker_than_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("page-size: 16\n")
    weak = ["--model-path", "m", "--page-size", "8", "--port", "7"]
    args = prepare_server_args(["--config", str(tmp_path / "c.yaml")], weak)
    assert (args.model_path, args.page_size, args.port) == ("m", 16, 7)


def test_hicache_layout_rules() -> None:
    args = _cpu()
    args.enable_hierarchical_cache = True
    args.hicache_mem_layout, args.hicache_io_backend = "page_first_direct", "kernel"
    normalize(args)
    assert args.hicache_io_backend == "direct"
    args.hicache_mem_layout = "page_first"
    normalize(args)
    assert args.hicache_mem_layout == "page_first_direct"
    args.hicache_storage_backend, args.hicache_mem_layout = "mooncake", "layer_first"
    args.hicache_io_backend = "kernel"
    normalize(args)
    assert args.hicache_mem_layout == "page_first"


@pytest.mark.parametrize("ratio", [0, -2, float("nan"), float("inf")])
def test_a_host_pool_of_no_size_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="--hicache-ratio must be greater than 0, not"):
        _parse("--enable-hierarchical-cache", "--hicache-ratio", ratio)
    assert _parse("--enable-hierarchical-cache", "--hicache-ratio", 0.5).hicache_ratio == 0.5


def test_tiers_without_their_switch_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    storage = ("--hicache-storage-backend", "file")
    warn_ignored(_parse("--enable-hierarchical-cache", *storage))
    assert not caplog.messages
    warn_ignored(_parse(*storage, "--hicache-ratio", 3))
    assert caplog.messages == [
        "--hicache-ratio, --hicache-storage-backend: no effect without "
        "--enable-hierarchical-cache; KV is kept on the device only"
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("--speculative-use-rejection-sampling", "--speculative-accept-threshold-acc", 0.5),
            "--speculative-accept-threshold-acc, --speculative-use-rejection-sampling: no effect "
            "without --speculative-algorithm",
        ),
        (
            ("--speculative-ngram-capacity", 5),
            "--speculative-ngram-capacity: no effect without --speculative-algorithm NGRAM",
        ),
        (
            ("--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "/draft"),
            "--speculative-draft-model-path: no effect with --speculative-algorithm NGRAM, which "
            "has no draft model",
        ),
        (("--speculative-algorithm", "NGRAM", "--speculative-ngram-capacity", 50), None),
        ((), None),
    ],
)
def test_speculation_without_its_algorithm_is_warned_about(
    caplog: pytest.LogCaptureFixture, given: tuple[Any, ...], message: str | None
) -> None:
    args = _parse(*given)
    caplog.clear()
    warn_ignored(args)
    assert caplog.messages == ([] if message is None else [message])


def test_chunk_default_is_a_multiple_of_the_page() -> None:
    args = _cpu(page_size=48)
    assert args.chunked_prefill_size is not None
    assert args.chunked_prefill_size % 48 == 0 and args.chunked_prefill_size > 1900


def test_deterministic_inference_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "1")
    with pytest.raises(ValueError, match="--enable-deterministic-inference"):
        _cpu()


def test_threads_default_to_the_cores_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(server_args_defaults, "available_cpu_count", lambda: 12)
    assert _cpu(tp_size=2, dp_size=2).num_threads == 3
    assert _cpu(tp_size=16).num_threads == 1
    assert _cpu(num_threads=5).num_threads == 5


def test_ranks_and_gpus_of_a_host() -> None:
    args = _cpu(tp_size=4, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000", base_gpu_id=1)
    assert list(args.local_tp_ranks()) == [2, 3]
    assert [args.gpu_id(rank) for rank in args.local_tp_ranks()] == [1, 2]
    replicas = _cpu(tp_size=2, dp_size=2, gpu_id_step=2)
    assert [replicas.gpu_id(tp, dp) for dp in range(2) for tp in range(2)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("1k", 1000), ("1Ki", 1024), ("1.5k", 1500), ("2M", 2_000_000)]
)
def test_human_int(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1x", "0.5", "1 2"])
def test_human_int_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        human_int(text)


def test_port_args_have_one_input_a_replica() -> None:
    ports = PortArgs.init_new(_cpu(dp_size=2))
    try:
        assert len(set(ports.scheduler_input_ipc_names)) == 2
        assert len(set(ports.dist_init_addrs)) == 2
        assert pickle.loads(pickle.dumps(ports)) == ports
    finally:
        ports.remove_files()
    assert not Path(ports.ipc_dir).exists()


def test_long_temporary_folders_fall_back_to_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    ports = PortArgs.init_new(_cpu())
    ports.remove_files()
    assert ports.tokenizer_ipc_name.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["serve", "--model-path", "m", "--no-such-flag"], "unrecognized arguments"),
        (["serve", "--model-path", "m", "--tp", "two"], "invalid int value"),
        (["serve", "--model-path", "m", "--page-size", "16", "--chunked", "7"], "multiple"),
        (["serve", "--model-path", "m", "--enable-lora"], "serving LoRA adapters is not available"),
        (["nonsense"], "unknown command"),
    ],
)
def test_the_command_reports_errors_in_one_line(
    argv: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang.launch_server.configure_logger", lambda level: None)
    assert _exit_code(argv) == 2
    _check_report(capsys.readouterr().err, text)


def _exit_code(argv: list[str]) -> int | str | None:
    """Of the command, run in this process."""
    try:
        return cli.main(argv)
    except SystemExit as left:
        return left.code


def _check_report(stderr: str, text: str) -> None:
    assert text in stderr and "Traceback" not in stderr
    assert stderr.strip().splitlines()[-1].startswith("sglang: error:")


def test_a_process_of_its_own_reports_errors_too() -> None:
    command = [sys.executable, "-m", "sglang.cli", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    _check_report(done.stderr, "--model-path")


def test_help_and_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.launch_server.configure_logger", lambda level: None)
    for argv, text in ((["serve", "--help"], "--page-size"), (["version"], "sglang 0.")):
        assert not _exit_code(argv)
        assert text in capsys.readouterr().out


def test_help_says_defaults_what_is_missing_and_every_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        _parse("--help")
    # Lines are broken to the width of the terminal.
    text = " ".join(capsys.readouterr().out.split())
    assert "Port that the HTTP server listens on. Default: 30000." in text
    assert "Serve LoRA adapters. Not available in this release." in text
    assert "Available in this release: cache." in text
    assert all(variable.name in text for variable in envs.all())


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("hicache_storage_backend_extra_config", {"prefetch_threshold": 16}, "text"),
        ("hicache_ratio", "abc", "a number"),
        ("tp_size", 1.5, "an integer"),
        ("enable_metrics", "yes", "true or false"),
        ("cuda_graph_bs_decode", 4, "a list"),
    ],
)
def test_constructed_settings_of_a_wrong_type(name: str, value: object, wanted: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{flag} must be {wanted}, not "):
        _cpu(**{name: value})


def test_storage_settings_without_storage_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = {"enable_hierarchical_cache": True}
    warn_ignored(_cpu(**tiers, hicache_storage_backend_extra_config="{}"))
    assert "--hicache-storage-backend-extra-config: no effect" in caplog.text
    caplog.clear()
    warn_ignored(
        _cpu(**tiers, hicache_storage_backend="file", hicache_storage_backend_extra_config="{}")
    )
    assert not caplog.records
