"""The thin layer between MkDocs and the book: all pages are expanded, run and rendered, then handed over."""

import gc
import hashlib
import json
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
from hooks import assets, expand, maths, parts, render, run  # noqa: E402

gc.set_threshold(1_000_000)  # a build is over before there is garbage worth a search
made, drawn, numbers_of = {}, {}, {}  # from on_files until the pages are built


class Made(NamedTuple):
    """What became of a page: its Markdown (or notebook), and what to put into its HTML."""

    text: str
    slots: dict
    formulas: list
    downloads: str


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
    """Expand, run and render all pages; add notebooks and scripts to `files`."""
    pages, executed = read_pages(root, files)
    keys = [key for key in nav_keys(config.nav) if key == "index" or f"solutions/{key}" in executed]
    numbers = {key: str(n) if n else "" for n, key in enumerate(keys, "index" not in keys)}
    folder = root / run.FOLDER / "pages"
    literature = kept(folder, parts.read_works, (root / "docs/references.bib").read_text(encoding="utf-8"))
    running = [page for page in pages if page.key in executed]
    runs = run.run_pages(root, running, progress(running))
    show_times(runs)
    urls = {page.key: page_url(page.key, files, config) for page in pages}

    def href(start, key, anchor):
        end = urls[key] + (f"#{anchor}" if anchor else "")
        return get_relative_url(end, urls[start]) if start else config.site_url + end.removeprefix("./")

    labels = render.collect_labels(pages, numbers)
    words = {key: sentence for key, (sentence, _) in literature.items()}
    book = render.Book(numbers, labels, words, runs, href)
    made.clear()
    numbers_of.clear()
    numbers_of.update({label: found.number for label, found in labels.items()})
    for page in pages:
        slots, formulas, downloads = render.Slots(), [], ""
        if page.key.startswith("solutions/"):
            text = write_notebook(root, render.site_notebook(page, book, slots, formulas), page, files, config)
        else:
            text = render.page_markdown(page, book, slots, formulas)
        if page.key in executed:
            downloads = add_downloads(root, page, book, literature, files, config)
        if page.key == "references":
            text = text.replace("<!-- references -->", cited_works(pages, book, literature))
        if page.key == "api":
            text = re.sub(r"<!-- names of (\S+) -->", lambda m: parts.list_names((root / m[1]).read_text("utf-8")), text)
        made[page.key] = Made(text, slots, formulas, downloads)
    typeset(root, pages)
    said = set().union(*(text for page in made.values() for text in (page.text, *page.slots.values())))
    locks = "".join((root / name).read_text() for name in ("requirements.txt", "package-lock.json"))
    third_party = kept(folder, lambda _: parts.third_party_markdown(root), locks)
    files.append(File.generated(config, "third-party.md", content=third_party))
    for address, content in assets.npm_files(root, said, drawn.values(), root / run.FOLDER / "fonts").items():
        files.append(File.generated(config, address, content=content))


def read_pages(root, files):
    """Return the expanded pages and the keys of those that run; take their sources from `files`."""
    pages, executed = [], set()
    for file in list(files):
        name, key = f"docs/{file.src_uri}", file.src_uri.rpartition(".")[0]
        if file.src_uri.startswith("solutions/") and file.src_uri.endswith(".py"):
            pages.append(expand.Page(key, name, expand.read_percent(file.content_string, name, root)))
            executed.add(key)
        elif file.src_uri.endswith(".md") and file.abs_src_path:
            body, meta = get_data(file.content_string)
            line = file.content_string.count("\n") - body.count("\n") + 1
            blocks = expand.read_markdown(body, name, root, line)
            cell = next((b for b in blocks if not isinstance(b, expand.Text)), None)
            if meta.get("execute"):
                executed.add(key)
            elif cell:
                raise expand.BookError(name, cell.line, "a cell on a page without `execute: true`")
            pages.append(expand.Page(key, name, blocks))
        if file.src_uri.endswith((".py", ".bib")):
            files.remove(file)
    return pages, executed


def nav_keys(nav):
    """Return the keys of the pages of the navigation, in order."""
    if isinstance(nav, str):
        return [nav.rpartition(".")[0]]
    entries = nav.values() if isinstance(nav, dict) else nav or []
    return [key for entry in entries for key in nav_keys(entry)]


def page_url(key, files, config):
    """Return the address of a page below the site's root."""
    if file := files.get_file_from_path(f"{key}.md"):
        return file.url
    return f"{key}/" if config.use_directory_urls else f"{key}.html"


def write_notebook(root, notebook, page, files, config):
    """Give mkdocs-jupyter the notebook of a solutions page; return its text."""
    folder, text = root / run.FOLDER / "pages", nbformat.writes(notebook)
    path = folder / f"{page.key}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    run.write_whole(path, text)
    files.append(File(f"{page.key}.ipynb", str(folder), config.site_dir, config.use_directory_urls))
    return text


def add_downloads(root, page, book, literature, files, config):
    """Add the notebook and the script of a page; return the links to them as HTML."""
    names = [n for n in book.runs[page.key].files if re.fullmatch(r"snippets/\w+\.py", n)]
    modules = {name: (root / name).read_text(encoding="utf-8") for name in sorted(names)}
    licence = (
        f"From [{config.site_name}]({config.site_url}). Code: MIT licence. Text and figures: "
        "[CC BY-SA 4.0](https://creativecommons.org/licenses/by-sa/4.0/)."
    )
    closing = {"licence": licence, "works": {key: entry for key, (_, entry) in literature.items()}}
    notebook = render.reader_notebook(page, book, modules, closing)
    links = []
    for suffix, words, content in (
        ("ipynb", "Notebook", nbformat.writes(notebook) + "\n"),
        ("py", "Python script", render.script(notebook)),
    ):
        name = f"downloads/{page.key}.{suffix}"
        files.append(File.generated(config, name, content=content))
        address = get_relative_url(name, book.href(None, page.key, "").removeprefix(config.site_url))
        links.append(f'<a href="{address}" download>{words}</a>')
    return f'<p class="book-downloads" data-search-exclude>Take it along: {" · ".join(links)}</p>'


