"""Formulas as MathML, which browsers draw themselves: pages need neither a script nor a network."""

from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def as_mathml(node: object, block: bool) -> str:
    """The MathML of a formula; one that cannot be read is a warning, which fails the build."""
    try:
        return tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        LOGGER.warning("a formula cannot be read: %s", error, location=node)
        return ""


def visit_inline(writer: object, node: object) -> None:
    """Writes a formula within a line."""
    _write(writer, node, False)


def visit_block(writer: object, node: object) -> None:
    """Writes a formula on its own."""
    _write(writer, node, True)


def _write(writer: object, node: object, block: bool) -> None:
    from docutils.nodes import SkipNode

    writer.body.append(as_mathml(node, block))
    raise SkipNode


def setup(app: object) -> None:
    """Registers the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
