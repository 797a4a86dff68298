"""Settings of a run: defaults, a TOML or YAML file, environment variables, `--set a.b=c`; unknown keys are errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

from rackserve.api.limits import Limits
from rackserve.api.logs import Kind as LogKind
from rackserve.assemble import RackConfig
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.ranges import MAX_COUNT, MAX_SECONDS, require_range
from rackserve.base.topology import ROLES
from rackserve.hints import hint_for_setting
from rackserve.live.runner import RunnerSpec, layout_of
from rackserve.live.supervisor import SupervisorConfig

WINDOWS_PER_SEQUENCE = 4
"""Resume states of one sequence on a rank: the one it began from, the two it always stores, and one where histories part; more
of those are stored as far as slots are free."""

BLOCKS_PER_WINDOW = 16
"""KV blocks for each stored resume state: of the blocks of one agent session only few end where somebody resumes."""

QUEUED_REQUESTS = 256
"""Requests that a server books on one prefill rank, unless told otherwise."""

QUEUED_CAPACITIES = 4
"""Tokens of work that it books there, in multiples of what the rank's KV holds: one prompt of any length, and some more."""


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP front end.

    served_model_name  name clients use; empty: the model's own
    tokenizer          folder of a tokenizer to use instead of the model's
    tool_call_parser   how tool calls are read from answers: none, hermes or deepseek_v41; auto: as the model writes them
    reasoning_parser   how reasoning is: none, qwen3, deepseek_r1 or deepseek_v41; auto: as the model writes it
    trust_template     render a chat template that cannot be held to bounds
    max_model_len      positions of prompt and output together; 0: what the model and the ranks' blocks allow
    grace              seconds that open answers get when the server is told to stop
    kv_events          where other routers hear what the rack holds, with token ids, such as tcp://127.0.0.1:5557. Whoever can
                       connect can read prompts; empty: nowhere
    kv_replay          where they get again what they missed
    stuck              seconds that work may wait on ranks of which none ends a step; then /ready and /health say so
    log                lines for requests on standard error: none, text or json
    metrics_aliases    /metrics has the numbers under vLLM's names, too
    otlp_endpoint      where to send traces (OTLP over HTTP), such as http://127.0.0.1:4318; empty: nowhere
    frontier           curve that the page draws behind the operating point: a frontier file, or a run's summary
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    tokenizer: str = ""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_template: bool = False
    max_model_len: int = 0
    grace: float = 30.0
    kv_events: str = ""
    kv_replay: str = ""
    stuck: float = 30.0
    log: LogKind = "none"
    metrics_aliases: bool = False
    otlp_endpoint: str = ""
    frontier: str = ""

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

    @property
    def engine(self) -> RunnerSpec:
        """The runner of every rank, with one path that all of them have: paths differ in the last bits.

        Native kernels of DeepSeek-V4.1 do not spread experts over ranks: where one role's are, torch computes everywhere.
        """
        spread = any(self.topology.group_size(role) > 1 for role in ROLES)
        if spread and self.runner.kind == "deepseek_v41" and self.runner.kernels == "auto":
            return msgspec.structs.replace(self.runner, kernels="torch")
        return self.runner

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
            f"{name} = {msgspec.json.encode(value).decode()}" for name, value in flatten(msgspec.to_builtins(self))
        )


ENVIRONMENT = "RACKSERVE_"
"""RACKSERVE_SERVER__PORT=80 sets server.port, RACKSERVE_SEED=3 seed; values are in YAML."""


class Resolved(msgspec.Struct, frozen=True):
    """Settings, and of each that is not a default where its value is from: "file PATH:LINE", a variable's name or "--set"."""

    settings: Settings
    origins: dict[str, str]

    def for_clients(self) -> Settings:
        """The settings of a server of clients nobody knows: what was not given is bounded, and fair to short requests.

        A simulation or a benchmark sends no more than it was told to; there nothing is refused unless asked for.
        """
        settings = self.settings
        tokens = QUEUED_CAPACITIES * settings.topology.prefill_blocks * settings.runner.block_tokens
        defaults: dict[str, dict[str, Any]] = {
            "router": {
                "max_queued_requests_per_rank": QUEUED_REQUESTS,
                "max_queued_tokens_per_rank": min(tokens, MAX_COUNT),
            },
            "scheduler": {"order": "shortest_first"},
        }
        parts = {}
        for section, values in defaults.items():
            missing = {name: value for name, value in values.items() if f"{section}.{name}" not in self.origins}
            parts[section] = msgspec.structs.replace(getattr(settings, section), **missing)
        return msgspec.structs.replace(settings, **parts)


