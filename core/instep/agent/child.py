"""Turns a new process into a rank: what a script may expect of a fresh interpreter, also when the process was forked from a warm one.

``python -m instep.agent.child FD...`` does the same in a plain interpreter.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import random
import runpy
import signal
import sys
import threading
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn, TextIO

from instep.agent.channel import BIRTH, CHANNEL
from instep.agent.task import Fds, Task, unseal

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OOM_MORE = 300
_ARG_START, _ARG_END = 45, 46


def become(fds: Fds, *, parent: int) -> Task:
    """Make this process the rank that the task describes. ``parent`` is the process that must outlive it."""
    task = unseal(fds.task)
    os.setpgid(0, 0)
    die_with_parent(parent)
    _signals()
    _streams(fds.log)
    _environment(task, fds.kept)
    _name(task)
    _oom_first()
    _reseed()
    _follow_forks(fds.kept)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True)
    return task


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` when the parent dies; ends at once when it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(70)


def name_process(name: str) -> None:
    """Show a name of up to 15 bytes in top."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def run(task: Task) -> None:
    """Run the script or module as ``__main__``, and end as an interpreter does.

    A process that has joined an instep job skips the teardown of the interpreter, after everything that a script can see of its end:
    threads of old communicators may wait for an operation that gloo has lost, and would hang or abort it.
    """
    code: object = 0
    try:
        _run(task)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if not _joined():
            raise
        code = error.code
    except BaseException:
        if not _joined():
            raise
        code = 1
    if _joined():
        _end(code)


def _joined() -> bool:
    return "instep.session" in sys.modules and sys.modules["instep.session"].current() is not None


def _end(code: object) -> NoReturn:
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _run(task: Task) -> None:
    """Run the code. An uncaught exception is shown without the frames of instep below it."""
    sys.argv = [task.script or str(task.module), *task.args]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if task.module is not None:
            _first_on_path(task.cwd)
            runpy.run_module(task.module, run_name="__main__", alter_sys=True)
        elif task.script is not None and Path(task.script).is_file():
            _first_on_path(str(Path(task.script).resolve().parent))
            _run_file(Path(task.script).absolute(), main)
        else:
            runpy.run_path(str(task.script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        shown = error.with_traceback(_users_part(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.excepthook = _shown
        raise


def _run_file(path: Path, main: ModuleType) -> None:
    loader = SourceFileLoader("__main__", str(path))
    main.__dict__.update(__file__=str(path), __loader__=loader, __builtins__=sys.modules["builtins"], __cached__=None, __package__=None)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - what an interpreter does


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without leading frames of this module and of runpy."""
    own = (__file__, runpy.__file__)
    while trace is not None and (trace.tb_frame.f_code.co_filename in own or trace.tb_frame.f_code.co_filename.startswith("<frozen")):
        trace = trace.tb_next
    return trace


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stands in for ``sys.excepthook`` once the exception has been shown."""


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _signals() -> None:
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _streams(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    if log > 2:
        os.close(log)
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = _text(fd, getattr(sys, f"__{name}__"), mode)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text(fd: int, like: TextIO | None, mode: str) -> TextIO:
    """A text stream that writes each line when it is complete: what a killed rank had printed must be in its log."""
    encoding, errors = ("utf-8", "strict") if like is None else (like.encoding, like.errors or "strict")
    stream = open(fd, mode, buffering=1, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115 - open as long as the process
    assert isinstance(stream, TextIOWrapper)
    return stream


def _environment(task: Task, kept: tuple[int, ...]) -> None:
    os.environ.clear()
    os.environ.update(task.env)
    os.environ[CHANNEL] = ",".join(map(str, kept))
    os.environ[BIRTH] = str(task.birth)
    os.chdir(task.cwd)


def _name(task: Task) -> None:
    """Show the rank in top (thread name) and in ps (the argument area, within its size)."""
    name_process(task.name)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    if start and size > 1:
        words = f"{task.name} {task.script or task.module} {' '.join(task.args)}".encode()[: size - 1]
        ctypes.memmove(start, words.ljust(size, b"\0"), size)


def _oom_first() -> None:
    """Ask the kernel to choose a rank before the agent and the fork server when memory is short."""
    path = Path("/proc/self/oom_score_adj")
    try:
        path.write_text(str(min(1000, int(path.read_text()) + _OOM_MORE)))
    except OSError as error:
        sys.stderr.write(f"instep: cannot raise oom_score_adj: {error}\n")


def _reseed() -> None:
    """Seed every generator from the system's entropy, as in a fresh interpreter: ranks must not share the fork server's state."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _follow_forks(kept: tuple[int, ...]) -> None:
    """Processes that the script forks die with it, and do not hold its channel. Only the main thread's death means the rank's."""
    from_main = False
    inodes = {fd: os.fstat(fd).st_ino for fd in kept}

    def before() -> None:
        nonlocal from_main
        from_main = threading.current_thread() is threading.main_thread()

    def after() -> None:
        if from_main:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for fd, inode in inodes.items():
            if _inode(fd) == inode:
                os.close(fd)
        inodes.clear()

    os.register_at_fork(before=before, after_in_child=after)


def _inode(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main(argv: list[str]) -> None:
    """Entry of a plain interpreter: file descriptors, and the process id of the agent."""
    *numbers, parent = map(int, argv)
    if not sys.flags.safe_path:
        sys.path.pop(0)
    run(become(Fds(*numbers), parent=parent))


if __name__ == "__main__":
    main(sys.argv[1:])
