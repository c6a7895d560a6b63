"""The HTTP dialects by name. Those over a WebSocket are variants of one protocol (``wire.py``)."""

from __future__ import annotations

from collections.abc import Mapping

from strands_cosmos3.checks import known_name
from strands_cosmos3.embodiments import Embodiment
from strands_cosmos3.serving.libero import LIBERO
from strands_cosmos3.serving.routes import HttpDialect

HTTP_DIALECTS: Mapping[str, HttpDialect] = {dialect.name: dialect for dialect in (LIBERO,)}


def served_dialect(dialect: HttpDialect | str | None, embodiment: Embodiment) -> HttpDialect | None:
    """Return a dialect, or that of a name; for None the embodiment's, if there is one.

    Raises:
        UnknownNameError: There is no dialect of that name.
    """
    if dialect is None:
        own = (one for one in HTTP_DIALECTS.values() if one.embodiment == embodiment.name)
        return next(own, None)
    if isinstance(dialect, str):
        return HTTP_DIALECTS[known_name(dialect, "HTTP dialect", HTTP_DIALECTS)]
    return dialect
