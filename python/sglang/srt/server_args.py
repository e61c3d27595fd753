"""`ServerArgs`: all settings of a server, from keywords, the command line or a YAML file.

A plain mutable dataclass, because trainers iterate `dataclasses.fields`, pickle it, assign to
it and construct it directly; values are completed and checked in `__post_init__`. `PortArgs`
holds the addresses by which the processes of one server reach each other; the launcher creates
it and hands it to every process.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.environ import envs
from sglang.srt.server_args_availability import availability
from sglang.srt.server_args_defaults import normalize
from sglang.srt.server_args_fields import LEGACY_FLAGS, CliArg, ServerArgsFields
from sglang.srt.server_args_validation import validate
from sglang.srt.utils.liveness import LivenessCounter
from sglang.srt.utils.network import NetworkAddress, get_free_ports
from sglang.srt.utils.owned_folder import make_owned_folder, remove_owned_folder

logger = logging.getLogger(__name__)

# Unix socket paths end at 107 bytes; longer temporary folders fall back to TCP.
_MAX_IPC_PATH = 100


@dataclass
class ServerArgs(ServerArgsFields):
    """Settings of one server. See `server_args_fields` for every field."""

    def __post_init__(self) -> None:
        normalize(self)
        validate(self)

    def check(self) -> None:
        """Complete and check again, after fields were assigned. Raises ValueError."""
        normalize(self)
        validate(self)

    def model_options(self) -> dict[str, Any]:
        """What `ModelConfig.from_path` is to be told beside the path."""
        return {
            "dtype": self.dtype,
            "context_length": self.context_length,
            "override_args": self.json_model_override_args,
            "trust_remote_code": self.trust_remote_code,
            "device": self.device,
        }

    def url(self) -> str:
        """Base URL of the HTTP server."""
        scheme = "https" if self.ssl_certfile else "http"
        return NetworkAddress(self.host, self.port).to_url(scheme)

    def local_tp_ranks(self) -> range:
        """The tensor-parallel ranks that run on this host."""
        per_node = self.tp_size // self.nnodes
        return range(self.node_rank * per_node, (self.node_rank + 1) * per_node)

    def gpu_id(self, tp_rank: int, dp_rank: int = 0) -> int:
        """The CUDA device index of a rank on its host."""
        per_node = self.tp_size // self.nnodes
        return self.base_gpu_id + (dp_rank * per_node + tp_rank % per_node) * self.gpu_id_step

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Construct from keywords, dropping (with a warning) fields of older releases."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        legacy = {flag.name[2:].replace("-", "_") for flag in LEGACY_FLAGS}
        for name in [name for name in kwargs if name not in known]:
            if name not in legacy:
                raise ValueError(f"{name} is not a server argument.")
            logger.warning("%s has no effect in this release", name)
            del kwargs[name]
        return cls(**kwargs)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add one flag a field (and the ignored legacy flags) to `parser`."""
        hints = typing.get_type_hints(ServerArgs)
        for spec in dataclasses.fields(ServerArgs):
            _add_flag(parser, spec, hints[spec.name])
        parser.add_argument(
            "--config", type=str, default=None, help="YAML file of defaults for these flags."
        )
        for legacy in LEGACY_FLAGS:
            options: dict[str, Any] = {"nargs": 1} if legacy.takes_value else {"nargs": 0}
            parser.add_argument(
                legacy.name,
                dest=_legacy_dest(legacy.name),
                action=_IgnoredFlag,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **options,
            )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Construct from a parsed namespace; attributes that are no fields are ignored."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


class _IgnoredFlag(argparse.Action):
    """A flag of an older release: say so and go on."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        logger.warning("%s has no effect in this release", self.option_strings[0])


def _legacy_dest(flag: str) -> str:
    return "legacy_" + flag[2:].replace("-", "_")


def _element_type(hint: Any) -> type:
    """The scalar type behind `T`, `T | None`, `list[T]` and `list[T] | None`."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in hint.__args__ if part is not type(None))
    if typing.get_origin(hint) is list:
        hint = hint.__args__[0]
    assert isinstance(hint, type)
    return hint


def _add_flag(parser: argparse.ArgumentParser, spec: dataclasses.Field[Any], hint: Any) -> None:
    cli: CliArg = spec.metadata["cli"]
    names = ["--" + spec.name.replace("_", "-"), *cli.aliases]
    help_text = _help_of(spec, cli)
    if hint is bool:
        parser.add_argument(
            *names, dest=spec.name, action="store_true", default=spec.default, help=help_text
        )
        return
    options: dict[str, Any] = {"type": _parser_of(cli.parse or _element_type(hint))}
    if cli.choices is not None:
        options["choices"] = list(cli.choices)
    if cli.nargs is not None:
        options["nargs"] = cli.nargs
    if spec.default is not MISSING:
        options["default"] = spec.default
    elif spec.default_factory is not MISSING:
        options["default"] = spec.default_factory()
    else:
        options["required"] = True
    parser.add_argument(*names, dest=spec.name, help=help_text, **options)


