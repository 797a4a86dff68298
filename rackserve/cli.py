"""The command line. Modules are imported by the command that needs them, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from rackserve import __version__
from rackserve.base.errors import RackserveError
from rackserve.hints import hint_for_command, hint_for_flag


class Command(NamedTuple):
    """One command: a line of help, and where its options and its work are, as "module:function" within rackserve."""

    help: str
    arguments: str
    run: str


GROUPS: dict[str, dict[str, Command]] = {
    "serve": {
        "serve": Command(
            "start a rack on this machine with an OpenAI-compatible front end", "commands:add_serve", "commands:serve"
        ),
        "route": Command(
            "put a cache-aware router in front of OpenAI-compatible servers", "route_options:add_route", "routing:route"
        ),
        "serve-rows": Command(
            "own a shard of a DeepSeek-V4.1 model's n-gram tables for other ranks",
            "serve_rows:add_arguments",
            "serve_rows:serve_rows",
        ),
        "plan-memory": Command(
            "what a DeepSeek-V4.1 model takes, in all and on each device",
            "plan_memory:add_arguments",
            "plan_memory:plan_memory",
        ),
        "launch": Command(
            "start codex, opencode, qwen, claude, pi or llm wired to a running server", "launch:add_arguments", "launch:launch"
        ),
        "top": Command("watch a running server in the terminal", "top:add_arguments", "top:top"),
        "doctor": Command("can this machine serve? what is wrong and what to do", "doctor:add_arguments", "doctor:doctor"),
        "config": Command(
            "show settings and where each is from, or explain one", "config_command:add_arguments", "config_command:config"
        ),
        "key": Command("make an API key and its entry for a key file", "keys_command:add_arguments", "keys_command:key"),
    },
    "measure": {
        "demo": Command(
            "replay agent sessions on two set-ups, live and simulated, and compare", "demo:add_arguments", "demo:run_demo"
        ),
        "bench": Command(
            "replay agent sessions against any OpenAI-compatible endpoint", "bench_options:add_bench", "benchmark:bench"
        ),
        "synthesize": Command(
            "draw agent sessions like those of a published corpus, as a trace",
            "bench_options:add_synthesize",
            "benchmark:synthesize",
        ),
        "record": Command(
            "turn what `serve --record` wrote into a trace that bench and simulate replay",
            "traffic:add_arguments",
            "traffic:record",
        ),
        "compare": Command(
            "two results or set-ups: multiples along the curve, at peak, and what they mean",
            "comparing:add_arguments",
            "comparing:compare",
        ),
    },
    "simulate": {
        "sim": Command(
            "what if: racks of chips you do not own, one or a grid of them, compared", "sim_options:add_sim", "what_if:sim"
        ),
        "simulate": Command(
            "replay agent sessions on a simulated copy of a rack you can start",
            "bench_options:add_simulate",
            "commands:simulate",
        ),
        "cost-model": Command(
            "what one step takes on hardware you do not own, term by term", "cost_model:add_arguments", "cost_model:cost_model"
        ),
        "profile": Command(
            "where the time of this machine's own steps goes, stage by stage",
            "profile_command:add_arguments",
            "profile_command:profile",
        ),
        "calibrate": Command(
            "fit step costs to recorded runs, with the error on unseen steps",
            "calibrate:add_arguments",
            "calibrate:run_calibrate",
        ),
        "reproduce": Command(
            "published figures beside what the cost model and simulation give",
            "reproduce:add_arguments",
            "reproduce:reproduce",
        ),
        "validate": Command(
            "measurements of others beside what the cost model and caches give", "validate:add_arguments", "validate:validate"
        ),
        "swarm": Command(
            "run random small racks with faults in simulation and check every law", "commands:add_swarm", "commands:swarm"
        ),
    },
}
"""All commands, in the order in which `--help` shows them."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class CommandParser(argparse.ArgumentParser):
    """Reads the options of one command; finds out what they are when first asked."""

    command: Command | None = None

    def load(self) -> CommandParser:
        """This parser with its options, which come from the command's own module."""
        command, self.command = self.command, None
        if command is not None:
            _find(command.arguments)(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words, passed_on = list(args), []
        if "passed_on" in self.load()._defaults and "--" in words:  # what follows is another program's
            at = words.index("--")
            words, passed_on = words[:at], words[at + 1 :]
        found, extras = super().parse_known_args(words, namespace)
        if passed_on:
            found.passed_on = passed_on
        flags = [word.partition("=")[0] for word in extras if word.startswith("-")]
        if flags:  # said here, where the usage to be shown and the flags there are known
            known = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown option {flags[0]}{hint_for_flag(flags[0], known)}")
        return found, extras


class _MainParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _, wrong, rest = message.partition("invalid choice: '")
        if wrong:
            name = rest.partition("'")[0]
            message = f"unknown command {name}{hint_for_command(name, COMMANDS)}"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """All commands; each gets its options when it is used."""
    main_parser = _MainParser(
        prog="rackserve",
        usage="rackserve [--version] COMMAND [options]",
        description="Serve agent sessions from a rack, measure the curve, and simulate what you do not own.",
        epilog=_list_of_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"rackserve {__version__}")
    commands = main_parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser, help=argparse.SUPPRESS, prog="rackserve"
    )
    for name, command in COMMANDS.items():
        commands.add_parser(name, description=f"{command.help[0].upper()}{command.help[1:]}.").command = command
    return main_parser


def _list_of_commands() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["commands:"]
    for group, commands in GROUPS.items():
        lines += [f"\n {group}", *(f"  {name:{width}}{command.help}" for name, command in commands.items())]
    return "\n".join([*lines, "\n`rackserve COMMAND --help` shows the options of a command."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; expected failures become one line on standard error and an exit code."""
    try:
        options = parser().parse_args(arguments)  # loads what the command needs, which takes a while
        code: int = _find(COMMANDS[options.command].run)(options)
        return code
    except RackserveError as error:
        print(f"rackserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rackserve: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _find(where: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = where.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"rackserve.{module}"), function)
    return found


if __name__ == "__main__":
    sys.exit(main())
