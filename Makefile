# make train   set up, then train a small GPT on 4 ranks: 2 tensor-parallel x 2 pipeline    (ARGS="--train.steps 50" for more flags)
# make test    set up, then run the tests: TEST_JOBS files at a time, then the tests marked `alone` (ARGS="-k layers")
# make test-fast   set up, then run the tests except slow ones and those marked `alone`: about two minutes
# make test-lowest   the fast tests with the oldest torch and pydantic that pyproject.toml allows, in .venv-lowest
# make test-latest   the fast tests with the newest torch and pydantic, in .venv-latest
# make check   set up, then check format, lint and types
# make docs    set up, then build the documentation site: open site/index.html
# make bench   set up, then run the benchmarks
# make clean   remove the virtual environments, built files and caches; runs/ is kept
#
# The set-up creates .venv with the interpreter PYTHON. If PYTHON can import torch >= 2.10 (for example a CUDA build), .venv
# uses that installation; otherwise the torch of constraints.txt is installed (TORCH_ARGS="--index-url URL" selects another
# source of wheels). Tools run as `python -m NAME`, because a tool that is already installed for PYTHON has no script in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Ranks share the cores, so each gets one thread, unless the caller sets another number.
export OMP_NUM_THREADS ?= 1
# Tests start a hundred processes. Without files of bytecode, each of them would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

HAS_PYTHON := import sys; sys.exit(sys.version_info < (3, 11))
HAS_TORCH  := import re, sys, torch; sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10))
TORCH_HOME := import pathlib, torch; print(pathlib.Path(torch.__file__).resolve().parents[1])
SITE       := import sysconfig; print(sysconfig.get_path("purelib"))
TORCHRUN   := import sys; from torch.distributed.run import main; sys.exit(main())

# All tests of a file run in one process, because they share fixtures. The longest files start first (tests/conftest.py).
TEST_JOBS ?= 2
PARALLEL  := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# Accepts pytest's exit code 5: ARGS may select no test for one of the two phases.
OR_NONE   := || [ $$? -eq 5 ]

.PHONY: train test test-fast test-lowest test-latest check docs bench clean setup

train: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node 4 pretrain/gpt.py --preset tiny --parallel.tp 2 --parallel.pp 2 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not grid and not alone" $(ARGS) $(OR_NONE)
	$(BIN)/python -m pytest -m "alone and not grid" $(ARGS) $(OR_NONE)

test-fast: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not grid and not alone and not slow" $(ARGS)

# These targets install torch in a separate environment, whose Python the set-up then uses, together with that torch.
test-lowest: WANTED := $(shell sed -n 's/^    "\(torch\|pydantic\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml)
test-latest: WANTED := torch pydantic
test-lowest test-latest: test-%:
	[ -x .venv-$*-torch/bin/python ] || $(PYTHON) -m venv .venv-$*-torch
	.venv-$*-torch/bin/python -m pip install --quiet --upgrade $(TORCH_ARGS) $(filter torch%,$(WANTED))
	$(MAKE) --no-print-directory setup VENV=.venv-$* PYTHON=.venv-$*-torch/bin/python
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(filter pydantic%,$(WANTED))
	$(MAKE) --no-print-directory test-fast VENV=.venv-$* PYTHON=.venv-$*-torch/bin/python

check: $(STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

docs: $(STAMP)
	$(BIN)/python -m tests.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(ARGS)

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(HAS_PYTHON)' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then $(MAKE) --no-print-directory .venv-with-torch; else $(MAKE) --no-print-directory .venv-of-its-own; fi
	$(PIP) -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

# The .pth file makes torch visible even if PYTHON itself is in a virtual environment. torchrun must use the python of this .venv.
.PHONY: .venv-with-torch
.venv-with-torch:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	@$(PYTHON) -c '$(TORCH_HOME)' > "$$($(BIN)/python -c '$(SITE)')/torch-already-there.pth"
	@printf '#!%s\n%s\n' "$(abspath $(BIN))/python" '$(TORCHRUN)' > $(BIN)/torchrun && chmod +x $(BIN)/torchrun
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -c 'import torch; print("using the torch that is there:", torch.__version__, torch.__file__)'

# Installs the exact version of torch first: for a range, pip would install the newest, with gigabytes of CUDA libraries.
.PHONY: .venv-of-its-own
.venv-of-its-own:
	$(PYTHON) -m venv $(VENV)
	@cp constraints.txt $(VENV)/constraints.txt
	$(PIP) $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"

clean:
	rm -rf $(VENV) .venv-lowest* .venv-latest* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
