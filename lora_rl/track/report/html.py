"""HTML and SVG as trees, so that no text of a run can become markup."""

import xml.etree.ElementTree as ET
from importlib import resources

type Node = ET.Element
type Child = Node | str | None

_CLOSED = {"class_": "class", "for_": "for"}


def h(tag: str, *children: Child | list[Node], **attributes: str | float | None) -> Node:
    """An element. Text is made visible and escaped; a list is spliced in; None is left out.

    Args:
        attributes: `class_` stands for `class`, other underscores for hyphens. None leaves one out.
    """
    given = {
        _CLOSED.get(name, name.replace("_", "-")): value if isinstance(value, str) else f"{value:g}"
        for name, value in attributes.items()
        if value is not None
    }
    element = ET.Element(tag, {name: visible(value) for name, value in given.items()})
    for child in children:
        for part in child if isinstance(child, list) else [child]:
            _append(element, part)
    return element


def visible(text: str) -> str:
    """`text` with control and invisible characters, and halves of characters, as Python escapes; line breaks stay."""
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def page(title: str, *body: Child) -> str:
    """A whole, self-contained HTML document: style and script are in it, and nothing is fetched."""
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        # Whatever a completion holds, this page loads and runs nothing but its own script.
        h(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:",
        ),
        h("link", rel="icon", href="data:,"),
        h("title", title),
        _raw("style", "page.css"),
    )
    tree = h("html", head, h("body", h("main", *body), _raw("script", "page.js")), lang="en")
    return "<!doctype html>\n" + ET.tostring(tree, encoding="unicode", method="html") + "\n"


def _append(element: Node, part: Child) -> None:
    if part is None:
        return
    if not isinstance(part, str):
        element.append(part)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + visible(part)
    else:
        element.text = (element.text or "") + visible(part)


def _raw(tag: str, file: str) -> Node:
    """Style or script of this package; the serializer leaves the text of these two elements as it is."""
    element = ET.Element(tag)
    element.text = "\n" + (resources.files(__package__) / file).read_text(encoding="utf-8")
    return element
