"""Convert formulas to MathML when the site is built; browsers draw MathML, so no page needs a script.

``$x$`` is a formula in a line; a paragraph ``$$ ... $$`` is a displayed one. A formula that cannot be drawn
is an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

if TYPE_CHECKING:
    from markdown import Markdown

INLINE = r"(?<![\\$\w])\$([^\s$](?:[^$]*[^\s$])?)\$(?![\w$])"
DISPLAYED = re.compile(r"\$\$\s*(.+?)\s*\$\$", flags=re.DOTALL)


class Inline(InlineProcessor):
    """A formula ``$x$`` in a line."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Store the formula as finished HTML."""
        return self.md.htmlStash.store(mathml(m[1], display="inline")), m.start(0), m.end(0)


class Displayed(BlockProcessor):
    """A paragraph that is one formula."""

    def test(self, parent: Element, block: str) -> bool:
        """Return whether this paragraph is one formula."""
        return DISPLAYED.fullmatch(block.strip()) is not None

    def run(self, parent: Element, blocks: list[str]) -> None:
        """Store the formula as finished HTML."""
        found = DISPLAYED.fullmatch(blocks.pop(0).strip())
        assert found is not None
        drawn = f'<div class="formula">{mathml(found[1], display="block")}</div>'
        paragraph = Element("p")
        paragraph.text = self.parser.md.htmlStash.store(drawn)
        parent.append(paragraph)


def mathml(latex: str, *, display: str) -> str:
    """Return a LaTeX formula as MathML."""
    drawn = convert(" ".join(latex.split()), display=display)
    if "\\" in drawn:  # a command that the converter does not know comes out as it went in
        raise ValueError(f"not LaTeX that can be drawn: {latex}")
    return drawn.replace("&#x02216;", "&#x5C;")  # set difference: many fonts lack its own sign


class Formulas(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the processors before those of emphasis and escapes, which would change a formula."""
        md.inlinePatterns.register(Inline(INLINE, md), "formula", 185)
        md.parser.blockprocessors.register(Displayed(md.parser), "formulas", 95)


def makeExtension(**kwargs: object) -> Formulas:
    """Return the extension; Markdown looks for this name."""
    return Formulas(**kwargs)
