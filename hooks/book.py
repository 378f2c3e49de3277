"""The thin layer between MkDocs and the book: it expands, runs and renders all pages at once."""

import functools
import gc
import hashlib
import itertools
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import nbformat
from bs4 import BeautifulSoup
from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from mkdocs.utils import get_relative_url
from mkdocs.utils.meta import get_data
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from hooks import expand, maths, parts, render, run

gc.set_threshold(1_000_000)  # a build is over before there is garbage worth a search
LISTING = '<div class="highlight"><pre><code>{}</code></pre></div>'
LICENCE = (
    "From [{}]({}). Code: MIT licence. Text and figures: "
    "[CC BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/)."
)
made, drawn = {}, {}  # page key → Made, token → formula: from on_files until the pages are built


class Made(NamedTuple):
    """What became of a page: its Markdown (or notebook), and what to put into its HTML."""

    text: str
    view: render.View
    downloads: str


class Site(NamedTuple):
    """What the making of pages needs of the site and of MkDocs."""

    root: Path
    files: object
    config: object
    book: render.Book


@event_priority(100)  # before mkdocs-jupyter takes its files
def on_files(files, config):
    """Run the book and put what it gave in the place of its sources."""
    try:
        make(Path(config.config_file_path).parent, files, config)
    except expand.BookError as error:
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        if "GITHUB_ACTIONS" in os.environ:
            print(f"::error file={error.file},line={error.line}::{error.message}")
        raise PluginError("The book was not built, for the reason above.") from None
    return files


def make(root, files, config):
    """Expand, check, run and render all pages; add notebooks, scripts and fonts to `files`."""
    pages = read_pages(root, files)
    solved = {page.key.removeprefix("solutions/") for page in pages if "/" in page.key}
    keys = [key for key in nav_keys(config.nav) if key == "index" or key in solved]
    numbers = {key: str(n) if n else "" for n, key in enumerate(keys, "index" not in keys)}
    bib = expand.read_text(root / "docs/references.bib", "docs/references.bib")
    folders = ("", "", config.use_directory_urls)
    urls = {page.key: File(f"{page.key}.md", *folders).url for page in pages}

    def href(start, key, anchor):
        end = urls[key] + (f"#{anchor}" if anchor else "")
        web = config.site_url + end.removeprefix("./")
        return get_relative_url(end, urls[start]) if start else web

    labels = render.collect_labels(pages, numbers)
    works = kept(root, "works", lambda: parts.read_works(bib), bib)
    book = render.Book(numbers, labels, works, {}, href)
    for page in pages:
        render.check(page, book)
    running = [page for page in pages if run.page_cells(page)]
    running.sort(key=lambda page: -len(run.page_cells(page)))  # a guess, until it has run once
    book.runs.update(run.run_pages(root, running, progress(running)))
    show_times(book.runs)
    site = Site(root, files, config, book)
    made.clear()
    made.update({page.key: make_page(site, page, pages) for page in pages})
    typeset(root)
    add_others(site)


def read_pages(root, files):
    """Return the expanded pages; take what is not for the reader from `files`."""
    pages = []
    for file in list(files):
        name, key = f"docs/{file.src_uri}", file.src_uri.rpartition(".")[0]
        if file.src_uri.endswith((".py", ".bib")):
            files.remove(file)
        if file.src_uri.startswith("solutions/") and file.src_uri.endswith(".py"):
            text = expand.read_text(file.abs_src_path, name)
            cells = kept(root, f"{key}.cells", lambda: expand.percent_cells(text), text)  # noqa: B023
            pages.append(expand.Page(key, name, expand.read_percent(text, name, root, cells)))
        elif file.src_uri.endswith(".md") and file.abs_src_path:
            text = expand.read_text(file.abs_src_path, name)
            body, meta = get_data(text)
            line = text.count("\n") - body.count("\n") + 1
            page = expand.Page(key, name, expand.read_markdown(body, name, root, line))
            if not meta.get("execute") and (cells := run.page_cells(page)):
                raise expand.BookError(name, cells[0].line, "a cell without `execute: true`")
            pages.append(page)
    return pages


def nav_keys(nav):
    """Return the keys of the pages of the navigation, in order."""
    if isinstance(nav, str):
        return [nav.rpartition(".")[0]]
    entries = nav.values() if isinstance(nav, dict) else nav or []
    return [key for entry in entries for key in nav_keys(entry)]


