"""Take the style of KaTeX and the fonts from node_modules, with no more letters than are used."""

import hashlib
import io
import os
import re
from pathlib import Path

from fontTools import subset

PLACES = {  # of the fonts: from node_modules to the site, beside the style that asks for them
    "katex/dist/fonts": "assets/katex/fonts",
    "@fontsource/literata/files": "assets/fonts",
    "@fontsource/jetbrains-mono/files": "assets/fonts",
}
FONTS = re.compile(
    r"KaTeX_.*|literata-latin-(400-normal|400-italic|600-normal)|jetbrains-mono-latin-400-normal"
)
OLD_FORMATS = re.compile(r',url\([^)]*\) ?format\("(?:woff|truetype)"\)')


def npm_files(root: Path, characters: set[str], cache: Path) -> dict[str, bytes]:
    """Give the content of each file that the site takes from npm, by its address in the site.

    A font keeps the glyphs of `characters`, all that the pages say, and of ASCII: a third of
    its size. What was made once is found in the folder `cache`.
    """
    modules = root / "node_modules"
    style = (modules / "katex/dist/katex.min.css").read_text(encoding="utf-8")
    files = {"assets/katex/katex.min.css": OLD_FORMATS.sub("", style).encode()}
    letters = "".join(sorted(characters | {chr(code) for code in range(0x20, 0x7F)}))
    for source, target in PLACES.items():
        for font in sorted((modules / source).glob("*.woff2")):
            if FONTS.fullmatch(font.stem):
                files[f"{target}/{font.name}"] = _smaller(font, letters, cache)
    return files


def _smaller(font: Path, letters: str, cache: Path) -> bytes:
    """Give the font with the glyphs of `letters` only."""
    whole = font.read_bytes()
    name = hashlib.sha256(whole + letters.encode()).hexdigest()
    kept = cache / f"{name[:32]}.woff2"
    if kept.exists():
        return kept.read_bytes()
    options = subset.Options(flavor="woff2", layout_features=["kern", "liga", "mark"])
    drawn = subset.load_font(str(font), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=letters)
    subsetter.subset(drawn)
    content = io.BytesIO()
    subset.save_font(drawn, content, options)
    cache.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(f".{os.getpid()}")
    draft.write_bytes(content.getvalue())
    draft.replace(kept)
    return content.getvalue()
