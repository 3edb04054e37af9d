"""``python -m instep``: the same as the ``instep`` command."""

from instep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