def _help_of(spec: dataclasses.Field[Any], cli: CliArg) -> str:
    """The field's sentence, its default where that says something, and what of it is missing."""
    parts = [cli.help]
    if isinstance(spec.default, str | int | float) and not isinstance(spec.default, bool):
        parts.append(f"Default: {spec.default}.")
    parts.append(availability(spec.name))
    return " ".join(part for part in parts if part)


def _environment_help() -> str:
    """The variables that the server reads, formatted for the end of `--help`."""
    lines = ["environment variables:"]
    for variable in envs.all():
        default = "" if variable.default is None else f" Default: {variable.default}."
        lines.append(f"  {variable.name}")
        lines += textwrap.wrap(
            f"{variable.__doc__}{default}", 80, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


def _parser_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show the parser's own sentence instead of "invalid value"."""
    if parse in (str, int, float):
        return parse

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of leaving the process, so that callers decide."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _config_argv(path: str) -> list[str]:
    """Turn a YAML mapping into flags: true is a bare flag, false and null leave the default."""
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--config {path} must hold a mapping of flags to values")
    argv: list[str] = []
    for key, value in loaded.items():
        flag = "--" + str(key).replace("_", "-")
        if value is None or value is False:
            continue
        argv.append(flag)
        if isinstance(value, list):
            argv.extend(str(item) for item in value)
        elif value is not True:
            argv.append(str(value))
    return argv


def prepare_server_args(argv: Sequence[str], defaults: Sequence[str] = ()) -> ServerArgs:
    """Parse command-line flags. Raises ValueError; exits only for `--help`.

    Flags of a `--config` file come first, so that those on the command line win; `defaults` are
    flags that are weaker than both.
    """
    argv = [str(item) for item in argv]
    finder = _Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=None)
    config = finder.parse_known_args(argv)[0].config
    if config is not None:
        argv = _config_argv(config) + argv
    parser = _Parser(
        prog="sglang serve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_environment_help(),
    )
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args([*defaults, *argv])
    if namespace.config != config:
        # An abbreviation, which the search for the file above does not see.
        raise ValueError("--config must be written in full, and only once, outside the file")
    return ServerArgs.from_cli_args(namespace)


@dataclass
class PortArgs:
    """Addresses inside one server; every message channel has exactly one reader, which binds."""

    ipc_dir: str
    # The front reads here: detokenised output and control replies.
    tokenizer_ipc_name: str
    # The detokenizer reads here.
    detokenizer_ipc_name: str
    # Rank 0 of replica i reads at index i.
    scheduler_input_ipc_names: list[str]
    # host:port where the tensor-parallel ranks of replica i meet.
    dist_init_addrs: list[str] = field(default_factory=list)
    # Counter file of `utils.liveness`; index = dp_rank * tp_size + tp_rank.
    liveness_path: str = ""

    @property
    def scheduler_input_ipc_name(self) -> str:
        """The input address of replica 0."""
        return self.scheduler_input_ipc_names[0]

    @classmethod
    def init_new(cls, server_args: ServerArgs) -> PortArgs:
        """Make the folder of sockets and counters, and choose free addresses."""
        ipc_dir = make_owned_folder("sglang-ipc-")
        names = ["tokenizer", "detokenizer"]
        names += [f"scheduler{rank}" for rank in range(server_args.dp_size)]
        addresses = _channel_addresses(ipc_dir, names)
        liveness_path = os.path.join(ipc_dir, "liveness")
        LivenessCounter.create(liveness_path, server_args.dp_size * server_args.tp_size)
        return cls(
            ipc_dir=ipc_dir,
            tokenizer_ipc_name=addresses[0],
            detokenizer_ipc_name=addresses[1],
            scheduler_input_ipc_names=addresses[2:],
            dist_init_addrs=_dist_addresses(server_args),
            liveness_path=liveness_path,
        )

    def remove_files(self) -> None:
        """Delete sockets and counters. Called by the launcher after the processes ended."""
        remove_owned_folder(self.ipc_dir)


def _channel_addresses(ipc_dir: str, names: list[str]) -> list[str]:
    paths = [os.path.join(ipc_dir, name) for name in names]
    if max(len(path) for path in paths) <= _MAX_IPC_PATH:
        return [f"ipc://{path}" for path in paths]
    return [f"tcp://127.0.0.1:{port}" for port in get_free_ports(len(names))]


def _dist_addresses(server_args: ServerArgs) -> list[str]:
    if server_args.dist_init_addr is not None:
        base = NetworkAddress.parse(server_args.dist_init_addr)
    elif server_args.nccl_port is not None:
        base = NetworkAddress("127.0.0.1", server_args.nccl_port)
    else:
        ports = get_free_ports(server_args.dp_size)
        return [f"127.0.0.1:{port}" for port in ports]
    return [str(NetworkAddress(base.host, base.port + rank)) for rank in range(server_args.dp_size)]