def cited_works(pages, book, literature):
    """Return the list of works for the page of references."""
    cited = {}
    for page in pages:
        label = book.labels.get("sec-" + page.key.removeprefix("solutions/"))
        words = label.text if label else page.key
        words += " (solutions)" if page.key.startswith("solutions/") else ""
        link = f'<a class="book-ref" href="{book.href("references", page.key, "")}">{words}</a>'
        for key in sorted(render.cited(page)):
            cited.setdefault(key, []).append(link)
    return parts.list_works(literature, cited)


def typeset(root, pages):
    """Let KaTeX draw the formulas of all pages."""
    found = [(page, formula) for page in pages for formula in made[page.key].formulas]
    try:
        html = maths.typeset([(f.tex, f.display) for _, f in found], root / run.FOLDER / "maths.json", root)
    except ValueError as error:
        page, formula = found[error.args[0]]
        raise expand.BookError(page.file, formula.line, f"{error.args[1]} in {formula.tex}") from None
    drawn.clear()
    drawn.update({formula.token: text for (_, formula), text in zip(found, html, strict=True)})


def on_page_markdown(markdown, page, config, files):
    """Give the page that was made."""
    key = page.file.src_uri.rpartition(".")[0]
    return made[key].text if key in made and page.file.src_uri.endswith(".md") else markdown


def on_page_content(html, page, config, files):
    """Bring solutions into the markup of all other pages; keep slots out of the search."""
    key = page.file.src_uri.rpartition(".")[0]
    if key not in made:
        return html
    if key.startswith("solutions/"):
        html, tokens = kept(Path(config.config_file_path).parent / run.FOLDER / "pages", notebook_page, html)
        page.toc = get_toc(tokens)
    return render.hide(html.replace("</h1>", "</h1>" + made[key].downloads, 1))


def on_post_page(output, page, config):
    """Put outputs, figures and formulas into the page."""
    key = page.file.src_uri.rpartition(".")[0]
    if key not in made:
        return output
    formulas = made[key].formulas
    output = render.fill(output, made[key].slots)
    return maths.put_maths(output, formulas, [drawn[f.token] for f in formulas], numbers_of)


def notebook_page(html):
    """Return the cells of a page by mkdocs-jupyter in the markup of all other pages, and its contents."""
    html = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.S)  # 574 kB for a whole JupyterLab
    soup, out, tokens = BeautifulSoup(html, "html.parser"), [], []
    for head in soup.select("h1, h2, h3"):
        head.select_one("a.anchor-link").decompose()
        title = head.get_text()
        exercise = re.match(r"Exercise (\d+)", title)
        head["id"] = f"exercise-{exercise[1]}" if exercise else slugify(title, "-")
        link = soup.new_tag("a", href=f"#{head['id']}", title="Link to this place", attrs={"class": "headerlink"})
        link.string = "#"
        head.append(link)
        tokens.append({"level": int(head.name[1]), "id": head["id"], "name": title, "children": []})
    for cell in soup.select(".jp-Cell"):
        if code := cell.select_one(".jp-InputArea pre"):
            rows = code.decode_contents().strip("\n")
            out.append(f'<div class="highlight" data-search-exclude><pre><code>{rows}</code></pre></div>')
            out += [shown.decode_contents() for shown in cell.select(".jp-OutputArea-output")]
        else:
            out += [text.decode_contents() for text in cell.select(".jp-MarkdownOutput, .jp-RenderedMarkdown")]
    tokens[0]["children"] = [token for token in tokens[1:] if token["level"] == 2]
    return "\n".join(out), tokens[:1]


def kept(folder, function, text):
    """Return what `function` makes of a text, from a file in `folder` if it was made before."""
    name = hashlib.sha256((Path(__file__).read_text() + text).encode()).hexdigest()
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or damaged
        made_now = function(text)
        run.write_whole(path, json.dumps(made_now))
        return made_now


def progress(pages):
    """Return what the executor calls after each cell: a bar on a terminal, else a line a page."""
    done, lock, start = {}, threading.Lock(), time.perf_counter()
    bar = tqdm(total=sum(len(run.page_cells(p)) for p in pages), unit="cell", leave=False, disable=None)

    def tell(page, count, total):
        with lock:
            first = page.key not in done
            bar.update(count - done.get(page.key, 0))
            bar.set_description(f"{page.key} {count}/{total}" + " (cache)" * (first and count > 0))
            done[page.key] = count
            if bar.disable and (first or count == total) and not (first and count == total):
                what = f"from cell {count + 1}" if first else "done"
                print(f"  {time.perf_counter() - start:6.1f} s  {page.key}: {what} of {total}", flush=True)

    return tell


def show_times(runs):
    """Print the seconds of each page, and what of it came from the cache."""
    print(f"  {'page':44}{'cells':>6}{'from cache':>12}{'seconds':>9}")
    for key, result in sorted(runs.items()):
        print(f"  {key:44}{len(result.outputs):6}{result.kept:12}{sum(result.seconds[result.kept:]):9.1f}", flush=True)
