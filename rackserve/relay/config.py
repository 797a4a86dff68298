"""What `rackserve route` can be told: the workers, how requests are keyed and placed, and every limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec
import yaml

from rackserve.api.limits import MAX_BODY_BYTES, Limits
from rackserve.base.errors import ConfigError, FileFormatError
from rackserve.base.ids import Rank
from rackserve.base.ranges import MAX_COUNT, MAX_SECONDS, MIN_SECONDS, require_range
from rackserve.config import SecurityConfig
from rackserve.route.placement import RouterConfig

WorkerRole = Literal["whole", "prefill", "decode"]
PairForm = Literal["vllm", "sglang"]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # beyond 65535: ValueError
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not (parts.query or parts.username)


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server.

    url              where it answers, such as http://10.0.0.1:8000
    role             whole: does all of a request; prefill or decode: one half of it (see `RouteConfig.pairs`)
    dp_ranks         data-parallel ranks it has; above 1 each request names its rank in X-data-parallel-rank
    events           where it publishes KV events, such as tcp://10.0.0.1:5557; rank i's port is i higher. Empty: it does not,
                     and what it holds is learned from what is sent there
    replay           where it replays KV events
    capacity_tokens  tokens each rank's KV cache holds; 0: unknown
    bootstrap_port   prefill workers of SGLang: where decode workers meet them
    """

    url: str
    role: WorkerRole = "whole"
    dp_ranks: int = 1
    events: str = ""
    replay: str = ""
    capacity_tokens: int = 0
    bootstrap_port: int = 8998

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ConfigError(f"worker {self.url!r}: expected an address such as http://10.0.0.1:8000")
        if self.role not in get_args(WorkerRole):
            raise ConfigError(f"worker {self.url}: role {self.role!r} is unknown; choose whole, prefill or decode")
        if self.replay and not self.events:
            raise ConfigError(f"worker {self.url}: replay is given without events; give both")
        require_range("worker", self, ("dp_ranks",), 1, 1024)
        require_range("worker", self, ("capacity_tokens",), 0, MAX_COUNT)
        require_range("worker", self, ("bootstrap_port",), 1, 65535)

    @property
    def name(self) -> str:
        """How logs and metrics call it: host:port."""
        return urlsplit(self.url).netloc

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(self.name, number) for number in range(self.dp_ranks))


class Retries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a request is tried again elsewhere, and when a worker is left alone.

    attempts    tries of one request in all, each on another worker as far as there are some; never after its first byte
    budget      tries again per request over all requests; above it failures are told instead of repeated
    failures    failures of a worker within `window` seconds that open its circuit
    rest        seconds a worker is left alone then; after that one request tries it
    """

    attempts: int = 3
    budget: float = 0.2
    failures: int = 5
    window: float = 30.0
    rest: float = 10.0

    def __post_init__(self) -> None:
        require_range("retries", self, ("attempts", "failures"), 1, 100)
        require_range("retries", self, ("budget",), 0, 100)
        require_range("retries", self, ("window", "rest"), MIN_SECONDS, MAX_SECONDS)


class Waits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every wait, in seconds.

    queue       for a place on a worker
    head        for the first byte of an answer
    gap         for each further piece of it
    total       for a whole answer
    probe       between looks at a worker's health, and for one look's answer
    grace       that open answers get when the router is told to stop
    """

    queue: float = 30.0
    head: float = 600.0
    gap: float = 300.0
    total: float = 3600.0
    probe: float = 2.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        require_range("waits", self, self.__struct_fields__, 0.001, MAX_SECONDS)


