# Everything runs in .venv, made with any Python 3.11 or later. Each stamp is one installation, done again when
# pyproject.toml or constraints.txt changes.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

STUDIES := reproduce-movielens reproduce-text reproduce-privacy reproduce-ranking reproduce-recommendation \
	reproduce-expressions reproduce-relatives

.PHONY: demo deploy-demo devices-demo check coverage test test-quick test-matrix test-slow test-flower check-examples soak test-web test-browser pictures kill fuzz lint audit lock bench docs clean $(STUDIES)

demo: .venv/demo.stamp
	$(BIN)/fedrecon demo --out demo

# A server and four nodes on this machine, with TLS and keys made for it; one node is killed on the way.
deploy-demo: .venv/deploy.stamp
	$(BIN)/python examples/deploy/demo.py --out deploy-demo

# A coordinator, a helper and fifty devices on this machine, in Python and node.js; STAY=1 goes on so that you can join in
# your browser. Without npm there are fewer kinds of devices, and no page.
devices-demo: .venv/devices.stamp build/web.stamp
	$(BIN)/python examples/devices/demo.py --out devices-demo $(if $(STAY),--stay)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

# While working: lint, types and the tests that compile little, in less than a minute.
check: .venv/dev.stamp
	@$(MAKE) --no-print-directory -j 2 lint test-quick

test-quick: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' @tests/quick.txt

# The quick tests on every supported Python that is on the PATH or under pyenv, each in its own virtualenv.
VERSIONS ?= 3.11 3.12 3.13
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
test-matrix:
	@for version in $(VERSIONS); do \
	  for python in python$$version $(PYENV)/$$version.*/bin/python none; do $$python -c '' 2> /dev/null && break; done; \
	  if [ $$python = none ]; then echo "skipped: there is no Python $$version"; continue; fi; \
	  bin=build/venv-$$version/bin; echo "== $$($$python --version)"; \
	  $$python -m venv build/venv-$$version || exit 1; \
	  $$bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ./src-device -e '.[dev]' || exit 1; \
	  $$bin/python -m pytest -n 2 --dist loadfile -m 'not slow' @tests/quick.txt || exit 1; \
	done

# Coverage of the tests that are not slow, by line and branch; the table is of files that are not covered.
coverage: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' --cov --cov-branch --cov-report=term

test-slow: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 -m slow

# 100 rounds of a deployment on this machine: memory and files must not grow. Then with ten kills of the coordinator.
soak: .venv/dev.stamp
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak.py --kills 10

# Gateways and silos over stock Flower, each version in a virtualenv of its own: its pins are not ours. Where the index
# lacks one of them, with those of the newest version that can be installed.
FLOWER ?= 1.41.0 1.42.0
test-flower: .venv/dev.stamp
	@for version in $(FLOWER); do \
	  bin=$(CURDIR)/build/flower-$$version/bin; $(PYTHON) -m venv build/flower-$$version || exit 1; \
	  install="$$bin/python -m pip install --quiet --disable-pip-version-check"; \
	  $$install flwr==$$version || { $$install flwr && $$install --no-deps flwr==$$version; } || exit 1; \
	  echo "== flwr $$version"; \
	  FEDRECON_FLOWER_BIN=$$bin $(BIN)/python -m pytest -m 'slow or not slow' tests/test_deploy_flower.py || exit 1; \
	done

# The examples' files by the schemas of Compose and Kubernetes, in a virtualenv of its own: they have 100 MB.
check-examples:
	$(PYTHON) -m venv build/validators
	build/validators/bin/python -m pip install --quiet --disable-pip-version-check check-jsonschema kubernetes-validate
	build/validators/bin/check-jsonschema --builtin-schema vendor.compose-spec examples/*/compose.yaml
	build/validators/bin/kubernetes-validate --strict examples/*/kubernetes.yaml

# Kills a training with kill -9 at its file operations, and compares bits in the end.
kill: .venv/dev.stamp
	$(BIN)/python tests/kill.py --kills 50

# Damaged files of every kind, longer than the tests try them.
fuzz: .venv/dev.stamp
	FEDRECON_FUZZ_CASES=$${FEDRECON_FUZZ_CASES:-3000} $(BIN)/python -m pytest -n 2 tests/test_fuzz*.py

