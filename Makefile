PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CSRC := $(wildcard sb3_ppo_ext/*/csrc/*.[ch] sb3_ppo_ext/*/*/csrc/*.[ch])
# Modules are compiled once: environments are installed without bytecode, and tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

# Two test processes on two cores: more threads in each would only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(JOBS),2) --dist loadgroup

# The environment for a target: with what it needs, or the one with everything, if it is there
env = $(or $(wildcard $(VENV)/.all),$(VENV)/.$(1))

.PHONY: demo test test-fast test-cuda test-slow test-simulators fuzz fuzz-zips sanitize evidence docs lint format clean

demo: $(call env,zoo)
	$(BIN)/python scripts/demo.py

test: $(call env,tests)
	$(PYTEST) -m "not slow"

test-fast: $(call env,tests)
	$(PYTEST) -m "not slow and not integration"

# Tests marked `gpu`, with a pretended device; see CONTRIBUTING.md
test-cuda: $(call env,tests)
	PYTHONPATH=.:tests $(PYTEST) -p support.pretended_cuda.plugin -p support.bare_machine tests/engines \
		-m gpu -k "not compiled and not Lstm"

test-slow: $(call env,tests)
	$(PYTEST) -m slow

# The real packages of simulators, in an environment of their own: make test-simulators NAMES="brax pgx"
SIMULATORS := $(or $(SIMENV),.venv-simulators)

test-simulators:
	test -d $(SIMULATORS) || $(PYTHON) -m venv $(SIMULATORS)
	$(SIMULATORS)/bin/python -m pip install --quiet -c constraints.txt -e ".[zoo,jax,export]" \
		"gymnasium[classic-control,mujoco]" -r scripts/simulators.txt
	OMP_NUM_THREADS=1 $(SIMULATORS)/bin/python scripts/test_simulators.py $(NAMES)

# Random programs, and damaged zips: make fuzz N=10000 SEED=0 JOBS=2
FUZZ := PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.fuzzing --seed $(or $(SEED),0) --jobs $(or $(JOBS),2)

fuzz: $(call env,tests)
	$(FUZZ) -n $(or $(N),1000)

fuzz-zips: $(call env,tests)
	$(FUZZ) -n $(or $(N),1000) --zips

sanitize: $(call env,tests)
	scripts/sanitize.sh $(BIN)

# Runs of the benchmark that are missing in benchmark/: days in the background, to be stopped and continued at any time
evidence: $(VENV)/.all $(VENV)/.benchmark
	$(BIN)/python -m pip install --quiet -c constraints.txt -r benchmark/held-out.txt
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python scripts/continue_evidence.py

# The site, in build/site; DOCS_ONLINE=1 adds links to the documentation of SB3, Gymnasium, PyTorch and NumPy.
docs: $(call env,docs)
	$(BIN)/python -m sphinx -W --keep-going -q -c docs/site . build/site
	@echo build/site/index.html

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/.all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# One environment, which grows with what is asked of it. Python compiles what is imported, a tenth of what pip would compile.
$(VENV)/.%: setup.cfg setup.py constraints.txt $(CSRC)
	$(BIN)/python -c "import pip, sys; sys.exit(sys.prefix == sys.base_prefix)" 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) build dist demo *.egg-info
