"""Settings of a run: defaults, then a TOML or YAML file, then `--set a.b=c`; unknown keys are errors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rackserve.api.limits import Limits
from rackserve.api.logs import Kind as LogKind
from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.ranges import MAX_COUNT, MAX_SECONDS, require_range
from rackserve.live.runner import RunnerSpec, layout_of
from rackserve.live.supervisor import SupervisorConfig

WINDOWS_PER_SEQUENCE = 4
"""Resume states of one sequence on a rank: the one it began from, the two it always stores, and one where histories part; more
of those are stored as far as slots are free."""

BLOCKS_PER_WINDOW = 16
"""KV blocks for each stored resume state: of the blocks of one agent session only few end where somebody resumes."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP front end.

    served_model_name  name clients use; empty: the model's own
    tokenizer          folder of a tokenizer to use instead of the model's
    max_model_len      positions of prompt and output together; 0: what the model and the ranks' blocks allow
    grace              seconds that open answers get when the server is told to stop
    kv_events          where other routers hear what the rack holds, with token ids, such as tcp://127.0.0.1:5557. Whoever can
                       connect can read prompts; empty: nowhere
    kv_replay          where they get again what they missed
    stuck              seconds that work may wait on ranks of which none ends a step; then /ready and /health say so
    log                lines for requests on standard error: none, text or json
    metrics_aliases    /metrics has the numbers under vLLM's names, too
    otlp_endpoint      where to send traces (OTLP over HTTP), such as http://127.0.0.1:4318; empty: nowhere
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    tokenizer: str = ""
    max_model_len: int = 0
    grace: float = 30.0
    kv_events: str = ""
    kv_replay: str = ""
    stuck: float = 30.0
    log: LogKind = "none"
    metrics_aliases: bool = False
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if self.kv_replay and not self.kv_events:
            raise ConfigError("server.kv_replay is given without server.kv_events; give both")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port must be between 0 and 65535, got {self.port}")
        require_range("server", self, ("max_model_len",), 0, MAX_COUNT)
        require_range("server", self, ("grace",), 0, MAX_SECONDS)
        require_range("server", self, ("stuck",), 1.0, MAX_SECONDS)


class SecurityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask. See SECURITY.md.

    key_file      TOML file of keys, see `rackserve key`; empty: only the key in RACKSERVE_API_KEY, if there is one
    hosts         further names under which clients address the server
    open_metrics  /metrics needs no key
    keyless       without any key, listen on other addresses than loopback all the same
    """

    key_file: str = ""
    hosts: tuple[str, ...] = ()
    open_metrics: bool = False
    keyless: bool = False


class Settings(RackConfig, frozen=True, forbid_unknown_fields=True):
    """Everything a command can be told, in sections: those of the rack (see `RackConfig`), the model, server and supervisor.

    seed  names every random draw of a benchmark or simulation
    """

    runner: RunnerSpec = RunnerSpec(kind="llama")
    server: ServerConfig = ServerConfig()
    security: SecurityConfig = SecurityConfig()
    limits: Limits = Limits()
    supervisor: SupervisorConfig = SupervisorConfig()
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError("seed must fit 64 bits")
        if self.runner.synthetic_acceptance > self.scheduler.num_draft + 1:
            num_draft = self.scheduler.num_draft
            raise ConfigError(
                f"runner.synthetic_acceptance is {self.runner.synthetic_acceptance:g}: with scheduler.num_draft = {num_draft} "
                f"a step yields {num_draft + 1} tokens at most; raise the one or lower the other"
            )

    @property
    def rack(self) -> RackConfig:
        """The part that nodes see."""
        return RackConfig(**{name: getattr(self, name) for name in RackConfig.__struct_fields__})

    def sized(self) -> Settings:
        """These settings, with slots for resume state where the topology names none and the model has such state.

        May read the model's configuration.
        """
        if self.runner.kind == "llama":
            return self  # without such state, and its folder may not have been fetched yet
        layout, topology = layout_of(self.runner), self.topology
        wanted: dict[str, int] = {}
        if layout.has_window:
            stored = min(topology.prefill_blocks, topology.decode_blocks) // BLOCKS_PER_WINDOW
            wanted["rank_windows"] = WINDOWS_PER_SEQUENCE * self.scheduler.max_sequences + stored
        if layout.stores_state and topology.pool:
            wanted["segment_windows"] = topology.segment_blocks // BLOCKS_PER_WINDOW + 1
        missing = {name: number for name, number in wanted.items() if not getattr(topology, name)}
        return msgspec.structs.replace(self, topology=msgspec.structs.replace(topology, **missing))

    def as_text(self) -> str:
        """All settings, one `section.key = value` a line, for the head of a run."""
        return "\n".join(
            f"{name} = {msgspec.json.encode(value).decode()}" for name, value in _flatten(msgspec.to_builtins(self))
        )


def load_settings(path: str | None, overrides: Sequence[str], base: Settings | None = None) -> Settings:
    """Settings from `base`, then the file at `path`, then overrides of the form `a.b=c` (c in YAML: 3, true, text).

    Raises ConfigError naming the key, or FileFormatError naming the file.
    """
    tree: dict[str, Any] = msgspec.to_builtins(base or Settings())
    if path is not None:
        _merge(tree, _read(Path(path)), "")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override}: expected section.key=value")
        try:
            value = _parse(yaml.safe_load, text)
        except ValueError as error:
            raise ConfigError(f"--set {override[:100]}: the value is not YAML: {error}") from error
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        _merge(tree, value, "")
    try:
        return msgspec.convert(tree, Settings, strict=False)  # YAML reads 1e9 as text
    except OverflowError as error:
        raise ConfigError(f"a setting is out of range: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error))) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error})") from error
    is_toml = path.suffix == ".toml"
    try:
        found = _parse(tomllib.loads if is_toml else yaml.safe_load, text) or {}
    except ValueError as error:
        raise FileFormatError(f"{path}: not {'TOML' if is_toml else 'YAML'}: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{path}: expected sections with keys, got {type(found).__name__}")
    return found


def _parse(read: Callable[[str], Any], text: str) -> Any:
    """What `read` makes of `text`; a ValueError says in one line what is wrong."""
    try:
        return read(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:  # a number of too many digits is a plain ValueError
        raise ValueError(" ".join(str(error).split())) from error


def _merge(tree: dict[str, Any], changes: Any, at: str) -> None:
    """Lay `changes` over `tree`; every key must be there already."""
    if not isinstance(changes, dict):
        raise ConfigError(f"{at}: expected a section with keys, got {changes!r}")
    for key, value in changes.items():
        name = f"{at}.{key}" if at else str(key)
        if key not in tree:
            known = ", ".join(sorted(tree))
            raise ConfigError(f"unknown setting {name}; {'section ' + at if at else 'settings'} has: {known}")
        if isinstance(tree[key], dict):
            _merge(tree[key], value, name)
        else:
            tree[key] = value


def _flatten(tree: Any, at: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        rows.extend(_flatten(value, name) if isinstance(value, dict) else [(name, value)])
    return rows


def _readable(text: str) -> str:
    """msgspec's message with its path as a setting's name."""
    what, _, where = text.partition(" - at `$.")
    return f"setting {where.rstrip('`')}: {what}" if where else text
