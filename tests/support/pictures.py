"""The texts in a picture, which tests compare in place of its pixels."""

import re

from PIL import Image


def words_of(picture):
    """The texts in a PNG, without numbers, which another processor may round differently."""
    with Image.open(picture) as image:
        return re.sub(r"[\d.,+%-]+|inf|nan", "0", image.text["Description"])
