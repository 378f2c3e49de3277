"""The works cited: from docs/references.bib by pybtex."""

import pybtex.errors
from pybtex.backends.markdown import Backend
from pybtex.database import parse_file
from pybtex.exceptions import PybtexError
from pybtex.richtext import Text
from pybtex.style.formatting.unsrt import Style

from hooks.expand import BookError


def read_works(path, file):
    """Return {key: (words for a sentence, entry for the list)} of a BibTeX file."""
    if not path.is_file():
        return {}
    pybtex.errors.set_strict_mode(True)
    try:
        entries = parse_file(str(path)).entries
        listed = {e.key: e.text.render(Backend()) for e in Style().format_entries(entries.values())}
        return {key: (in_sentence(entry), listed[key]) for key, entry in entries.items()}
    except (PybtexError, KeyError) as error:
        raise BookError(file, getattr(error, "lineno", None) or 1, f"{type(error).__name__}: {error}") from None


def in_sentence(entry):
    """Return the authors and the year: Hu & Sun, 2018."""
    names = [" ".join(person.prelast_names + person.last_names) for person in entry.persons["author"]]
    names = [Text.from_latex(name).render_as("text") for name in names]
    authors = f"{names[0]} et al." if len(names) > 2 else " & ".join(names)
    return f"{authors}, {entry.fields['year']}"


def list_works(works, cited):
    """Return the list of the works that pages cite, as Markdown; `cited` is {key: links to pages}."""
    rows = sorted(cited, key=lambda key: works[key][1].lower())
    return "\n".join(f'- <span id="ref-{key}"></span>{works[key][1]} Cited in {", ".join(cited[key])}.' for key in rows)
