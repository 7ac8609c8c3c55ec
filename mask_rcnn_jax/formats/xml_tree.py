"""Read XML from strangers: no document types, so that no entity can grow or name a file."""

from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from mask_rcnn_jax.annotations.reader import read_regular

MAX_DEPTH = 50


def read_xml(path: Path) -> Element:
    """Return an XML file's root; ValueError naming the file if it is not one."""
    builder, parser, depth = TreeBuilder(), expat.ParserCreate(), 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_) -> None:
        raise ValueError("it has a document type, which is not read")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse  # where entities would be defined
    parser.buffer_text = True
    content = read_regular(path)
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise ValueError(f"{path}: cannot be read as XML ({error})") from error
    return builder.close()


def child_text(element: Element, tag: str) -> str:
    """Return a child's text, '' without one."""
    return (element.findtext(tag) or "").strip()
