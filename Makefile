# Shortcuts; everything works without make too. See README.md and CONTRIBUTING.md.
export GOTOOLCHAIN := go1.27.3
export CGO_ENABLED := 0

.PHONY: build test ci fuzz soak company policy convert-speed convert-crash nano nano-scores

build:
	go build -o bin/ninfer ./cmd/ninfer

test:
	go test ./...

ci:
	bash .ci/run

# The artifact of the model inside the program, from its checkpoint.
nano:
	bash tools/nano/build.sh

# All held-out prompts; the ordinary test asks a sample.
nano-scores:
	go test -count 1 -v -run 'Skills|Drafts|Perplexity' ./internal/nano -all

# Every fuzz target for FUZZTIME each; hours by hand: make fuzz FUZZTIME=1h. Targets of one package: make fuzz FUZZPKG=./internal/text/parse
# Without a limit of ten tries the first inputs are made smaller for a minute each, and hardly one is new.
FUZZTIME ?= 1m
FUZZPKG ?= ./...
fuzz:
	@for pkg in $$(go list $(FUZZPKG)); do \
	  for f in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$pkg || exit 1; \
	  done; \
	done

# Conversions of generated checkpoints of 4 GiB on the disk of WORK (needs 15 GB): speed beside plain reading and writing and each encoder's
# speed on one core (TO=DIR: write to another disk); and 50 kills and 50 full disks (loop file systems: root on Linux), which take ten minutes to an hour.
WORK ?= /tmp
convert-speed:
	NINFER_CONVERT_SPEED=$(WORK) NINFER_CONVERT_SPEED_TO=$(TO) go test -count=1 -v -run 'TestSpeed' ./internal/convert
	go test -run '^$$' -bench BenchmarkEncoders ./internal/num
convert-crash:
	NINFER_CONVERT_CRASH=$(WORK) go test -count=1 -v -timeout 3h -run 'TestCrash' ./internal/convert

# A server under 212 clients that come and leave for SOAK, built with the race detector, which needs a C compiler: every finished answer
# right, goroutines, memory and pages flat; prints latencies.
SOAK ?= 10m
soak:
	CGO_ENABLED=1 NINFER_SOAK=$(SOAK) go test -race -count=1 -v -timeout 12h -run 'TestSoak' ./internal/server

# COMPANY requests side by side against each alone, 200 on the oracle, and SAMPLES sampled sequences with drafts against their distribution.
COMPANY ?= 50000
SAMPLES ?= 20000
company:
	NINFER_COMPANY=$(COMPANY) NINFER_SAMPLES=$(SAMPLES) go test -count=1 -v -timeout 12h -run 'TestCompany|TestSampledSpeculation' ./internal/engine

# The adaptive draft policy beside fixed numbers of drafts, in tokens a second: POLICY is micro, or an artifact whose drafts mean something,
# PROMPTS a file of prompts that suit it (see the test).
POLICY ?= micro
policy:
	NINFER_POLICY=$(POLICY) NINFER_POLICY_PROMPTS=$(PROMPTS) go test -count=1 -v -timeout 2h -run 'TestAdaptiveAgainstFixed' ./internal/engine