def make_page(site, page, pages):
    """Render a page, unless nothing of it has changed; add its files and its lists."""
    book, config, done = site.book, site.config, site.book.runs.get(page.key)
    names = [n for n in done.files if re.fullmatch(r"snippets/\w+\.py", n)] if done else ()
    there = [name for name in sorted(names) if (site.root / name).is_file()]  # not only looked for
    modules = {name: (site.root / name).read_text("utf-8") for name in there}
    shared = (book[:3], config.site_name, config.site_url, config.use_directory_urls)
    needs = (page, done and done.outputs, modules, shared)
    drawn_page = kept(site.root, page.key, lambda: draw_page(site, page, modules), needs)
    text, slots, formulas, taken = drawn_page
    formulas = [maths.Formula(*formula) for formula in formulas]
    if page.key.startswith("solutions/"):
        folder = site.root / run.FOLDER / "pages"
        run.write_whole(folder / f"{page.key}.ipynb", text)
        where = (str(folder), config.site_dir, config.use_directory_urls)
        site.files.append(File(f"{page.key}.ipynb", *where))
    if page.key == "references":
        text = text.replace("<!-- references -->", cited_works(book, pages))
    for mark, name in re.findall(r"(<!-- names of (\S+) -->)", text):
        text = text.replace(mark, parts.list_names((site.root / name).read_text("utf-8")))
    downloads = add_downloads(site, page, taken) if taken else ""
    return Made(text, render.View(page, book, slots, formulas, None, set()), downloads)


def draw_page(site, page, modules):
    """Return the text of a page, its slots and formulas, and its downloads by their endings."""
    view, taken = render.View(page, site.book, [], [], itertools.count(1), set()), {}
    solved = page.key.startswith("solutions/")
    text = nbformat.writes(render.site_notebook(view)) if solved else render.page_markdown(view)
    if page.key in site.book.runs:
        licence = LICENCE.format(site.config.site_name, site.config.site_url)
        notebook = render.reader_notebook(page, site.book, modules, licence)
        taken = {"ipynb": nbformat.writes(notebook) + "\n", "py": render.script(notebook)}
    return [text, view.slots, view.formulas, taken]


def add_downloads(site, page, taken):
    """Add the notebook and the script of a page; return the links to them as HTML."""
    here, links = site.book.href(None, page.key, "").removeprefix(site.config.site_url), []
    for suffix, words in ("ipynb", "Notebook"), ("py", "Python script"):
        name = f"downloads/{page.key}.{suffix}"
        site.files.append(File.generated(site.config, name, content=taken[suffix]))
        links.append(f'<a href="{get_relative_url(name, here)}" download>{words}</a>')
    return f'<p class="book-downloads" data-search-exclude>Take it along: {" · ".join(links)}</p>'


def cited_works(book, pages):
    """Return the works that pages cite, each with links to these pages, as Markdown."""
    cited = {}
    for page in pages:
        label = book.labels.get("sec-" + page.key.removeprefix("solutions/"))
        words = label.text if label else page.key
        words += " (solutions)" * page.key.startswith("solutions/")
        link = f'<a class="book-ref" href="{book.href("references", page.key, "")}">{words}</a>'
        for key in sorted(render.cited(page)):
            cited.setdefault(key, []).append(link)
    row = '- <span id="ref-{}"></span>{} Cited in {}.'.format
    keys = sorted(cited, key=lambda key: book.works[key][0].lower())  # by family name
    return "\n".join(row(key, book.works[key][1], ", ".join(cited[key])) for key in keys)


def typeset(root):
    """Let KaTeX draw the formulas of all pages."""
    found = [(page.view.page, formula) for page in made.values() for formula in page.view.formulas]
    formulas = [(formula.tex, formula.display) for _, formula in found]
    try:
        html = maths.typeset(formulas, root / run.FOLDER / "maths.json", root)
    except ValueError as error:
        page, formula = found[error.args[0]]
        message = f"{error.args[1]} in {formula.tex}"
        raise expand.BookError(page.file, formula.line, message) from None
    drawn.clear()
    drawn.update({formula.token: text for (_, formula), text in zip(found, html)})


def add_others(site):
    """Add what others made: fonts and styles, and the page that names and thanks them."""
    root = site.root
    said = set().union(*(text for page in made.values() for text in (page.text, *page.view.slots)))
    locks = "".join((root / name).read_text() for name in ("requirements.txt", "package-lock.json"))
    thanks = kept(root, "thanks", lambda: parts.third_party_markdown(root), locks)
    fonts = parts.npm_files(root, said, drawn.values(), root / run.FOLDER / "fonts")
    for address, content in {"third-party.md": thanks, **fonts}.items():
        site.files.append(File.generated(site.config, address, content=content))


def made_of(page):
    """Return what was made of a page of MkDocs."""
    return made.get(page.file.src_uri.rpartition(".")[0])


