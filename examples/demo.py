"""The demonstration behind `make demo`: a GPT in training on 4 ranks loses rank 0, meets an exception and a hang, and nobody can tell."""

import subprocess
import sys
from pathlib import Path

STEPS = 80
FAULTS = ["--kill", "0@20", "--raise", "2@40", "--hang", "3@55", "--kill", "1@70"]


def main() -> int:
    script = Path(__file__).with_name("train_gpt.py")
    drill = [sys.executable, "-m", "instep", "drill", "--ranks", "4", "--seed", "2", *FAULTS]
    return subprocess.run([*drill, str(script), "--steps", str(STEPS)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
