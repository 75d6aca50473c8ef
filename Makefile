# make demo    a real vLLM stores its KV cache, ends, and another answers from it
# make test    ruff, mypy, and all tests, a real vLLM among them
# make lint    ruff and mypy only
#
# Each first makes .venv and installs what is missing (minutes, once). PYTHON=... chooses the interpreter (3.11 or later),
# PYTEST=... adds options for pytest, DEMO_JSON=path keeps the demo's figures.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
TORCH_INDEX := https://download.pytorch.org/whl/cpu
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --root-user-action ignore --no-compile --no-deps

# The environment is as new as these files say; its stamp carries their content's name.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml requirements-e2e.txt | cksum | tr ' ' '-')

.PHONY: demo test lint clean

demo: $(STAMP)
	@echo "demo: a real vLLM stores a conversation, ends, and another one answers from storage"
	@$(BIN)/python tools/demo.py

# Everything runs and is told, whatever fails before it; pytest's summary comes last.
test: $(STAMP)
	@status=0; \
	echo "test: ruff and mypy"; $(MAKE) --no-print-directory lint || status=1; \
	echo "test: pytest, a real vLLM included"; \
	$(BIN)/python -m pytest $(PYTEST) || { \
		echo "test: what failed runs once more by itself: deadlines of real processes can fall to a busy machine"; \
		$(BIN)/python -m pytest $(PYTEST) --last-failed --last-failed-no-failures none || status=1; }; \
	exit $$status

lint: $(STAMP)
	@status=0; \
	$(BIN)/ruff check --quiet . || status=1; \
	$(BIN)/ruff format --quiet --check . || status=1; \
	$(BIN)/mypy || status=1; \
	exit $$status

# torch comes first and alone: the usual index has its CPU build, or PyTorch's has.
$(STAMP):
	@echo "install: $(VENV) with $(PYTHON): vLLM for CPU, torch, tools (some minutes, once)"
	@rm -f $(VENV)/installed-*
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@torch=$$(grep '^torch==' requirements-e2e.txt); \
	$(INSTALL) "$$torch" 2>$(VENV)/torch.log || $(INSTALL) --index-url $(TORCH_INDEX) "$$torch" \
	|| { cat $(VENV)/torch.log; exit 1; }
	@$(INSTALL) --requirement requirements-e2e.txt
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
