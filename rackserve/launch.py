"""The command `launch`: start an agent's command line wired to a running server, with settings of its own that are gone after.

A key is passed on in the environment, never in a file or an argument.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from rackserve.api.keys import KEY_VARIABLE
from rackserve.base.errors import ConfigError, ResourceError
from rackserve.model.embedded import cache_root

NO_KEY = "none"
"""Given to agents that insist on a key where the server asks for none."""

PROVIDER = "rackserve"
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """The server that an agent is to use: `url` without /v1, the model's name and context, the key if there is one."""

    url: str
    model: str
    context: int
    key: str

    @property
    def max_output(self) -> int:
        """Output tokens to leave room for."""
        return max(256, min(8192, self.context // 4))


@dataclass(frozen=True, slots=True)
class Wiring:
    """What makes an agent use a server: files of its private folder, variables (None: not to be there), arguments."""

    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent's command, how to get it, and how to wire it; `wire` is given the private folder."""

    command: str
    install: str
    wire: Callable[[Target, Path], Wiring]


def _codex(target: Target, folder: Path) -> Wiring:
    lines = [
        f"model = {json.dumps(target.model)}",
        f'model_provider = "{PROVIDER}"',
        f"model_context_window = {target.context}",
        "",
        f"[model_providers.{PROVIDER}]",
        f'name = "{PROVIDER}"',
        f"base_url = {json.dumps(target.url + '/v1')}",
        'wire_api = "responses"',
        *([f'env_key = "{KEY_VARIABLE}"'] if target.key else []),
    ]
    return Wiring({"config.toml": "\n".join(lines) + "\n"}, {"CODEX_HOME": str(folder)})


def _opencode(target: Target, folder: Path) -> Wiring:
    model = {"name": target.model, "limit": {"context": target.context, "output": target.max_output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"{PROVIDER}/{target.model}"
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {PROVIDER: provider},
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
    }
    places = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    return Wiring({"opencode.json": _json(settings)}, {"OPENCODE_CONFIG": str(folder / "opencode.json"), **places})


def _qwen(target: Target, folder: Path) -> Wiring:
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key or NO_KEY,
        "OPENAI_MODEL": target.model,
        "QWEN_HOME": str(folder),
    }
    return Wiring({}, variables, ("--auth-type", "openai", "--model", target.model))


def _claude(target: Target, folder: Path) -> Wiring:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in _KINDS))
    return Wiring(
        {},
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
            "ANTHROPIC_API_KEY": None,
            "CLAUDE_CONFIG_DIR": str(folder),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_output),
            **dict.fromkeys(models, target.model),
        },
    )


_KINDS = ("HAIKU", "SONNET", "OPUS")


def _pi(target: Target, folder: Path) -> Wiring:
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": target.context,
        "maxTokens": target.max_output,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "compat": {"sendSessionAffinityHeaders": True},
    }
    provider = {"baseUrl": f"{target.url}/v1", "api": "openai-completions", "apiKey": KEY_VARIABLE, "models": [model]}
    return Wiring(
        {"models.json": _json({"providers": {PROVIDER: provider}})},
        {"PI_CODING_AGENT_DIR": str(folder)},
        ("--provider", PROVIDER, "--model", target.model),
    )


def _llm(target: Target, folder: Path) -> Wiring:
    entry = {
        "model_id": target.model,
        "model_name": target.model,
        "api_base": f"{target.url}/v1",
        "api_key_name": PROVIDER,
        "supports_tools": True,
        "supports_schema": True,
    }
    return Wiring(
        {"extra-openai-models.yaml": _json([entry]), "default_model.txt": target.model},  # JSON is YAML
        {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": target.key or NO_KEY},
    )


AGENTS = {
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    "llm": Agent("llm", "pip install llm", _llm),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options; what comes after `--` is the agent's."""
    command.add_argument("agent", choices=AGENTS, help="the agent; what comes after -- goes to its command line")
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    command.add_argument("--model", metavar="NAME", help="the model (default: the server's first)")
    command.set_defaults(passed_on=[])
    command.epilog = f"The key, if the server asks for one, is read from {KEY_VARIABLE}."


def launch(options: argparse.Namespace) -> int:
    """Run the agent until it ends; its exit code. Raises ConfigError or ResourceError with the remedy."""
    agent = AGENTS[options.agent]
    if shutil.which(agent.command) is None:
        raise ResourceError(f"{agent.command} is not installed; get it with `{agent.install}`")
    target = find_target(options.url, options.model, os.environ.get(KEY_VARIABLE, ""))
    with private_folder(options.agent) as folder:
        wiring = agent.wire(target, folder)
        for file, text in wiring.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        return _run([agent.command, *wiring.arguments, *options.passed_on], _environment(wiring, target))


@contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """An empty folder for its owner alone, gone at the end. ResourceError if it cannot be made.

    Its path is the same each time, unless another launch has it just now: agents write it into their prompts, which would else
    never be known again.
    """
    parent = cache_root().absolute() / "launch"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        folder, held = next((parent / each, got) for each in names if (got := _hold(parent / each)) is not None)
    except OSError as error:
        remedy = "RACKSERVE_CACHE may name a folder that can be written"
        raise ResourceError(f"{parent} cannot be used ({error.strerror}); {remedy}") from error
    try:
        for left in folder.iterdir():  # by one that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _hold(folder: Path) -> int | None:
    """A descriptor that locks `folder`, made if it is not there; None if another process has it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        os.fchmod(held, 0o700)  # fails for one that is another user's
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), folder.stat()):
            return held
    except (BlockingIOError, FileNotFoundError):  # in use, or just now removed by its last user
        pass
    except OSError:
        os.close(held)
        raise
    os.close(held)
    return None


def find_target(url: str, model: str | None, key: str) -> Target:
    """The server at `url` and its model. Raises ConfigError if it does not answer as one, or lacks the model."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{base}/v1/models", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        if answer.status_code == 401:
            raise ConfigError(
                f"{base} asks for a key{' and does not know this one' if key else ''}; put it into {KEY_VARIABLE}"
            )
        answer.raise_for_status()
        models: list[dict[str, Any]] = answer.json()["data"]
        contexts = {str(each["id"]): int(each.get("max_model_len") or 32_768) for each in models}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url {url}: {error}; is the server running? `rackserve serve` starts one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--url {url}: no list of models there ({type(error).__name__})") from error
    if not contexts or (model is not None and model not in contexts):
        raise ConfigError(f"--url {url}: there is no model {model or 'at all'}; it has: {', '.join(contexts) or 'none'}")
    chosen = model or next(iter(contexts))
    return Target(base, chosen, contexts[chosen], key)


def _environment(wiring: Wiring, target: Target) -> dict[str, str]:
    """Ours, with what the wiring adds and takes away; a server on this machine is not asked through a proxy."""
    environment = {**os.environ, KEY_VARIABLE: target.key or NO_KEY}
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (environment.get(name), "127.0.0.1,localhost,::1")))
    for name, value in wiring.variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _run(command: list[str], environment: Mapping[str, str]) -> int:
    """Run `command` in the foreground. Ctrl-C is its own to deal with; SIGTERM and SIGHUP end it, and then us."""
    process = subprocess.Popen(command, env=dict(environment))
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        kept[number] = signal.signal(number, lambda got, _: process.send_signal(got))
    try:
        code = process.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
