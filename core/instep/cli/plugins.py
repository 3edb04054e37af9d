"""``instep plugins``: what is installed, enabled or broken, told without importing any of it."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from instep import config, discovery
from instep.cli.main import BAD_USAGE
from instep.discovery import Listing


def parser() -> argparse.ArgumentParser:
    """The options of ``instep plugins``."""
    out = argparse.ArgumentParser(prog="instep plugins", description="List installed and enabled plugins, without importing them.")
    out.add_argument("--config", metavar="FILE", help="the configuration (default: instep.toml or pyproject.toml)")
    out.add_argument("--json", action="store_true", help="print one JSON list")
    return out


def main(argv: Sequence[str]) -> int:
    """List the plugins; 2 if one that is enabled is broken or lacking."""
    args = parser().parse_args(argv)
    listings = list(discovery.listings(config.load(args.config).config))
    if args.json:
        print(json.dumps([asdict(listing) for listing in listings], indent=2))
    else:
        _draw(listings)
    return BAD_USAGE if any(listing.enabled and listing.why for listing in listings) else 0


def _draw(listings: Sequence[Listing]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("plugin", "status", "distribution", "version", "api", "hooks"):
        table.add_column(column, overflow="fold")
    for listing in listings:
        of = (listing.distribution or "-", listing.version or "-", "-" if listing.api is None else str(listing.api))
        table.add_row(listing.name, listing.status, *of, ", ".join(listing.hooks) or "-")
    console = Console()
    console.print(table if listings else "no plugin is installed")
    for line in (line for listing in listings for line in (listing.why, *listing.soon) if line):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