# The page: types by tsc, tests by node's own runner. Where there is no npm, that is said.
test-web: build/web.stamp
	@if [ -d tests/web/node_modules ]; then cd tests/web && npx tsc -p tsconfig.json && node --test .; \
	else echo 'skipped: the tests of the page need npm and its packages'; fi

# The page in the distribution's Chromium. Where there is none and we may, it is installed; else the tests say so.
CHROMIUM := chromium chromium-browser google-chrome
APT := apt-get install -qq -y --no-install-recommends chromium
test-browser: .venv/browser.stamp build/web.stamp
	@for name in $(CHROMIUM); do ! command -v $$name > /dev/null || exit 0; done; \
	  [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || \
	  $(APT) > /dev/null 2>&1 || { apt-get update -qq && $(APT) > /dev/null; } || echo 'Chromium could not be installed'
	FEDRECON_AXE=tests/web/node_modules/axe-core/axe.min.js \
	FEDRECON_ONNXRUNTIME_WEB=tests/web/node_modules/onnxruntime-web/dist \
	  $(BIN)/python -m pytest -n 2 --dist worksteal -rs tests/browser || [ $$? = 5 ]  # 5: all of them were skipped

# The pictures of docs/device.md, from a whole demo and a short training on clicks.
pictures: export FEDRECON_SCREENSHOTS = docs/figures/device
pictures: export FEDRECON_RUN = demo
pictures: export FEDRECON_CLICKS_RUN = build/clicks
pictures: demo build/clicks test-browser

build/clicks: .venv/demo.stamp
	$(BIN)/fedrecon train movielens-small --task clicks --rounds 60 --out $@

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# That what is installed fits together. Known faults are looked up where pip-audit is installed and reaches its list.
audit: .venv/dev.stamp
	$(BIN)/python -m pip check
	@if $(BIN)/python -c 'import pip_audit' 2>/dev/null; then $(BIN)/python -m pip_audit; \
	else echo 'pip-audit is not installed: known faults were not looked up'; fi

# All packages of development with their digests, for this Python and machine; see SECURITY.md.
lock: .venv/bin/python
	mkdir -p build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
	  --report build/report.json -c constraints.txt ./src-device '.[dev]'
	$(BIN)/python .ci/lock.py build/report.json requirements-dev.txt

bench: .venv/dev.stamp
	$(BIN)/python benchmarks/run.py

# The paper's tables and figures, and ours: make reproduce-movielens DATA=ml-1m.zip
DATA ?= movielens-1m
OUT ?= build/$@
$(STUDIES): reproduce-%: .venv/dev.stamp
	$(BIN)/python -m studies $* --data $(DATA) --out $(OUT)

# The theme announces its successor at every start; that is no warning about this site.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

clean:
	rm -rf .venv demo deploy-demo devices-demo site build .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("fedrecon needs Python 3.11 or later, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml src-device/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ./src-device -e '.[datasets]'
	touch $@

.venv/deploy.stamp: pyproject.toml src-device/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ./src-device -e '.[deploy,datasets]'
	touch $@

.venv/devices.stamp: pyproject.toml src-device/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e './src-device[train]' -e '.[deploy,datasets,device]'
	touch $@

.venv/dev.stamp: pyproject.toml src-device/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ./src-device -e '.[dev]'
	touch $@ .venv/demo.stamp .venv/deploy.stamp .venv/devices.stamp

# What cannot be installed is said, and the tests that need it are skipped with a reason.
.venv/browser.stamp: .venv/dev.stamp
	@if $(PIP) playwright; then touch $@; else echo 'playwright could not be installed'; fi

build/web.stamp: tests/web/package.json
	@mkdir -p build
	@if ! command -v npm > /dev/null; then echo 'there is no npm'; \
	elif (cd tests/web && npm install --no-audit --no-fund --silent); then touch $@; \
	else echo 'the packages of tests/web could not be installed'; fi

.venv/docs.stamp: pyproject.toml src-device/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ./src-device -e '.[docs]'
	touch $@
