"""``instep``: finds the subcommand, and turns every error into one message and an exit code."""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from instep.config import suggest
from instep.errors import ConfigError, InstepError, PluginError, UsageError

BAD_USAGE = 2
INTERRUPTED = 130
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "this machine has too many open files; see /proc/sys/fs/file-max",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or pids.max of the container)",
    errno.ENOMEM: "free some memory, or start fewer ranks",
    errno.ENOSPC: "free some space",
}
"""What to do about a limit of the machine."""


@dataclass(frozen=True)
class Command:
    """A subcommand: what it does, in one line, and the function that runs it ("module:function", called with its arguments)."""

    summary: str
    target: str

    def load(self) -> Callable[[Sequence[str]], int]:
        """Import the command."""
        module, _, function = self.target.partition(":")
        command: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
        return command


COMMANDS = {
    "run": Command("run a script on several ranks, and keep it in step through faults", "instep.cli.run:run"),
    "drill": Command("run a script with and without faults, and compare the two bit for bit", "instep.cli.drill:main"),
    "plugins": Command("list what is installed, what is enabled, and what is broken", "instep.cli.plugins:main"),
    "check": Command("check the configuration: each value, and where it comes from", "instep.cli.check:main"),
    "new": Command("write a plugin distribution that passes its contract at once", "instep.cli.new:main"),
    "plan": Command("tell which losses a job survives, and what would be sent by whom", "instep.cli.plan:main"),
    "report": Command("draw the incidents of a run", "instep.cli.report:main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 only on success, 2 for bad usage, a wrong configuration or a broken plugin."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return BAD_USAGE
    name = arguments[0]
    if name.startswith("-"):
        parser.parse_args(arguments)
        return 0
    if name not in COMMANDS:
        return _fail(f"there is no command '{name}'; {suggest(name, COMMANDS)}", BAD_USAGE)
    try:
        return COMMANDS[name].load()(arguments[1:])
    except (ConfigError, PluginError, UsageError) as error:
        return _fail(str(error), BAD_USAGE)
    except InstepError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _system(error)


def _system(error: OSError) -> int:
    """The reader of our output is gone, or the machine has reached a limit; anything else is raised again."""
    if isinstance(error, BrokenPipeError):
        from instep.agent.outlet import discard

        discard(sys.stdout)
        return 1
    if error.errno not in _REMEDIES:
        raise error
    return _fail(f"{error}; {_REMEDIES[error.errno]}", 1)


def _parser() -> argparse.ArgumentParser:
    from instep import __version__

    lines = "\n".join(f"  {name:<9}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="instep",
        usage="instep COMMAND ...",
        description="Checkpointless recovery for PyTorch distributed training.",
        epilog=f"commands:\n{lines}\n\n'instep COMMAND --help' tells about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"instep {__version__}")
    return parser


def _fail(message: str, code: int) -> int:
    print(f"instep: {message}", file=sys.stderr)
    return code
