"""What a picture says, kept in it for who cannot see it, and for a test that notices old ones."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure
from matplotlib.text import Text


def png_of(figure: Figure, dpi: float | str = "figure") -> bytes:
    """A figure as a PNG, its texts in its Description."""
    texts = [found.get_text() for found in figure.findobj(Text)]
    description = " | ".join(" ".join(text.split()) for text in texts if text.strip())
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Description": description})
    return file.getvalue()