class Records(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learned records of workers without KV events.

    tokens  that a rank without `capacity_tokens` is taken to hold
    age     seconds after which what nobody asked for again counts as gone
    """

    tokens: int = 2_000_000
    age: float = 3600.0

    def __post_init__(self) -> None:
        require_range("records", self, ("tokens",), 1, MAX_COUNT)
        require_range("records", self, ("age",), MIN_SECONDS, MAX_SECONDS)


class RouteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it.

    tokenizer        folder of the workers' model, to key prompts as they do; `numbers`: prompts are token ids. Empty: prompts
                     are keyed by their text, four bytes a token, which suits learned records only
    block_tokens     tokens of a key; for workers with KV events their block size. 0: 16, or 128 of text
    pairs            form in which prefill and decode workers are asked for one request
    trust_template   render a chat template that cannot be held to bounds
    body_bytes       length of a request body; more is 413
    tenant_requests  open calls of one tenant; more are refused with 429
    running_tokens   tokens of prefill an answer under way counts for
    queued           requests that may wait for a place on a worker; more get 429
    """

    workers: tuple[WorkerConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    tokenizer: str = ""
    block_tokens: int = 0
    pairs: PairForm = "vllm"
    trust_template: bool = False
    body_bytes: int = Limits().body_bytes
    tenant_requests: int = Limits().tenant_requests
    running_tokens: int = 64
    queued: int = 1000
    router: RouterConfig = RouterConfig(max_queued_requests_per_rank=256)
    retries: Retries = Retries()
    waits: Waits = Waits()
    records: Records = Records()
    security: SecurityConfig = SecurityConfig()

    def __post_init__(self) -> None:
        require_range("route", self, ("port",), 0, 65535)
        require_range("route", self, ("block_tokens",), 0, 4096)
        require_range("route", self, ("running_tokens", "queued"), 0, MAX_COUNT)
        require_range("route", self, ("body_bytes",), 1, MAX_BODY_BYTES)
        require_range("route", self, ("tenant_requests",), 1, MAX_COUNT)
        names = [worker.name for worker in self.workers]
        if not names:
            raise ConfigError("no workers; name them with --worker URL or under `workers` in --config")
        if len(set(names)) < len(names):
            raise ConfigError(f"workers: {max(names, key=names.count)} is named twice")
        roles = {worker.role for worker in self.workers}
        if "whole" not in roles and roles != {"prefill", "decode"}:
            raise ConfigError(f"workers: all have role {roles.pop()}; a pair needs prefill and decode workers")
        if len(roles) == 3 or (len(roles) == 2 and "whole" in roles):
            raise ConfigError("workers: either all have role whole, or all are prefill and decode workers")
        if not self.tokenizer and any(worker.events for worker in self.workers):
            raise ConfigError("KV events name token ids: give --tokenizer FOLDER (or numbers), or leave `events` out")

    @property
    def key_tokens(self) -> int:
        """Tokens of a key."""
        return self.block_tokens or (16 if self.tokenizer else 128)

    @property
    def has_pairs(self) -> bool:
        return self.workers[0].role != "whole"


def worker_from(text: str) -> WorkerConfig:
    """`URL[,name=value...]`, as given to --worker. Raises ConfigError naming what is wrong."""
    url, *rest = text.split(",")
    fields: dict[str, str] = {"url": url.rstrip("/")}
    for part in rest:
        name, separator, value = part.partition("=")
        if not separator or name not in WorkerConfig.__struct_fields__:
            known = ", ".join(WorkerConfig.__struct_fields__[1:])
            raise ConfigError(f"--worker {url}: {part!r} is not name=value with a name of {known}")
        fields[name] = value
    try:
        return msgspec.convert(fields, WorkerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--worker {url}: {error}") from error


def read_config(path: str | None, workers: Sequence[str], changes: dict[str, object]) -> RouteConfig:
    """The settings in the YAML file `path`, with `workers` after those it names and `changes` (None: none) over its own.

    Raises ConfigError naming the key, or FileFormatError naming the file.
    """
    tree: dict[str, object] = {}
    if path is not None:
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise FileFormatError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from error
        if not isinstance(found, dict):
            raise FileFormatError(f"{path}: expected settings by name, got {type(found).__name__}")
        tree = found
    named = tree.get("workers") or []
    if not isinstance(named, list):
        raise FileFormatError(f"{path}: workers must be a list")
    tree["workers"] = [*named, *(msgspec.to_builtins(worker_from(text)) for text in workers)]
    tree |= {name: value for name, value in changes.items() if value is not None}
    try:
        return msgspec.convert(tree, RouteConfig, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise ConfigError(f"setting {where.rstrip('`')}: {what}" if where else what) from error
