"""What every benchmark with bars does at its end: prints its figures beside them, and exits with 1 if one was missed."""

import json
import sys
from collections.abc import Mapping

Bars = Mapping[str, tuple[float, str]]
"""By name of a figure: its bar, and whether that is the ``most`` or the ``least`` that it may be."""


def end(result: Mapping[str, float], bars: Bars, *, as_json: bool) -> None:
    """Print, as one JSON object or a line each, and exit."""
    missed = [name for name, (bar, kind) in bars.items() if not (result[name] <= bar if kind == "most" else result[name] >= bar)]
    if as_json:
        print(json.dumps({**result, "bars": {k: list(v) for k, v in bars.items()}, "missed": missed, "ok": not missed}))
    else:
        for name, value in result.items():
            bar = f"   at {bars[name][1]} {bars[name][0]:g}" if name in bars else ""
            print(f"{name:34s} {value:10.3f}{bar}{'   MISSED' if name in missed else ''}")
    sys.exit(1 if missed else 0)