def load_settings(
    path: str | None,
    overrides: Sequence[str],
    base: Settings | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings that `resolve` finds."""
    return resolve(path, overrides, base, environment).settings


def resolve(
    path: str | None,
    overrides: Sequence[str],
    base: Settings | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Settings from `base`, then the file at `path`, then environment variables, then overrides of the form `a.b=c`.

    c is in YAML (3, true, text). Raises ConfigError naming the key, or FileFormatError naming the file.
    """
    tree: dict[str, Any] = msgspec.to_builtins(base or Settings())
    origins: dict[str, str] = {}
    if path is not None:
        text, found = _read(Path(path))
        _merge(tree, found, "", lambda name: f"file {path}:{_line_of(text, name)}", origins)
    for variable, value in sorted((environment or {}).items()):
        name = _setting_of(variable, tree)
        if name:
            _merge(tree, _nested(name, _value(variable, value)), "", _from(variable), origins)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override}: expected section.key=value")
        _merge(tree, _nested(key.strip(), _value(f"--set {override[:100]}", value)), "", _from("--set"), origins)
    try:
        return Resolved(msgspec.convert(tree, Settings, strict=False), origins)  # YAML reads 1e9 as text
    except OverflowError as error:
        raise ConfigError(f"a setting is out of range: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error), origins)) from error


def _setting_of(variable: str, tree: Mapping[str, Any]) -> str:
    """The setting that an environment variable is for; "" if it is for something else."""
    name = variable.removeprefix(ENVIRONMENT).lower()
    if not variable.startswith(ENVIRONMENT):
        return ""
    if "__" in name:
        return name.replace("__", ".")
    return name if name in tree and not isinstance(tree[name], dict) else ""


def _nested(name: str, value: Any) -> Any:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def _value(where: str, text: str) -> Any:
    try:
        return _parse(_yaml, text)
    except ValueError as error:
        raise ConfigError(f"{where}: the value is not YAML: {error}") from error


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a settings file, and what it says."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read ({error})") from error
    is_toml = path.suffix == ".toml"
    try:
        found = _parse(tomllib.loads if is_toml else _yaml, text)
    except ValueError as error:
        raise FileFormatError(f"{path}: not {'TOML' if is_toml else 'YAML'}: {error}") from error
    if not isinstance(found, dict | None):
        raise FileFormatError(f"{path}: expected sections with keys, got {type(found).__name__}")
    return text, found or {}


class _Loader(yaml.SafeLoader):
    """Without aliases: a few lines of them can stand for more values than fit the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # a safe loader with less


def _parse(read: Callable[[str], Any], text: str) -> Any:
    """What `read` makes of `text`; a ValueError says in one line what is wrong."""
    try:
        return read(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (ValueError, yaml.YAMLError) as error:  # a number of too many digits is a plain ValueError
        raise ValueError(" ".join(str(error).split())) from error


def _line_of(text: str, name: str) -> int:
    """The line of a settings file on which `name` is set, as far as that can be seen without a parser; else 1."""
    lines, at = text.splitlines(), 0
    for part in name.split("."):
        wanted = re.compile(rf"""[\s\[{{,.]*["']?{re.escape(part)}["']?\s*[\]:=.]""")
        at = next((place for place in range(at, len(lines)) if wanted.match(lines[place])), at)
    return at + 1


Origin = Callable[[str], str]
"""Where the setting of that name is from."""


def _from(origin: str) -> Origin:
    return lambda _: origin


def _merge(tree: dict[str, Any], changes: Any, at: str, origin: Origin, origins: dict[str, str], top: Any = None) -> None:
    """Lay `changes` over `tree`, which is in `top` at `at`; every key must be there already."""
    top = tree if top is None else top
    if not isinstance(changes, dict):
        raise ConfigError(f"{_told(origin, at)}{at}: expected a section with keys, got {repr(changes)[:100]}")
    for key, value in changes.items():
        name = f"{at}.{key}" if at else str(key)
        if key not in tree:
            known = f"{'section ' + at if at else 'settings'} has: {', '.join(sorted(tree))}"
            hint = hint_for_setting(name, [each for each, _ in flatten(top)])
            raise ConfigError(f"{_told(origin, name)}unknown setting {name}; {known}{hint}")
        if isinstance(tree[key], dict):
            _merge(tree[key], value, name, origin, origins, top)
        else:
            tree[key] = value
            origins[name] = origin(name)


def _told(origin: Origin, name: str) -> str:
    """Where a wrong setting is, unless it is on the command line, where everyone sees it."""
    told = origin(name)
    return "" if told == "--set" else f"{told.removeprefix('file ')}: "


def flatten(tree: Any, at: str = "") -> list[tuple[str, Any]]:
    """(section.key, value) of all settings in a tree of them."""
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{at}.{key}" if at else key
        rows.extend(flatten(value, name) if isinstance(value, dict) else [(name, value)])
    return rows


def _readable(text: str, origins: Mapping[str, str]) -> str:
    """msgspec's message with its path as a setting's name, and where that was set."""
    what, _, where = text.partition(" - at `$.")
    name = where.rstrip("`")
    origin = origins.get(name, "--set")
    if what.startswith("Invalid enum value"):
        what += f"; it is one of {', '.join(map(str, _choices(name)))}"
    return f"setting {name}: {what}{'' if origin == '--set' else f' ({origin})'}" if where else text


def _choices(name: str) -> tuple[object, ...]:
    """The values that a setting of fixed ones may have."""
    at: Any = Settings
    for part in name.split("."):
        at = get_type_hints(at)[part]
    return get_args(at)