def on_page_markdown(markdown, page, config, files):
    """Give the page that was made."""
    own = made_of(page)
    return own.text if own and page.file.src_uri.endswith(".md") else markdown


def on_page_content(html, page, config, files):
    """Bring solutions into the markup of all other pages; keep slots out of the search."""
    if not (own := made_of(page)):
        return html
    if own.view.page.key.startswith("solutions/"):
        root, name = Path(config.config_file_path).parent, f"{own.view.page.key}.html"
        html, tokens = kept(root, name, lambda: notebook_page(html), html)
        page.toc = get_toc(tokens)
    return render.hide(html.replace("</h1>", "</h1>" + own.downloads, 1), own.view.slots)


def on_post_page(output, page, config):
    """Put outputs, figures and formulas into the page."""
    if not (own := made_of(page)):
        return stay_here(output)
    output = render.fill(stay_here(output), own.view.slots)
    formulas = own.view.formulas
    numbers = {name: label.number for name, label in own.view.book.labels.items()}
    return maths.put_maths(output, formulas, [drawn[f.token] for f in formulas], numbers)


def on_post_template(output, template_name, config):
    """Keep pages that are made of a template alone, such as 404, from asking elsewhere."""
    return stay_here(output)


def stay_here(output):
    """Keep Material's script from asking GitHub for the stars of the repository."""
    return output.replace('data-md-component="source"', "")


def notebook_page(html):
    """Return a page of mkdocs-jupyter in the markup of all other pages, and its contents."""
    html = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.S)  # 574 kB for JupyterLab
    soup, out, tokens = BeautifulSoup(html, "html.parser"), [], []
    for head in soup.select("h1, h2, h3"):
        head.select_one("a.anchor-link").decompose()
        title = head.get_text()
        exercise = re.match(r"Exercise (\d+)", title)
        name = head["id"] = f"exercise-{exercise[1]}" if exercise else slugify(title, "-")
        link = f'<a class="headerlink" href="#{name}" title="Link to this place">#</a>'
        head.append(BeautifulSoup(link, "html.parser"))
        tokens.append({"level": int(head.name[1]), "id": name, "name": title, "children": []})
    for cell in soup.select(".jp-Cell[id]"):  # a code cell stands in one more, without
        if code := cell.select_one(".jp-InputArea pre"):
            out.append(LISTING.format(code.decode_contents().strip("\n")))
        shown = ".jp-OutputArea-output, .jp-MarkdownOutput, .jp-RenderedMarkdown"
        out += [text.decode_contents() for text in cell.select(shown)]
    tokens[0]["children"] = [token for token in tokens[1:] if token["level"] == 2]
    return "\n".join(out), tokens[:1]


def kept(root, name, function, needs):
    """Return what `function` makes of what it needs, from the cache if it was made before."""
    key = hashlib.sha256(repr([machinery(), needs]).encode()).hexdigest()
    path = root / run.FOLDER / "pages" / f"{name}.json"
    entry = run.read_entry(path)  # None if it is not there, or damaged
    if not entry or entry["key"] != key:
        run.write_entry(path, {"key": key, "made": function()})
        entry = run.read_entry(path)  # as it will be the next time: no tuples
    return entry["made"]


@functools.cache
def machinery():
    """Return what all that is kept depends on: this folder, and all that is installed."""
    own = [file.read_text("utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    return [*own, run.environment()]


def progress(pages):
    """Return what the executor calls after each cell: a bar on a terminal, else a line a page."""
    done, lock, start = {}, threading.Lock(), time.perf_counter()
    cells = sum(len(run.page_cells(page)) for page in pages)
    bar = tqdm(total=cells, unit="cell", leave=False, disable=None)

    def tell(page, count, total):
        with lock:
            cached = " from the cache" * (page.key not in done)
            bar.update(count - done.get(page.key, 0))
            bar.set_description(f"{page.key} {count}/{total}{cached}")
            done[page.key] = count
            if bar.disable and (cached or count == total):
                seconds = time.perf_counter() - start
                words = f"  {seconds:6.1f} s  {page.key}: {count} of {total} cells{cached}"
                print(words, flush=True)

    return tell


def show_times(runs):
    """Print the seconds of each page, and what of it came from the cache."""
    print(f"  {'page':44}{'cells':>6}{'from cache':>12}{'seconds':>9}")
    for key, done in sorted(runs.items()):
        seconds = sum(done.seconds[done.kept :])
        print(f"  {key:44}{len(done.outputs):6}{done.kept:12}{seconds:9.1f}", flush=True)
