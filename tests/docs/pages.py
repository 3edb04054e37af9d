"""The pages of the documentation, and the snippets in them: fences, and the comments that tell how to run them.

``<!-- new script -->`` ends the script that the Python fences of a page make together, ``<!-- run twice -->`` has the next one run a second
time in the same folder. A fence with ``title="x.py"`` is a file of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"<!-- (.*) -->")


@dataclass(frozen=True)
class Fence:
    """A fenced block: where it stands (``line`` is that of its first line of text, from 1), its language, its title if any, its text."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS)}:{self.line}"


@dataclass
class Script:
    """The Python fences of a page, or of a part of it, as one script."""

    fences: list[Fence] = field(default_factory=list)
    twice: bool = False

    def __str__(self) -> str:
        return str(self.fences[0])

    @property
    def source(self) -> str:
        """The text, each line with the number that it has in the page."""
        lines: list[str] = []
        for fence in self.fences:
            lines += [""] * (fence.line - 1 - len(lines)) + fence.text.splitlines()
        return "\n".join(lines) + "\n"


def tokens(page: Path) -> Iterator[Fence | str]:
    """Fences and the words of comments, in order."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence" and token.map:
            title = _TITLE.search(token.info)
            words = token.info.split()
            yield Fence(page, token.map[0] + 2, words[0] if words else "", title[1] if title else None, token.content)
        elif token.type == "html_block" and (comment := _COMMENT.search(token.content)):
            yield comment[1]


def fences(*languages: str) -> list[Fence]:
    """All fences of some languages, of all pages; without any, of every language."""
    found = [token for page in PAGES for token in tokens(page) if isinstance(token, Fence)]
    return [fence for fence in found if not languages or fence.language in languages]


def scripts() -> list[Script]:
    """All scripts, of all pages."""
    found: list[Script] = []
    for page in PAGES:
        found.append(Script())
        for token in tokens(page):
            if isinstance(token, Fence):
                if token.language == "python" and token.title is None:
                    found[-1].fences.append(token)
                continue
            words = {word.strip() for word in token.split(",")}
            if "new script" in words:
                found.append(Script())
            if "run twice" in words:
                found[-1].twice = True
    return [script for script in found if script.fences]
